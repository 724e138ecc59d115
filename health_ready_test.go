package lb_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// A backend is used before anything is known of it, Ready tells when all have been
// probed, and from then on no request meets one that hangs (caddyserver/caddy#6410,
// traefik/traefik#4544, dotnet/yarp PR#2415, siderolabs/go-loadbalancer PR#24).
func TestReadyAfterTheFirstRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		check := everySecond()
		r := newBackends(t, 2)
		r.backends[0].Set(lbtest.Hang())
		for _, b := range r.backends {
			b.SetProbe(probePath, lbtest.Delay(100*time.Millisecond))
		}
		r.backends[0].SetProbe(probePath, lbtest.Hang())
		r.startPool(lb.WithHealthCheck(check))
		unready := serve(r.pool.ReadyHandler(), "/")
		if unready.Code != 503 || !strings.Contains(unready.Body.String(), "of 2 targets 2 have no verdict yet") {
			t.Errorf("ReadyHandler answers %d %q before the first round", unready.Code, unready.Body)
		}
		if st := r.pool.Backends()[1].Status(); st.Health != lb.HealthUnknown || !st.Usable() {
			t.Errorf("before the first verdict: %+v, want unknown and usable", st)
		}
		within(t, check.Timeout, func() {
			if err := r.pool.Ready(t.Context()); err != nil {
				t.Error(err)
			}
		})
		r.wantStates("unhealthy healthy")
		if ready := serve(r.pool.ReadyHandler(), "/"); ready.Code != 200 {
			t.Errorf("ReadyHandler answers %d %q after the first round", ready.Code, ready.Body)
		}
		within(t, 0, func() {
			for range 100 {
				r.wantStatus(r.must("POST", "", strings.NewReader("x")), 200)
			}
		})
	})
}

// The first request need not wait for the first probe.
func TestUnknownBackendsAreUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		r.backends[0].SetProbe(probePath, lbtest.Hang())
		r.startPool(lb.WithHealthCheck(everySecond()))
		within(t, 0, func() { r.wantStatus(r.must("GET", "", nil), 200) })
		r.wantStates("unknown")
	})
}

// Ready ends with its context, the reason and the pool; without probes it does not
// wait.
func TestReadyEnds(t *testing.T) {
	bubble(t, "with its context", func(t *testing.T) {
		r := newBackends(t, 1)
		r.fail(0)
		r.startPool(lb.WithHealthCheck(everySecond()), lb.WithFailClosed())
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		err := r.pool.Ready(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "of 1 targets 1 unhealthy") {
			t.Errorf("Ready = %v", err)
		}
		if got := serve(r.pool.ReadyHandler(), "/"); got.Code != 503 || got.Header().Get("Retry-After") == "" || strings.Contains(got.Body.String(), "198.18") {
			t.Errorf("ReadyHandler answers %d %q %v", got.Code, got.Body, got.Header())
		}
	})
	bubble(t, "when a backend recovers", func(t *testing.T) {
		r := newBackends(t, 1)
		r.fail(0)
		r.startPool(lb.WithHealthCheck(everySecond()), lb.WithFailClosed())
		time.AfterFunc(10*time.Second, func() { r.pass(0) })
		within(t, 13*time.Second, func() {
			if err := r.pool.Ready(t.Context()); err != nil {
				t.Errorf("Ready = %v", err)
			}
		})
	})
	for name, end := range map[string]func(*lb.Pool){
		"with Close":    func(p *lb.Pool) { p.Close() },
		"with Shutdown": func(p *lb.Pool) { p.Shutdown(context.Background()) },
	} {
		bubble(t, name, func(t *testing.T) {
			r := newBackends(t, 1)
			r.backends[0].SetProbe(probePath, lbtest.Hang())
			r.startPool(lb.WithHealthCheck(everySecond()))
			time.AfterFunc(100*time.Millisecond, func() { end(r.pool) })
			if err := r.pool.Ready(t.Context()); !errors.Is(err, lb.ErrClosed) {
				t.Errorf("Ready = %v, want ErrClosed", err)
			}
			if got := serve(r.pool.ReadyHandler(), "/"); got.Code != 503 {
				t.Errorf("ReadyHandler answers %d after the end", got.Code)
			}
		})
	}
	bubble(t, "when all have failed, if the pool fails open", func(t *testing.T) {
		r := newBackends(t, 2)
		r.fail(0)
		r.fail(1)
		r.startPool(lb.WithHealthCheck(everySecond()))
		if err := r.pool.Ready(t.Context()); err != nil {
			t.Errorf("Ready = %v", err)
		}
		r.wantStates("unhealthy unhealthy")
		if got := serve(r.pool.ReadyHandler(), "/"); got.Code != 200 || got.Body.String() != "ready, failing open: of 2 targets 2 unhealthy\n" {
			t.Errorf("ReadyHandler answers %d %q", got.Code, got.Body)
		}
		for _, name := range []string{"a", "b"} {
			setState(t, r.pool, name, lb.Draining)
		}
		if got := serve(r.pool.ReadyHandler(), "/"); got.Code != 503 {
			t.Errorf("ReadyHandler answers %d %q with all backends draining", got.Code, got.Body)
		}
	})
	bubble(t, "at once without probes", func(t *testing.T) {
		pool := newPool(t, manyTargets(2))
		defer pool.Close()
		if err := pool.Ready(t.Context()); err != nil {
			t.Errorf("Ready = %v", err)
		}
	})
}

// Backends that join do not make a pool unready, but Ready waits for them.
func TestReadyWithNewBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newProbedRig(t, 2, everySecond())
		r.after(time.Millisecond)
		r.backends[1].SetProbe(probePath, lbtest.Delay(400*time.Millisecond))
		a, b := r.targets()[0], r.targets()[1]
		for _, targets := range [][]lb.Target{{a}, {a, b}} {
			if err := r.pool.SetTargets(targets); err != nil {
				t.Fatal(err)
			}
			if err := r.pool.Ready(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.pool.SetTargets([]lb.Target{a, {Name: "c", URL: b.URL}}); err != nil {
			t.Fatal(err)
		}
		if got := serve(r.pool.ReadyHandler(), "/"); got.Code != 200 {
			t.Errorf("ReadyHandler answers %d %q while a new backend is probed", got.Code, got.Body)
		}
		began := time.Now()
		if err := r.pool.Ready(t.Context()); err != nil || time.Since(began) != 400*time.Millisecond {
			t.Errorf("Ready = %v after %v, want nil once the new backend was probed", err, time.Since(began))
		}
	})
}
