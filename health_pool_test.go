package lb_test

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Two pools in front of one backend hold what they find for themselves, as each of
// them asks something else (caddyserver/caddy#7870, caddyserver/caddy#4341).
func TestPoolsShareNoHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newProbedRig(t, 1, everySecond())
		check := everySecond()
		check.Path = "/bad"
		r.backends[0].Set(lbtest.When(func(r *http.Request) bool { return r.URL.Path == "/bad" }, lbtest.AnswerStatus(500, ""), lbtest.Answer()))
		s, logged := newStory()
		other := newPool(t, []lb.Target{{Name: "a", URL: r.backends[0].URL()}}, over(r.net), lb.WithHealthCheck(check), logged)
		defer other.Close()
		r.after(time.Millisecond)
		for range 100 {
			r.wantStatus(r.must("GET", "", nil), 200)
			if good, bad := r.states(), other.Backends()[0].Status().Health; good != "healthy" || bad != lb.HealthUnhealthy {
				t.Fatalf("health = %s and %v, want healthy and unhealthy", good, bad)
			}
			r.after(100 * time.Millisecond)
		}
		s.want(t, "0 a unknown to unhealthy: probe failed: GET /bad: status 500, want 200 to 299",
			"0 no backend is usable: failing open to unusable ones")
	})
}

// A backend that is killed and started again comes back without anybody's doing
// (caddyserver/caddy#853, traefik/traefik#5851).
func TestRestartedBackendComesBack(t *testing.T) {
	for _, n := range []int{1, 2} {
		bubble(t, fmt.Sprintf("one of %d", n), func(t *testing.T) {
			r := newProbedRig(t, n, everySecond())
			r.after(time.Second)
			const back = 2*time.Second + time.Second // rise × interval + 1 s
			for i := range 20 {
				r.backends[0].Set(lbtest.Refuse())
				for range 5 + 3*i {
					r.do("GET", "", nil)
					r.after(200 * time.Millisecond)
				}
				r.backends[0].Set(lbtest.Answer())
				r.after(back)
				r.backends[0].Forget()
				for range 10 {
					r.wantStatus(r.must("GET", "", nil), 200)
				}
				if got := r.backends[0].Count(); got != 10/n {
					t.Fatalf("restart %d: %d of 10 requests, want %d; it is %s", i, got, 10/n, r.states())
				}
			}
		})
	}
}

// Checks that fail everywhere are more likely wrong than right: the only backend goes
// on to be used, and the pool says so (yoanbernabeu/frankendeploy PR#94,
// k3s-io/k3s#10240, caddyserver/caddy#2701).
func TestSlowProbesCauseNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, logged := newStory()
		r := newProbedRig(t, 1, everySecond(), logged)
		r.after(10 * time.Second)
		r.backends[0].SetProbe(probePath, lbtest.Delay(time.Second)) // its time-out is half of that
		for range 100 {
			r.wantStatus(r.must("GET", "", nil), 200)
			r.after(100 * time.Millisecond)
		}
		if stats := r.pool.Stats(); !stats.FailOpen || stats.Usable != 0 || stats.Backends[0].State != "unhealthy" {
			t.Errorf("stats = %+v", stats)
		}
		r.pass(0)
		r.after(5 * time.Second)
		if stats := r.pool.Stats(); stats.FailOpen || stats.Usable != 1 {
			t.Errorf("stats = %+v", stats)
		}
		for _, line := range []string{
			"a healthy to unhealthy: probes failed in a row: 3, the last: no verdict in time (500ms)",
			"no backend is usable: failing open to unusable ones",
			"a unhealthy to healthy: probes passed in a row: 2",
			"backends are usable again",
		} {
			if !s.has(line) {
				t.Errorf("not told: %s; the story is %q", line, s.lines)
			}
		}
	})
}

