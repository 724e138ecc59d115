package lb_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// An upgrade that cannot be carried out is answered and leaves nothing open: the
// writer cannot be taken over, or the backend switches to something else.
func TestFailedUpgradesLeaveNothingOpen(t *testing.T) {
	for name, tt := range map[string]struct {
		ask, get string
		wrap     func(http.Handler) http.Handler
		failures int64 // that the backend is to blame for
	}{
		"a writer that cannot be taken over": {ask: "echo", get: "echo", wrap: func(h http.Handler) http.Handler { return http.TimeoutHandler(h, time.Minute, "") }},
		"another protocol":                   {ask: "chat", get: "echo", failures: 10},
		"nobody asked":                       {get: "echo", failures: 10},
		"no protocol":                        {ask: "echo", get: "", failures: 10},
	} {
		bubble(t, name, func(t *testing.T) {
			switches := lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				c, rw, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", tt.get)
				io.Copy(c, rw)
			}))
			r := newRig(t, []lbtest.Behavior{switches}, noEjection(), upgradesTo("echo", "chat"))
			if tt.wrap != nil {
				r.server.Handler = tt.wrap(r.pool)
			}
			for range 10 {
				var fields []string
				if tt.ask != "" {
					fields = []string{"Connection", "Upgrade", "Upgrade", tt.ask}
				}
				r.wantStatus(r.must("POST", "", nil, fields...), 502)
			}
			synctest.Wait()
			if n := r.backends[0].OpenConns(); n != 0 {
				t.Errorf("%d connections are open", n)
			}
			s := r.pool.Stats()
			if s.Failures != 10 || s.Backends[0].Failures != tt.failures {
				t.Errorf("failures = %d, of the backend %d; want 10 and %d", s.Failures, s.Backends[0].Failures, tt.failures)
			}
			r.wantIdle()
		})
	}
}

func upgradesTo(protocols ...string) lb.Option {
	return lb.WithUpgrades(lb.Upgrades{Protocols: protocols})
}

// A handshake goes to another backend like any request (traefik/traefik PR#3825). Its
// tunnel passes bytes both ways and counts as in flight until it has ended.
func TestUpgradeThroughServeHTTP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Handle(http.HandlerFunc(echoUpgrade))}, upgradesTo("echo"))
		for range 50 {
			c := r.dial()
			fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			br := bufio.NewReader(c)
			resp, err := http.ReadResponse(br, nil)
			if err != nil || resp.StatusCode != 101 {
				t.Fatalf("answer = %v, %v", resp, err)
			}
			fmt.Fprint(c, "ping")
			b := make([]byte, 4)
			if _, err := io.ReadFull(br, b); err != nil || string(b) != "ping" {
				t.Errorf("echo = %q, %v", b, err)
			}
			if n := r.pool.Stats().InFlight; n != 1 {
				t.Errorf("in flight = %d with an open tunnel", n)
			}
			c.Close()
			synctest.Wait()
			r.wantIdle()
		}
	})
}

// A middleware reads after the request who was tried, how long the headers took
// and how it ended, also if the answer broke off.
func TestRecordTellsWhatBecameOfARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			linger(time.Second)
			w.WriteHeader(201)
			http.NewResponseController(w).Flush()
			linger(2 * time.Second)
			panic(http.ErrAbortHandler)
		}))
		r := newRig(t, []lbtest.Behavior{lbtest.Reset(), slow}, lb.WithBalancer(lb.BalancerFunc(first)))
		var got []lb.AttemptRecord
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			ctx, rec := lb.Record(req.Context())
			defer func() { got = rec.Attempts() }()
			r.pool.ServeHTTP(w, req.WithContext(ctx))
		})
		r.do("GET", "", nil)
		synctest.Wait()
		if len(got) != 2 {
			t.Fatalf("attempts = %+v", got)
		}
		one, two := got[0].Outcome, got[1].Outcome
		if one.Stage != lb.StageResponse || one.Cause != lb.CauseReset || one.Final || one.Attempt != 1 || one.SentBytes == 0 {
			t.Errorf("first attempt = %+v", one)
		}
		if !two.Final || two.Stage != lb.StageBody || two.Cause != lb.CauseReset || two.Status != 201 || two.Wait != time.Second || two.Total != 3*time.Second || two.Attempt != 2 || two.ReceivedBytes == 0 {
			t.Errorf("second attempt = %+v", two)
		}
		if got[1].Backend != r.backends[1].URL() {
			t.Errorf("backend = %q", got[1].Backend)
		}
	})
}
