package lb_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Probes amid user code that misbehaves and changes that come at a bad moment.

// nilError is the error that a nil pointer of it makes, whose text cannot be had.
type nilError struct{ text string }

func (e *nilError) Error() string { return e.text }

// callingError calls a function when it is asked for its text.
type callingError struct{ call func() }

func (e callingError) Error() string { e.call(); return "called" }

// The error of a Checker is user code as well: it may panic, and it may call the pool.
func TestErrorsOfCheckersAreContained(t *testing.T) {
	bubble(t, "a nil pointer", func(t *testing.T) {
		pool := newPool(t, manyTargets(1), lb.WithChecker(lb.CheckerFunc(func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			var e *nilError
			return lb.VerdictUnhealthy, e
		})))
		defer pool.Close()
		advance(time.Minute)
		s := pool.Stats()
		if b := s.Backends[0]; b.State != "unhealthy" || b.Probe.Count < 20 || s.Panics == 0 || !strings.Contains(b.Probe.Error, "nilError") {
			t.Errorf("backend = %+v, probe %+v, panics = %d", b, b.Probe, s.Panics)
		}
	})
	bubble(t, "one that calls the pool", func(t *testing.T) {
		var pool *lb.Pool
		ready := make(chan struct{})
		pool = newPool(t, manyTargets(1), lb.WithChecker(lb.CheckerFunc(func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			<-ready
			return lb.VerdictUnhealthy, callingError{func() { pool.SetState("t0", lb.Draining) }}
		})))
		close(ready)
		advance(time.Minute)
		if st := pool.Backends()[0].Status(); st.String() != "draining" {
			t.Errorf("state = %v", st)
		}
		pool.Close()
	})
	bubble(t, "a very long one", func(t *testing.T) {
		pool := newPool(t, manyTargets(1), lb.WithChecker(lb.CheckerFunc(func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			return 0, fmt.Errorf("%s", text(1<<20))
		})))
		defer pool.Close()
		synctest.Wait()
		if n := len(pool.Stats().Backends[0].Probe.Error); n > 1000 {
			t.Errorf("%d bytes of an error are kept", n)
		}
	})
}

// So is that of a RoundTripper: a request that it fails comes to its end.
func TestErrorsOfTransportsAreContained(t *testing.T) {
	pool := newPool(t, lb.Targets("http://a.test"), lb.WithTransport(roundTripperFunc(func(*http.Request) (*http.Response, error) {
		var e *nilError
		return nil, e
	})))
	defer pool.Close()
	if got := serve(pool, "/"); got.Code != 502 {
		t.Errorf("answer = %d, want 502", got.Code)
	}
	if s := pool.Stats(); s.InFlight != 0 || s.Panics == 0 {
		t.Errorf("in flight = %d, panics = %d", s.InFlight, s.Panics)
	}
}