// An update does not forget what probes have found: a backend that is down gets no
// request, and its probes go on (trickstercache/trickster PR#919, caddyserver/caddy
// PR#7625).
func TestUpdateKeepsHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 3)
		r.fail(0)
		r.startPool(lb.WithHealthCheck(everySecond()))
		targets := r.targets()
		if err := r.pool.SetTargets(targets[:2]); err != nil {
			t.Fatal(err)
		}
		r.after(time.Millisecond)
		probes := r.backends[0].ProbeCount()
		for i := range 50 {
			if err := r.pool.SetTargets(targets[:2+i%2]); err != nil {
				t.Fatal(err)
			}
			for range 4 {
				r.wantStatus(r.must("POST", "", strings.NewReader("x")), 200)
			}
			r.after(100 * time.Millisecond)
		}
		if n := r.backends[0].Count(); n != 0 {
			t.Errorf("the backend that is down got %d requests", n)
		}
		if n := r.backends[0].ProbeCount() - probes; n < 3 || n > 6 {
			t.Errorf("it got %d probes in 5 s, want one each second", n)
		}
	})
}

// When every backend is down the choice is the user's: fail open, which asks them all
// the same, or closed, which answers 503 at once, says when to come back, and asks
// nobody (envoyproxy/envoy#2671, moonrhythm/parapet PR#217, linkerd/linkerd2#11493,
// linkerd/linkerd2#5599).
func TestAllDown(t *testing.T) {
	start := func(t *testing.T, opts ...lb.Option) *rig {
		check := everySecond()
		check.Interval, check.FastInterval = 10*time.Second, 4*time.Second
		r := newBackends(t, 3)
		for i := range 3 {
			r.fail(i)
		}
		r.startPool(append([]lb.Option{lb.WithHealthCheck(check)}, opts...)...)
		r.after(100 * time.Millisecond)
		r.wantStates("unhealthy unhealthy unhealthy")
		return r
	}
	bubble(t, "fail open", func(t *testing.T) {
		r := start(t)
		for range 9 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
		for _, b := range r.backends {
			if b.Count() != 3 {
				t.Errorf("%s got %d requests, want 3", b.Name(), b.Count())
			}
		}
		if s := r.pool.Stats(); !s.FailOpen {
			t.Error("the pool does not say that it fails open")
		}
		r.wantStates("unhealthy unhealthy unhealthy") // an answer is no verdict
	})
	bubble(t, "fail open, and all refuse", func(t *testing.T) {
		r := start(t)
		for _, b := range r.backends {
			b.Set(lbtest.Refuse())
		}
		r.wantStatus(r.must("GET", "", nil), 503)
	})
	bubble(t, "fail closed", func(t *testing.T) {
		s, logged := newStory()
		var failure error
		r := start(t, logged, lb.WithFailClosed(), lb.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, err error) {
			failure = err
			w.WriteHeader(lb.StatusOf(err))
		}))
		for range 200 {
			within(t, 0, func() {
				a := r.must("POST", "", strings.NewReader("x"))
				r.wantStatus(a, 503)
				// the next probe comes after 4 s, and two have to pass
				if wait, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || wait < 7 || wait > 9 {
					t.Fatalf("Retry-After = %q, want about 8", a.header.Get("Retry-After"))
				}
			})
		}
		if !errors.Is(failure, lb.ErrNoBackend) || !strings.Contains(failure.Error(), "of 3 targets 3 unhealthy") {
			t.Errorf("error = %v, want ErrNoBackend and why", failure)
		}
		if n := r.count(); n != 0 {
			t.Errorf("unusable backends got %d requests", n)
		}
		if !s.has("no backend is usable: refusing requests") || r.pool.Stats().FailOpen {
			t.Errorf("story = %q", s.lines)
		}
		r.pass(1)
		r.after(10 * time.Second)
		r.wantStatus(r.must("GET", "", nil), 200)
		r.wantStates("unhealthy healthy unhealthy")
	})
}

