package lb_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Drain returns when nothing is in flight on the backend, whose WebSockets are asked
// to leave; it cuts nothing and touches nobody else.
func TestDrainWaitsForWhatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		behavior := lbtest.When(func(r *http.Request) bool { return r.URL.Path == "/chat" }, leaving(t), lbtest.Delay(50*time.Second))
		r := newRig(t, []lbtest.Behavior{behavior, behavior}, closeSpread(2*time.Second), lb.WithBalancer(lb.BalancerFunc(first)))
		a, b := r.backends[0].URL(), r.backends[1].URL()
		var wg sync.WaitGroup
		e := r.tunnel()
		wg.Go(func() { r.wantStatus(r.must("GET", "", nil), 200) })
		synctest.Wait()
		wg.Go(func() { e.leaves(t) })

		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		began := time.Now()
		err := r.pool.Drain(ctx, a)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "attempts in flight (1)") || time.Since(began) != 10*time.Second {
			t.Errorf("Drain = %v after %v, want that 1 attempt is in flight after 10 s", err, time.Since(began))
		}
		other := r.tunnel() // to the other backend
		if err := r.pool.Drain(t.Context(), a); err != nil || time.Since(began) != 50*time.Second {
			t.Errorf("Drain = %v after %v, want nil after 50 s", err, time.Since(began))
		}
		wg.Wait()
		if n := r.pool.Stats().InFlight; n != 1 {
			t.Errorf("in flight = %d, want the other backend's WebSocket", n)
		}
		if err := r.pool.SetState(a, lb.Active); err != nil {
			t.Fatal(err)
		}
		again := r.tunnel()
		advance(time.Hour) // nobody is asked any more
		if s := r.pool.Stats(); s.InFlight != 2 || s.Backends[0].InFlight != 1 {
			t.Errorf("in flight = %d, %d of them on %s; want 2 and 1", s.InFlight, s.Backends[0].InFlight, a)
		}
		for _, e := range []*tunnelEnd{other, again} {
			wg.Go(func() { e.leaves(t) })
		}
		for _, name := range []string{a, b} {
			wg.Go(func() {
				if err := r.pool.Drain(t.Context(), name); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if err := r.pool.Drain(t.Context(), "nobody"); err == nil || !strings.Contains(err.Error(), `"nobody"`) {
			t.Errorf("Drain of an unknown backend = %v", err)
		}
		r.wantIdle()
		r.pool.Close()
		if err := r.pool.Drain(t.Context(), a); !errors.Is(err, lb.ErrClosed) {
			t.Errorf("Drain after Close = %v", err)
		}
	})
}

// A backend that is active again keeps its WebSockets, and nobody waits for it.
func TestReactivationEndsADrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) { io.Copy(e, e.br) })}, closeSpread(time.Hour))
		name := r.backends[0].URL()
		e := r.tunnel()
		var wg sync.WaitGroup
		wg.Go(func() {
			within(t, 0, func() {
				if err := r.pool.Drain(t.Context(), name); err == nil || !strings.Contains(err.Error(), "not draining any more") {
					t.Errorf("Drain = %v", err)
				}
			})
		})
		synctest.Wait()
		setState(t, r.pool, name, lb.Active)
		wg.Wait()
		again := r.tunnel()
		advance(3 * time.Hour)
		for _, e := range []*tunnelEnd{e, again} {
			io.WriteString(e, "still here")
			e.want(t, "still here")
			e.Close()
		}
	})
}

// SetState that comes in the middle of Drain has the last word.
func TestDrainAndSetStateAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pool *lb.Pool
		var once sync.Once
		r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) { io.Copy(io.Discard, e) })},
			lb.WithLogger(onRecord(func(record slog.Record) {
				if record.Message == "backend state changed" {
					once.Do(func() { setState(t, pool, pool.Backends()[0].Name(), lb.Active) })
				}
			})))
		pool = r.pool
		if err := pool.Drain(t.Context(), r.backends[0].URL()); err != nil {
			t.Error(err)
		}
		e := r.tunnel()
		advance(time.Hour)
		if n := pool.Stats().InFlight; n != 1 {
			t.Errorf("in flight = %d: a WebSocket of an active backend was ended", n)
		}
		e.Close()
	})
}

// onRecord is a logger that calls f.
func onRecord(f func(slog.Record)) *slog.Logger {
	return slog.New(recordHandler{slog.DiscardHandler, f})
}

type recordHandler struct {
	slog.Handler
	f func(slog.Record)
}

func (h recordHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h recordHandler) Handle(_ context.Context, r slog.Record) error { h.f(r); return nil }

// A request that has picked the backend when Drain begins either counts, or picks
// another one.
func TestDrainMissesNoRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		picked, goOn := make(chan bool, 9), make(chan bool)
		r := newRig(t, answers(2), lb.WithBalancer(lb.BalancerFunc(func(_ *http.Request, c []*lb.Backend) *lb.Backend {
			if len(picked) == 0 {
				picked <- true
				<-goOn
			}
			return c[0]
		})))
		var wg sync.WaitGroup
		wg.Go(func() {
			if a := r.must("POST", "", strings.NewReader("x")); a.backend() != "b" {
				t.Errorf("served by %q, want b", a.backend())
			}
		})
		synctest.Wait()
		if err := r.pool.Drain(t.Context(), r.backends[0].URL()); err != nil {
			t.Error(err)
		}
		close(goOn)
		wg.Wait()
		if n := r.backends[0].Count(); n != 0 {
			t.Errorf("%d requests reached a after Drain", n)
		}
		r.wantIdle()
	})
}

// Drain and Shutdown do not wait for an answer that Close has cut and nobody reads.
func TestCloseEndsDrainAndShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Stream(1000, time.Second)})
		req, _ := http.NewRequest("GET", "http://x/", nil)
		resp, err := r.pool.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := r.pool.Drain(context.Background(), r.backends[0].URL()); !errors.Is(err, lb.ErrClosed) {
				t.Errorf("Drain = %v", err)
			}
		})
		wg.Go(func() {
			if err := r.pool.Shutdown(context.Background()); err != nil {
				t.Errorf("Shutdown = %v", err)
			}
		})
		synctest.Wait()
		r.pool.Close()
		wg.Wait()
		resp.Body.Close()
	})
}