// A probe that was under way when what it asks for changed says nothing; the first
// one after the change decides.
func TestProbeBeforeAChangeSaysNothing(t *testing.T) {
	bubble(t, "of HealthURL", func(t *testing.T) {
		r := newBackends(t, 1)
		s, logged := newStory()
		old := r.net.NewBackend(t, "old")
		old.SetProbe(probePath, lbtest.Hang())
		target := r.targets()[0]
		target.HealthURL = old.URL()
		r.start([]lb.Target{target}, lb.WithHealthCheck(everySecond()), logged)
		r.after(100 * time.Millisecond)
		target.HealthURL = ""
		if err := r.pool.SetTargets([]lb.Target{target}); err != nil {
			t.Fatal(err)
		}
		r.after(5 * time.Second)
		s.want(t, "0 a unknown to healthy: probe passed")
	})
	bubble(t, "of HealthURL, the other way round", func(t *testing.T) {
		r := newBackends(t, 1)
		r.fail(0)
		old := r.net.NewBackend(t, "old")
		old.SetProbe(probePath, lbtest.Delay(400*time.Millisecond))
		target := r.targets()[0]
		target.HealthURL = old.URL()
		check := everySecond()
		check.Interval = time.Minute
		r.start([]lb.Target{target}, lb.WithHealthCheck(check))
		r.after(100 * time.Millisecond)
		target.HealthURL = ""
		if err := r.pool.SetTargets([]lb.Target{target}); err != nil {
			t.Fatal(err)
		}
		r.after(time.Second)
		r.wantStates("unhealthy")
	})
	bubble(t, "of the state", func(t *testing.T) {
		r := newBackends(t, 1)
		r.backends[0].SetProbe(probePath, lbtest.Hang())
		r.startPool(lb.WithHealthCheck(lb.HealthCheck{Path: probePath, Interval: 10 * time.Second, Timeout: 5 * time.Second}))
		r.after(time.Second)
		setState(t, r.pool, "a", lb.Disabled)
		r.after(time.Minute)
		if p := r.pool.Stats().Backends[0].Probe; p != nil {
			t.Errorf("the probe of a disabled backend went on: %+v", p)
		}
		setState(t, r.pool, "a", lb.Active)
		r.after(time.Second)
		setState(t, r.pool, "a", lb.Disabled)
		r.pass(0) // it was started again
		setState(t, r.pool, "a", lb.Active)
		r.after(time.Second)
		r.wantStates("healthy")
	})
}

// A logger or a strategy that hangs keeps no backend from being probed, nor what
// follows from that.
func TestProbesGoOnBesideCodeThatHangs(t *testing.T) {
	bubble(t, "a logger", func(t *testing.T) {
		v := newVerdicts()
		release := make(chan struct{})
		pool := newPool(t, manyTargets(2), lb.WithChecker(v), lb.WithLogger(newHangingLogger(release)))
		advance(time.Minute)
		v.set("t0", lb.VerdictUnhealthy)
		advance(time.Minute)
		if n := len(v.probes("t0")); n < 20 || pool.Backends()[0].Status().Health != lb.HealthUnhealthy {
			t.Errorf("%d probes in two minutes, state %v", n, pool.Backends()[0].Status())
		}
		close(release)
		pool.Close()
	})
	for name, misbehave := range map[string]func(*hangingPrepare){
		"a Prepare that hangs once":            func(h *hangingPrepare) { <-h.release },
		"a Prepare that ends its goroutine":    func(*hangingPrepare) { runtime.Goexit() },
		"a Prepare that panics, for good form": func(*hangingPrepare) { panic("prepare") },
	} {
		bubble(t, name, func(t *testing.T) {
			v := newVerdicts()
			h := &hangingPrepare{Balancer: lb.BalancerFunc(first), release: make(chan struct{}), misbehave: misbehave}
			pool := newPool(t, manyTargets(3), lb.WithChecker(v), lb.WithBalancer(h))
			advance(10 * time.Second)
			h.armed.Store(true)
			v.set("t0", lb.VerdictUnhealthy)
			advance(time.Minute)
			v.set("t1", lb.VerdictUnhealthy)
			advance(time.Minute)
			if n := len(v.probes("t1")); n < 20 {
				t.Errorf("%d probes in two minutes", n)
			}
			if got := h.last.Load().(string); got != "[t2]" {
				t.Errorf("the strategy was last prepared for %s, want [t2]", got)
			}
			close(h.release)
			pool.Close()
		})
	}
}

// hangingPrepare misbehaves in the first Prepare after it was armed.
type hangingPrepare struct {
	lb.Balancer
	armed     atomic.Bool
	release   chan struct{}
	misbehave func(*hangingPrepare)
	last      atomic.Value // the set as text
}

func (h *hangingPrepare) Prepare(set []*lb.Backend) lb.Balancer {
	if h.armed.Swap(false) {
		h.misbehave(h)
	}
	h.last.Store(fmt.Sprint(set))
	return h.Balancer
}