// A pool that fails closed does not fall back on unusable backends either when the
// usable ones fail a request, but gives those on trial their one.
func TestFailClosedRefusesTheUnusableAlways(t *testing.T) {
	bubble(t, "within a request", func(t *testing.T) {
		r := newBackends(t, 3)
		r.fail(0)
		r.startPool(lb.WithHealthCheck(everySecond()), lb.WithFailClosed(), noEjection())
		r.after(time.Millisecond)
		r.backends[1].Set(lbtest.Refuse())
		r.backends[2].Set(lbtest.Reset())
		for range 10 {
			r.wantStatus(r.must("GET", "", nil), 502)
		}
		if n := r.backends[0].Count(); n != 0 {
			t.Errorf("the unhealthy backend got %d requests", n)
		}
	})
	bubble(t, "but for a trial", func(t *testing.T) {
		r := newBackends(t, 2)
		r.startPool(lb.WithFailClosed())
		r.backends[0].Set(lbtest.Refuse())
		for range 10 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
		setState(t, r.pool, "b", lb.Disabled)
		r.wantStates("ejected disabled")
		r.wantStatus(r.must("GET", "", nil), 503)
		r.backends[0].Set(lbtest.Delay(time.Second))
		r.after(6 * time.Second)
		r.wantStates("trial disabled")
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				linger(time.Duration(i) * time.Millisecond)
				want := 503 // while the trial is taken
				if i == 0 {
					want = 200
				}
				r.wantStatus(r.must("GET", "", nil), want)
			})
		}
		wg.Wait()
		r.wantStates("unknown disabled")
	})
}

// A degraded backend is spared while there are others, and used before those that are
// on trial or out; one that drains gets nothing, not even when all are down.
func TestDegradedAndDraining(t *testing.T) {
	start := func(t *testing.T, a, b, c lb.Verdict) (*rig, *verdicts) {
		v := newVerdicts()
		v.set("a", a)
		v.set("b", b)
		v.set("c", c)
		r := newBackends(t, 3)
		r.startPool(lb.WithChecker(v), lb.WithHealthCheck(lb.HealthCheck{Interval: time.Second}), noEjection())
		r.after(time.Millisecond)
		return r, v
	}
	counts := func(r *rig) string {
		return fmt.Sprint(r.backends[0].Count(), r.backends[1].Count(), r.backends[2].Count())
	}
	bubble(t, "degraded are spared", func(t *testing.T) {
		r, _ := start(t, lb.VerdictHealthy, lb.VerdictDegraded, lb.VerdictHealthy)
		for range 10 {
			r.must("GET", "", nil)
		}
		if got := counts(r); got != "5 0 5" {
			t.Errorf("requests = %s, want 5 0 5", got)
		}
		if s := r.pool.Stats(); s.Usable != 3 || s.FailOpen {
			t.Errorf("usable = %d, fail open = %t", s.Usable, s.FailOpen)
		}
	})
	bubble(t, "degraded answer what the others fail", func(t *testing.T) {
		r, _ := start(t, lb.VerdictHealthy, lb.VerdictDegraded, lb.VerdictUnhealthy)
		r.backends[0].Set(lbtest.Refuse())
		for range 10 {
			if a := r.must("POST", "", strings.NewReader("x")); a.status != 200 || a.backend() != "b" {
				t.Errorf("answer = %d from %q, want 200 from b", a.status, a.backend())
			}
		}
		if n := r.backends[2].Count(); n != 0 {
			t.Errorf("the unhealthy one got %d requests", n)
		}
	})
	bubble(t, "degraded are used like any other when all are", func(t *testing.T) {
		r, _ := start(t, lb.VerdictDegraded, lb.VerdictDegraded, lb.VerdictUnhealthy)
		for range 10 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
		if got := counts(r); got != "5 5 0" || r.pool.Stats().FailOpen {
			t.Errorf("requests = %s, want 5 5 0 without failing open", got)
		}
	})
	bubble(t, "draining get none, but end what they have", func(t *testing.T) {
		r, v := start(t, lb.VerdictHealthy, lb.VerdictDegraded, lb.VerdictUnhealthy)
		r.backends[0].Set(lbtest.Delay(5 * time.Second))
		var wg sync.WaitGroup
		wg.Go(func() { r.wantStatus(r.must("GET", "", nil), 200) })
		r.after(time.Second)
		v.set("a", lb.VerdictDrain)
		r.after(2 * time.Second)
		r.wantStates("draining degraded unhealthy")
		for range 10 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
		wg.Wait()
		if got := counts(r); got != "1 10 0" {
			t.Errorf("requests = %s, want 1 10 0", got)
		}
	})
	bubble(t, "draining work, so they are asked before those that do not", func(t *testing.T) {
		r, v := start(t, lb.VerdictHealthy, lb.VerdictDrain, lb.VerdictUnhealthy)
		r.backends[0].Set(lbtest.Refuse())
		r.backends[2].Set(lbtest.Refuse())
		r.wantStatus(r.must("POST", "", strings.NewReader("x")), 503) // a counts as usable
		v.set("a", lb.VerdictUnhealthy)
		r.after(5 * time.Second)
		r.wantStates("unhealthy draining unhealthy")
		r.backends[1].Set(lbtest.Answer())
		before := r.pool.Stats().Retries
		for range 10 {
			r.wantStatus(r.must("POST", "", strings.NewReader("x")), 200)
		}
		if s := r.pool.Stats(); !s.FailOpen || s.Retries != before {
			t.Errorf("fail open = %t, retries = %d, want true and none", s.FailOpen, s.Retries-before)
		}
		r.backends[1].Set(lbtest.Refuse())
		r.backends[2].Set(lbtest.Answer())
		r.wantStatus(r.must("POST", "", strings.NewReader("x")), 200)
		setState(t, r.pool, "b", lb.Draining) // the operator's word, which holds always
		setState(t, r.pool, "c", lb.Draining)
		r.wantStatus(r.must("GET", "", nil), 503)
	})
	bubble(t, "but not by a pool that fails closed", func(t *testing.T) {
		v := newVerdicts()
		v.set("a", lb.VerdictDrain)
		r := newBackends(t, 2)
		r.startPool(lb.WithChecker(v), lb.WithFailClosed(), noEjection())
		r.after(time.Millisecond)
		r.backends[1].Set(lbtest.Refuse())
		r.wantStatus(r.must("GET", "", nil), 503)
		if got := r.backends[0].Count(); got != 0 {
			t.Errorf("the draining one got %d requests", got)
		}
	})
}

