package integration

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/lb"
)

// A backend that closes idle connections after a second costs no request, though requests
// come just when it does: a connection is looked at before it is used, and given up in time
// once it is known when the backend closes it. That no POST is lost before that is a matter
// of microseconds, and not asked for.
func TestIdleLimitOfTheBackendCostsNothing(t *testing.T) {
	t.Parallel()
	backend := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }))
	backend.Config.IdleTimeout = time.Second
	backend.Start()
	defer backend.Close()
	pool, err := lb.New(lb.Targets(backend.URL), lb.WithPassiveHealth(lb.PassiveHealth{Failures: -1}))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var gets, posts, early atomic.Int64 // that failed
	var clients sync.WaitGroup
	for i := range 40 {
		clients.Go(func() {
			method := []string{"GET", "POST"}[i%2]
			for range 25 {
				learned := pool.Stats().Backends[0].Connections.ClosedByBackend >= 3
				err := ask(pool, method)
				switch {
				case err == nil:
				case method == "GET":
					gets.Add(1)
					t.Log(err)
				case learned:
					posts.Add(1)
					t.Log(err)
				default:
					early.Add(1)
				}
				time.Sleep(900*time.Millisecond + rand.N(200*time.Millisecond))
			}
		})
	}
	clients.Wait()
	if gets.Load() > 0 || posts.Load() > 0 {
		t.Errorf("%d of 500 GETs failed, and %d of 500 POSTs once the limit was known (%d before), want none", gets.Load(), posts.Load(), early.Load())
	}
	s := pool.Stats().Backends[0]
	if s.Connections.ClosedByBackend == 0 {
		t.Errorf("%+v: want some that the backend has closed", *s.Connections)
	}
	t.Logf("connections %+v, %d retries, %d POSTs failed before", *s.Connections, s.Retries, early.Load())
}

func ask(pool *lb.Pool, method string) error {
	r, err := http.NewRequest(method, "http://x/", io.NopCloser(strings.NewReader("body")))
	if err != nil {
		return err
	}
	resp, err := pool.RoundTrip(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || string(b) != "body" || resp.StatusCode != 200 {
		return fmt.Errorf("answer = %d %q, %w", resp.StatusCode, b, err)
	}
	return nil
}

// 500 clients at once open few more than 500 connections, however long they go on
// (caddyserver/caddy#938, golang/go#6785, stripe/veneur PR#516).
func TestManyClientsShareConnections(t *testing.T) {
	t.Parallel()
	var accepted atomic.Int64
	backend := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }))
	backend.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			accepted.Add(1)
		}
	}
	backend.Start()
	defer backend.Close()
	pool, err := lb.New(lb.Targets(backend.URL))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	front := httptest.NewServer(pool)
	defer front.Close()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 500}}
	defer client.CloseIdleConnections()

	const clients, atMost = 500, 520
	end := time.Now().Add(10 * time.Second)
	var requests, failed atomic.Int64
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for time.Now().Before(end) {
				requests.Add(1)
				resp, err := client.Get(front.URL)
				if err != nil {
					failed.Add(1)
					continue
				}
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != 200 {
					failed.Add(1)
				}
			}
		})
	}
	all.Wait()
	s := pool.Stats().Backends[0].Connections
	if n := accepted.Load(); n > atMost || failed.Load() > 0 {
		t.Errorf("%d clients opened %d connections, want at most %d; %d of %d requests failed", clients, n, atMost, failed.Load(), requests.Load())
	}
	t.Logf("%d requests, connections %+v", requests.Load(), *s)
}