// Dials and handshakes end with the probe that asked for them: no backend has two
// under way, and one that has left has none.
func TestDialsEndWithTheirProbe(t *testing.T) {
	check := lb.WithHealthCheck(lb.HealthCheck{Path: probePath, Interval: time.Second, Timeout: 200 * time.Millisecond, FastInterval: 200 * time.Millisecond})
	bubble(t, "dials into a black hole", func(t *testing.T) {
		r := newBackends(t, 1)
		var now, most atomic.Int64
		template := r.net.Transport()
		template.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		pool := newPool(t, r.targets(), lb.WithTransport(template), lb.WithTimeouts(lb.Timeouts{Dial: -1}), check)
		advance(time.Minute)
		if most.Load() != 1 {
			t.Errorf("dials at once = %d, want 1", most.Load())
		}
		if err := pool.SetTargets(manyTargets(1)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if now.Load() > 1 { // that of the new backend
			t.Errorf("%d dials are left over", now.Load()-1)
		}
		pool.Close()
		advance(time.Second)
	})
	bubble(t, "handshakes that nobody answers", func(t *testing.T) {
		network := lbtest.NewNetwork()
		l, err := network.Listen("secure.test:443")
		if err != nil {
			t.Fatal(err)
		}
		var open, most atomic.Int64
		go func() {
			for {
				nc, err := l.Accept()
				if err != nil {
					return
				}
				most.Store(max(most.Load(), open.Add(1)))
				go func() {
					io.Copy(io.Discard, nc)
					nc.Close()
					open.Add(-1)
				}()
			}
		}()
		pool := newPool(t, lb.Targets("https://secure.test"), over(network), lb.WithTimeouts(lb.Timeouts{TLSHandshake: -1}), check)
		advance(time.Minute)
		if err := pool.SetTargets(lb.Targets("http://10.0.0.1")); err != nil {
			t.Fatal(err)
		}
		advance(time.Second)
		if most.Load() != 1 || open.Load() != 0 {
			t.Errorf("connections at once = %d, left over %d", most.Load(), open.Load())
		}
		pool.Close()
		l.Close()
		advance(time.Second)
	})
}

// A backend on trial gets its request also while the others only drain.
func TestTrialBesideDraining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerdicts()
		r := newBackends(t, 2)
		r.startPool(lb.WithChecker(v), lb.WithPassiveHealth(lb.PassiveHealth{Failures: 1}))
		r.after(time.Second)
		eject := func() {
			r.backends[0].Set(lbtest.Reset())
			for r.pool.Backends()[0].Status().Health != lb.HealthEjected {
				r.do("GET", "", nil)
			}
		}
		eject()
		r.after(2 * time.Second) // a probe ends it
		eject()                  // which probes do not end any more
		v.set("b", lb.VerdictDrain)
		r.after(20 * time.Second)
		r.wantStates("trial draining")
		r.backends[0].Set(lbtest.Answer())
		for range 10 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
		r.wantStates("healthy draining")
	})
}

// While a backend is usable no request goes to one that fails its probes, not even to
// be retried.
func TestRetriesLeaveUnhealthyBackendsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 2)
		r.fail(0)
		r.startPool(lb.WithHealthCheck(everySecond()))
		r.after(time.Millisecond)
		r.backends[1].Set(lbtest.Reset())
		r.wantStatus(r.must("GET", "", nil), 502)
		if n := r.backends[0].Count(); n != 0 {
			t.Errorf("the unhealthy one got %d requests", n)
		}
	})
}