// With RecoverByProbe neither time nor an answer brings a backend back, but the first
// probe that passes does, soon.
func TestRecoverByProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		check := lb.HealthCheck{Path: probePath, Interval: time.Minute, Timeout: time.Second, Fall: 1000}
		r := newProbedRig(t, 2, check, lb.WithPassiveHealth(lb.PassiveHealth{Failures: 1, RecoverByProbe: true}))
		r.after(time.Millisecond)
		r.fail(0)
		r.backends[0].Set(lbtest.Refuse())
		for range 4 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
		r.wantStates("ejected healthy")
		if st := r.pool.Backends()[0].Status(); !st.Until.IsZero() {
			t.Errorf("the ejection ends at %v, want no end", st.Until)
		}
		r.backends[0].Set(lbtest.Answer())
		r.after(10 * time.Minute)
		r.wantStates("ejected healthy")
		setState(t, r.pool, "b", lb.Disabled) // fails open to a
		r.wantStatus(r.must("GET", "", nil), 200)
		r.wantStates("ejected disabled")
		setState(t, r.pool, "b", lb.Active)
		r.pass(0)
		r.after(1200 * time.Millisecond)
		r.wantStates("healthy healthy")
	})
}

// Probes that pass while requests fail are believed once, not for ever: the next
// ejection lasts its time, also if only a probe may end it.
func TestProbesThatSeeNothingWrongAreNotBelievedTwice(t *testing.T) {
	for _, c := range []struct {
		name    string
		passive lb.PassiveHealth
		most    int64
	}{
		// Three failures, three more after the probe, and then trials after 10, 15 and 20 s.
		{"by default", lb.PassiveHealth{}, 3 + 3 + 3},
		// Three times three, the last of them after 10 s, and again after 15 and 20 s.
		{"with RecoverByProbe", lb.PassiveHealth{RecoverByProbe: true}, 5 * 3},
	} {
		bubble(t, c.name, func(t *testing.T) {
			s, logged := newStory()
			r := newProbedRig(t, 2, everySecond(), logged, lb.WithPassiveHealth(c.passive), lb.WithBalancer(lb.BalancerFunc(first)))
			r.backends[0].Set(lbtest.Reset())
			for range 600 {
				r.wantStatus(r.must("GET", "", nil), 200)
				r.after(100 * time.Millisecond)
			}
			if n := r.pool.Stats().Backends[0].Failures; n > c.most {
				t.Errorf("the bad backend failed %d requests in a minute, want at most %d: %q", n, c.most, s.lines)
			}
			r.backends[0].Set(lbtest.Answer())
			for range 600 {
				r.wantStatus(r.must("GET", "", nil), 200)
				r.after(100 * time.Millisecond)
			}
			r.wantStates("healthy healthy")
		})
	}
}

