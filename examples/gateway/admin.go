package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"example.com/lb"
)

// adminHandler serves what the operator wants to know. Once ctx has ended, the
// gateway is about to end too and says that it is not ready.
func adminHandler(ctx context.Context, pool *lb.Pool) http.Handler {
	ready := pool.ReadyHandler()
	mux := http.NewServeMux() // answers other methods with 405 and other paths with 404
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		out := json.NewEncoder(w)
		out.SetIndent("", "  ")
		_ = out.Encode(statsOf(pool.Stats())) // fails only if the client has left
	})
	// Whether the process lives: it serves this, so it does.
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		fmt.Fprintln(w, "ok")
	})
	// Whether requests should be sent here.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if ctx.Err() != nil {
			http.Error(w, "not ready: shutting down", http.StatusServiceUnavailable)
			return
		}
		ready.ServeHTTP(w, r)
	})
	return mux
}

// stats is what /stats shows. Its keys are stable.
type stats struct {
	Algorithm string `json:"algorithm"`
	// HealthyBackends is how many get requests, those included of which nothing is
	// known yet.
	HealthyBackends int `json:"healthy_backends"`
	TotalBackends   int `json:"total_backends"`
	// Requests counts those that came, Failures those that no backend answered, Cut
	// those whose answer a backend broke off, ClientClosed those whose client left;
	// Retries counts attempts beyond the first, InFlight attempts under way.
	Requests     int64          `json:"requests"`
	Failures     int64          `json:"failures"`
	Cut          int64          `json:"cut"`
	ClientClosed int64          `json:"client_closed"`
	Retries      int64          `json:"retries"`
	InFlight     int64          `json:"in_flight"`
	Backends     []backendStats `json:"backends"`
}

// backendStats is what /stats shows of one backend. Its requests are attempts.
type backendStats struct {
	Name      string    `json:"name"` // as in the log
	URL       string    `json:"url"`
	Healthy   bool      `json:"healthy"` // gets requests
	State     string    `json:"state"`   // in one word, for example unknown or ejected
	Reason    string    `json:"reason,omitempty"`
	Since     time.Time `json:"since"`
	Requests  int64     `json:"requests"`
	Failures  int64     `json:"failures"`
	InFlight  int64     `json:"in_flight"`
	LastError string    `json:"last_error,omitempty"`
	// Probe is what the last probe found and how long it took; absent before it.
	Probe *lb.ProbeStats `json:"probe,omitempty"`
}

func statsOf(s lb.Stats) stats {
	out := stats{
		Algorithm:       s.Strategy,
		HealthyBackends: s.Usable,
		TotalBackends:   len(s.Backends),
		Requests:        s.Requests,
		Failures:        s.Failures,
		Cut:             s.Cut,
		ClientClosed:    s.ClientClosed,
		Retries:         s.Retries,
		InFlight:        s.InFlight,
		Backends:        make([]backendStats, len(s.Backends)),
	}
	for i, b := range s.Backends {
		out.Backends[i] = backendStats{
			Name: b.Name, URL: b.URL,
			Healthy: b.Usable, State: b.State, Reason: b.Reason, Since: b.Since,
			Requests: b.Requests, Failures: b.Failures, InFlight: b.InFlight,
			LastError: b.LastError, Probe: b.Probe,
		}
	}
	return out
}