// Ready hears of every change that makes it true, and a pool that was ready once goes
// on to be, asked or not.
func TestReadyMissesNothing(t *testing.T) {
	bubble(t, "a backend that is disabled needs no verdict", func(t *testing.T) {
		r := newBackends(t, 2)
		r.backends[0].SetProbe(probePath, lbtest.Hang())
		r.startPool(lb.WithHealthCheck(lb.HealthCheck{Path: probePath, Interval: time.Hour, Timeout: time.Hour}))
		setState(t, r.pool, "a", lb.Draining)
		time.AfterFunc(time.Second, func() { setState(t, r.pool, "a", lb.Disabled) })
		within(t, time.Second, func() {
			if err := r.pool.Ready(t.Context()); err != nil {
				t.Error(err)
			}
		})
	})
	bubble(t, "nobody asked before", func(t *testing.T) {
		r := newProbedRig(t, 2, everySecond())
		r.after(time.Minute)
		r.backends[1].SetProbe(probePath, lbtest.Hang())
		targets := append(r.targets()[:1], lb.Target{Name: "new", URL: r.backends[1].URL()})
		if err := r.pool.SetTargets(targets); err != nil {
			t.Fatal(err)
		}
		if got := serve(r.pool.ReadyHandler(), "/"); got.Code != 200 {
			t.Errorf("ReadyHandler answers %d %q", got.Code, got.Body)
		}
	})
}

// The operator's word is told also where the probe had said the same.
func TestDrainingIsToldTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerdicts()
		v.set("a", lb.VerdictDrain)
		s, logged := newStory()
		r := newBackends(t, 2)
		r.startPool(lb.WithChecker(v), logged)
		r.after(time.Second)
		setState(t, r.pool, "a", lb.Draining)
		if !s.has("a draining to draining: set by the operator") {
			t.Errorf("the story is %q", s.lines)
		}
	})
}

// A backend without weight is not usable, whatever its health.
func TestBackendsWithoutWeightAreNotUsable(t *testing.T) {
	pool := newPool(t, []lb.Target{{Name: "a", URL: "http://a.test", Weight: lb.NoWeight}, {Name: "b", URL: "http://b.test"}})
	defer pool.Close()
	if s := pool.Stats(); s.Usable != 1 || s.Backends[0].Usable || !s.Backends[1].Usable {
		t.Errorf("usable = %d: %t and %t", s.Usable, s.Backends[0].Usable, s.Backends[1].Usable)
	}
}

// The body of an answer is not waited for if nobody looks at it.
func TestStalledBodyOfAProbeDoesNotMatter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		r.backends[0].SetProbe(probePath, lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "10")
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		})))
		r.startPool(lb.WithHealthCheck(everySecond()))
		r.after(10 * time.Second)
		r.wantStates("healthy")
	})
}

// Retry-After of a pool whose backend no probe can bring back is when its time is up.
func TestRetryAfterOfAnEjectionThatProbesDoNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerdicts()
		r := newBackends(t, 2)
		r.startPool(lb.WithChecker(v), lb.WithFailClosed(), lb.WithPassiveHealth(lb.PassiveHealth{Failures: 1, Ejection: 20 * time.Second}))
		r.after(time.Second)
		r.backends[0].Set(lbtest.Reset())
		for range 2 {
			for r.pool.Backends()[0].Status().Health != lb.HealthEjected {
				r.do("GET", "", nil)
			}
			r.after(1500 * time.Millisecond)
		}
		setState(t, r.pool, "b", lb.Disabled)
		a := r.must("GET", "", nil)
		r.wantStatus(a, 503)
		if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n != 30 { // the most that is said
			t.Errorf("Retry-After = %q, want 30", a.header.Get("Retry-After"))
		}
	})
}

// No Check is called once the pool has been closed.
func TestNoCheckBeginsAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 100 {
			checker := lb.CheckerFunc(func(ctx context.Context, _ lb.ProbeTarget) (lb.Verdict, error) {
				if ctx.Err() != nil {
					t.Error("called with a context that had ended")
				}
				<-ctx.Done()
				return 0, ctx.Err()
			})
			pool := newPool(t, manyTargets(40), lb.WithChecker(checker))
			synctest.Wait() // 32 are under way, and 8 wait for their turn
			pool.Close()
		}
	})
}

// What a logger is too slow for is counted.
func TestLostEventsAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, logged := newStory()
		pool := newPool(t, manyTargets(1500), logged)
		pool.Close()
		if !s.has("events were lost") {
			t.Error("500 of 1,500 events were lost and nobody says so")
		}
	})
}