// A backend that fails and stays, because nobody else could take over, is told of.
func TestLastBackendThatFailsIsToldOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, logged := newStory()
		r := newBackends(t, 2)
		r.startPool(logged)
		for _, b := range r.backends {
			b.Set(lbtest.Refuse())
		}
		for range 300 {
			r.wantStatus(r.must("GET", "", nil), 503)
		}
		told := 0
		for _, line := range s.lines {
			if strings.Contains(line, "backend fails but stays") {
				told++
			}
		}
		if told < 1 || told > 12 {
			t.Errorf("told %d times, want a few: %q", told, s.lines)
		}
	})
}

// Backends are replaced one after the other, each first failing its probe: no GET is
// lost and no POST doubled (data-fair/data-fair PR#473, coollabsio/coolify#8627,
// linkerd/linkerd2#11084).
func TestRollingDeploy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newProbedRig(t, 3, lb.HealthCheck{Path: probePath, Interval: 100 * time.Millisecond, Fall: 2})
		for _, b := range r.backends {
			b.Set(lbtest.Delay(50 * time.Millisecond))
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		failed := map[string]int{}
		stop := make(chan struct{})
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(time.Second / 300):
				}
				wg.Go(func() {
					method, id := "GET", fmt.Sprint(i)
					if i%2 == 1 {
						method = "POST"
					}
					if a, err := r.do(method, id, strings.NewReader(id)); err != nil || a.status != 200 {
						mu.Lock()
						failed[method]++
						mu.Unlock()
					}
					if n := r.arrivals(id); method == "POST" && n > 1 {
						t.Errorf("POST %s arrived %d times", id, n)
					}
				})
			}
		})
		for i, b := range r.backends {
			r.fail(i)
			r.after(500 * time.Millisecond)
			b.Set(lbtest.Refuse()) // the old one is gone,
			r.after(2 * time.Second)
			b.Set(lbtest.Delay(50 * time.Millisecond)) // the new one there,
			r.after(300 * time.Millisecond)
			r.pass(i) // and after a while ready
			r.after(time.Second)
			r.wantStates("healthy healthy healthy")
		}
		close(stop)
		wg.Wait()
		if len(failed) > 0 {
			t.Errorf("failed: %v, want none: probes took each backend out in time", failed)
		}
		r.wantIdle()
	})
}

// A backend that accepts and never answers loses its share after three requests, and
// none of them is lost (cherokee/webserver#540).
func TestBackendThatNeverAnswersIsEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		check := everySecond()
		check.Interval, check.FastInterval = time.Minute, time.Minute // the next would end the ejection
		r := newProbedRig(t, 2, check, lb.WithTimeouts(lb.Timeouts{ResponseHeader: 300 * time.Millisecond}))
		r.backends[0].Set(lbtest.Hang())
		r.backends[0].SetProbe(probePath, lbtest.Answer()) // the probe is none the wiser
		hung := 0
		for range 20 {
			began := time.Now()
			r.wantStatus(r.must("GET", "", nil), 200)
			if time.Since(began) >= 300*time.Millisecond {
				hung++
			}
		}
		if hung != 3 || r.pool.Stats().Backends[0].Failures != 3 {
			t.Errorf("%d requests met the backend that hangs, want 3; it is %s", hung, r.states())
		}
	})
}
