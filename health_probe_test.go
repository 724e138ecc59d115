package lb_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// verdicts is a Checker whose word the test gives, and which keeps when it was asked.
type verdicts struct {
	mu    sync.Mutex // guards the following
	say   map[string]lb.Verdict
	at    map[string][]time.Time
	check func(ctx context.Context, t lb.ProbeTarget) (lb.Verdict, error) // instead, if not nil
}

func newVerdicts() *verdicts {
	return &verdicts{say: map[string]lb.Verdict{}, at: map[string][]time.Time{}}
}

func (v *verdicts) Check(ctx context.Context, t lb.ProbeTarget) (lb.Verdict, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	name := t.Backend().Name()
	v.at[name] = append(v.at[name], time.Now())
	if check := v.check; check != nil {
		v.mu.Unlock()
		defer v.mu.Lock()
		return check(ctx, t)
	}
	said, ok := v.say[name]
	if !ok {
		said = lb.VerdictHealthy
	}
	if said == lb.VerdictUnhealthy {
		return said, errors.New("so said")
	}
	return said, nil
}

func (v *verdicts) set(name string, said lb.Verdict) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.say[name] = said
}

func (v *verdicts) probes(name string) []time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.at[name])
}

func (v *verdicts) count() (n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, at := range v.at {
		n += len(at)
	}
	return n
}

// manyTargets returns n targets that are never dialled.
func manyTargets(n int) (targets []lb.Target) {
	for i := range n {
		targets = append(targets, lb.Target{Name: fmt.Sprint("t", i), URL: fmt.Sprintf("http://10.0.%d.%d", i/250, i%250)})
	}
	return targets
}

// Rise and Fall count strictly consecutive verdicts: the opposite one starts anew
// (caddyserver/caddy#6152, caddyserver/caddy PR#6154, caddyserver/caddy PR#7625).
func TestRiseAndFallAreStrictlyConsecutive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerdicts()
		check := lb.HealthCheck{Interval: time.Second, FastInterval: time.Second, Rise: 2, Fall: 3}
		pool := newPool(t, manyTargets(1), lb.WithChecker(v), lb.WithHealthCheck(check))
		defer pool.Close()
		b := pool.Backends()[0]
		// next makes the next probe say so, and returns the health after it.
		next := func(said lb.Verdict) lb.Health {
			v.set("t0", said)
			for n := v.count(); v.count() == n; advance(10 * time.Millisecond) {
			}
			synctest.Wait()
			return b.Status().Health
		}
		alternate := func(want lb.Health) {
			t.Helper()
			for i := range 50 {
				if got := next(lb.Verdict(i % 2)); got != want {
					t.Fatalf("alternating verdict %d: health = %v, want %v", i, got, want)
				}
			}
		}
		if got := next(lb.VerdictHealthy); got != lb.HealthHealthy {
			t.Fatalf("first verdict: health = %v, want healthy at once", got)
		}
		alternate(lb.HealthHealthy)
		want := []lb.Health{lb.HealthHealthy, lb.HealthHealthy, lb.HealthUnhealthy}
		for i, w := range want {
			if got := next(lb.VerdictUnhealthy); got != w {
				t.Errorf("failure %d: health = %v, want %v", i+1, got, w)
			}
		}
		alternate(lb.HealthUnhealthy)
		next(lb.VerdictUnhealthy)
		for i, w := range []lb.Health{lb.HealthUnhealthy, lb.HealthHealthy} {
			if got := next(lb.VerdictHealthy); got != w {
				t.Errorf("pass %d: health = %v, want %v", i+1, got, w)
			}
		}
	})
}

// The first verdict decides at once, either way.
func TestFirstVerdictDecides(t *testing.T) {
	for said, want := range map[lb.Verdict]lb.Health{
		lb.VerdictHealthy: lb.HealthHealthy, lb.VerdictUnhealthy: lb.HealthUnhealthy,
		lb.VerdictDegraded: lb.HealthDegraded, lb.VerdictDrain: lb.HealthDraining,
	} {
		bubble(t, said.String(), func(t *testing.T) {
			v := newVerdicts()
			v.set("t0", said)
			pool := newPool(t, manyTargets(1), lb.WithChecker(v))
			defer pool.Close()
			synctest.Wait()
			if st := pool.Backends()[0].Status(); st.Health != want || len(v.probes("t0")) != 1 {
				t.Errorf("health = %v after %d probes, want %v after 1", st.Health, len(v.probes("t0")), want)
			}
		})
	}
}

// While a backend is in order its probes are an interval apart, counted from the end
// of the last; while it is not, a shorter one (fabriziosalmi/zion PR#173). Both vary
// by a tenth.
func TestIntervalsFollowTheHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const took, interval, fast = 100 * time.Millisecond, 10 * time.Second, 200 * time.Millisecond
		v := newVerdicts()
		var ill atomic.Bool
		v.check = func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			linger(took)
			if ill.Load() {
				return lb.VerdictUnhealthy, nil
			}
			return lb.VerdictHealthy, nil
		}
		pool := newPool(t, manyTargets(1), lb.WithChecker(v), lb.WithHealthCheck(lb.HealthCheck{Interval: interval, FastInterval: fast}))
		defer pool.Close()
		gaps := func(d time.Duration) (gaps []time.Duration) {
			before := len(v.probes("t0"))
			advance(d)
			at := v.probes("t0")[before-1:]
			for i := 1; i < len(at); i++ {
				gaps = append(gaps, at[i].Sub(at[i-1])-took)
			}
			return gaps
		}
		within := func(gaps []time.Duration, want time.Duration) {
			t.Helper()
			if len(gaps) < 10 {
				t.Fatalf("%d probes, want 10 or more", len(gaps))
			}
			differ := map[time.Duration]bool{}
			for _, gap := range gaps {
				differ[gap] = true
				if gap < want*9/10 || gap > want*11/10 {
					t.Errorf("probes are %v apart, want %v ± 10 %%", gap, want)
				}
			}
			if len(differ) < len(gaps)/2 {
				t.Errorf("intervals do not vary: %v", gaps)
			}
		}
		advance(interval + took) // the second probe comes after a random part of one
		within(gaps(30*interval), interval)
		ill.Store(true)
		advance(interval * 12 / 10)
		within(gaps(20*(fast+took)), fast)
		ill.Store(false)
		began := time.Now()
		for pool.Backends()[0].Status().Health != lb.HealthHealthy {
			advance(time.Millisecond)
		}
		if d := time.Since(began); d > time.Second {
			t.Errorf("the backend was back after %v, want less than 1 s", d)
		}
	})
}

// All backends are probed when the pool is made, 32 at once.
func TestProbesAtOnceAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const backends, atOnce = 100, 32
		v := newVerdicts()
		var now, most atomic.Int64
		v.check = func(ctx context.Context, _ lb.ProbeTarget) (lb.Verdict, error) {
			n := now.Add(1)
			defer now.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			linger(time.Second)
			return lb.VerdictHealthy, nil
		}
		pool := newPool(t, manyTargets(backends), lb.WithChecker(v), lb.WithHealthCheck(lb.HealthCheck{Interval: 10 * time.Second}))
		defer pool.Close()
		advance(time.Minute)
		if most.Load() != atOnce {
			t.Errorf("probes at once = %d, want %d", most.Load(), atOnce)
		}
		for _, b := range pool.Stats().Backends {
			if b.Probe == nil || b.Probe.Count < 5 {
				t.Fatalf("%s was probed %+v", b.Name, b.Probe)
			}
		}
	})
}

// A thousand backends are probed evenly: no 50 ms have more than 15 % of a round, the
// first included, and each backend has its turn once an interval.
func TestManyProbesComeEvenly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const backends, rounds, window = 1000, 20, 50 * time.Millisecond
		v := newVerdicts()
		pool := newPool(t, manyTargets(backends), lb.WithChecker(v), lb.WithHealthCheck(lb.HealthCheck{Interval: time.Second}))
		defer pool.Close()
		began := time.Now()
		advance(rounds * time.Second)
		var all []time.Duration
		for _, target := range manyTargets(backends) {
			at := v.probes(target.Name)
			if n := len(at); n < rounds-2 || n > rounds+3 {
				t.Errorf("%s was probed %d times in %d s", target.Name, n, rounds)
			}
			for _, a := range at {
				all = append(all, a.Sub(began))
			}
		}
		slices.Sort(all)
		first := 0
		for i, a := range all {
			for a-all[first] >= window {
				first++
			}
			if n := i - first + 1; n > backends*15/100 {
				t.Fatalf("%d probes of %d in the 50 ms before %v", n, backends, a)
			}
		}
	})
}

// There is one prober for each backend, for as long as that is there, whatever was
// added and removed before (caddyserver/caddy#1503).
func TestProbesStopWithTheirBackend(t *testing.T) {
	bubble(t, "of pools that were closed", func(t *testing.T) {
		r := newBackends(t, 1)
		target := []lb.Target{{Name: "a", URL: r.backends[0].URL()}}
		for range 100 {
			newPool(t, target, over(r.net), lb.WithHealthCheck(everySecond())).Close()
		}
		before := r.backends[0].ProbeCount()
		r.after(time.Minute)
		if n := r.backends[0].ProbeCount() - before; n != 0 {
			t.Errorf("%d probes by pools that are closed", n)
		}
	})
	bubble(t, "of targets that were removed", func(t *testing.T) {
		r := newProbedRig(t, 2, everySecond())
		both := r.targets()
		set := func(targets []lb.Target) {
			if err := r.pool.SetTargets(targets); err != nil {
				t.Fatal(err)
			}
			r.after(10 * time.Millisecond)
		}
		for range 100 {
			set(both[:1])
			set(both)
		}
		r.after(2 * time.Second)
		r.backends[0].Forget()
		r.backends[1].Forget()
		r.after(20 * time.Second)
		for _, b := range r.backends {
			if n := b.ProbeCount(); n < 17 || n > 23 {
				t.Errorf("%s got %d probes in 20 s, want one each second", b.Name(), n)
			}
		}
		set(both[:1])
		r.backends[1].Forget()
		r.after(20 * time.Second)
		if n := r.backends[1].ProbeCount(); n != 0 {
			t.Errorf("a backend that left got %d probes", n)
		}
	})
}

// Closing the pool, or removing the backend, in the middle of a probe is no failure
// of the backend, and neither waits for it.
func TestProbeThatIsCutSaysNothing(t *testing.T) {
	for _, end := range []string{"Close", "SetTargets"} {
		bubble(t, end, func(t *testing.T) {
			s, logged := newStory()
			r := newBackends(t, 2)
			for _, b := range r.backends {
				b.SetProbe(probePath, lbtest.Hang())
			}
			r.startPool(lb.WithHealthCheck(lb.HealthCheck{Path: probePath, Interval: 5 * time.Second}), logged)
			r.after(time.Second)
			a := r.pool.Backends()[0]
			within(t, 0, func() {
				if end == "Close" {
					r.pool.Close()
				} else if err := r.pool.SetTargets(r.targets()[1:]); err != nil {
					t.Fatal(err)
				}
			})
			r.pool.Close()
			r.after(10 * time.Second)
			if st := a.Status(); st.Health != lb.HealthUnknown {
				t.Errorf("health = %v (%s), want unknown", st.Health, st.Reason)
			}
			if s.has("unhealthy") {
				t.Errorf("logged %q", s.lines)
			}
		})
	}
}

// A disabled backend is not probed. Once it is not disabled any more, its first
// verdict decides, either way.
func TestDisabledBackendsAreNotProbed(t *testing.T) {
	for _, c := range []struct {
		name string
		ill  bool
		want string
	}{{"well again", false, "healthy"}, {"ill by now", true, "unhealthy"}} {
		bubble(t, c.name, func(t *testing.T) {
			r := newBackends(t, 2)
			if !c.ill {
				r.fail(0)
			}
			r.startPool(lb.WithHealthCheck(everySecond()))
			r.after(3 * time.Second)
			setState(t, r.pool, "a", lb.Disabled)
			r.after(2 * time.Second)
			if p := r.pool.Stats().Backends[0].Probe; !p.Next.IsZero() {
				t.Errorf("the next probe is due at %v", p.Next)
			}
			before := r.backends[0].ProbeCount()
			r.after(20 * time.Second)
			if n := r.backends[0].ProbeCount() - before; n != 0 {
				t.Errorf("%d probes of a disabled backend", n)
			}
			if c.ill {
				r.fail(0)
			} else {
				r.pass(0)
			}
			setState(t, r.pool, "a", lb.Active)
			r.after(time.Millisecond)
			r.wantStates(c.want + " healthy")
			setState(t, r.pool, "a", lb.Draining)
			before = r.backends[0].ProbeCount()
			r.after(20 * time.Second)
			if n := r.backends[0].ProbeCount() - before; n < 15 {
				t.Errorf("%d probes of a draining backend in 20 s", n)
			}
		})
	}
}

// Probes are counted apart from requests, with their latency and their last error.
func TestStatsTellOfProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		check := everySecond()
		check.Interval, check.FastInterval = 10*time.Second, 2*time.Second
		r := newBackends(t, 1)
		r.backends[0].SetProbe(probePath, lbtest.Delay(120*time.Millisecond))
		r.startPool(lb.WithHealthCheck(check))
		if p := r.pool.Stats().Backends[0].Probe; p != nil {
			t.Errorf("probe = %+v before the first has ended", p)
		}
		r.after(20 * time.Second)
		s := r.pool.Stats()
		for s.Backends[0].Probe.Next.IsZero() { // one is under way
			r.after(50 * time.Millisecond)
			s = r.pool.Stats()
		}
		p := s.Backends[0].Probe
		if p.Verdict != "healthy" || p.Error != "" || p.Latency != 120*time.Millisecond || p.InARow != int(p.Count) || p.Failures != 0 {
			t.Errorf("probe = %+v", p)
		}
		if d := p.Next.Sub(p.At); d < 0 || d > 11*time.Second {
			t.Errorf("the next probe is due %v after the last", d)
		}
		if s.Requests != 0 || s.Backends[0].Requests != 0 || s.Backends[0].InFlight != 0 || s.Usable != 1 {
			t.Errorf("stats = %+v", s)
		}
		r.fail(0)
		r.after(12 * time.Second)
		p = r.pool.Stats().Backends[0].Probe
		if p.Verdict != "unhealthy" || !strings.Contains(p.Error, "status 503") || p.InARow < 1 || int64(p.InARow) != p.Failures {
			t.Errorf("probe = %+v", p)
		}
		if s := r.pool.Stats().Backends[0]; s.Failures != 0 {
			t.Errorf("probes count as %d failures of requests", s.Failures)
		}
	})
}

// slowToPrepare is a strategy that takes its time to prepare for a set.
type slowToPrepare struct {
	lb.Balancer
	prepared atomic.Int64
}

func (s *slowToPrepare) Prepare([]*lb.Backend) lb.Balancer {
	linger(10 * time.Millisecond)
	s.prepared.Add(1)
	return s.Balancer
}

// When a thousand backends go down at once, not each of them makes the strategy
// prepare anew, and at the end all of it is seen.
func TestManyTransitionsArePublishedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &slowToPrepare{Balancer: lb.RoundRobin()}
		v := newVerdicts()
		v.check = func(context.Context, lb.ProbeTarget) (lb.Verdict, error) { return lb.VerdictUnhealthy, nil }
		pool := newPool(t, manyTargets(1000), lb.WithBalancer(s), lb.WithChecker(v), lb.WithHealthCheck(lb.HealthCheck{Interval: 10 * time.Second}))
		defer pool.Close()
		s.prepared.Store(0)
		advance(1100 * time.Millisecond) // the first round, which takes them all out
		if stats := pool.Stats(); !stats.FailOpen || stats.Usable != 0 {
			t.Errorf("fail open = %t, usable = %d, want true and 0", stats.FailOpen, stats.Usable)
		}
		if n := s.prepared.Load(); n < 10 || n > 120 { // two for each snapshot: the usable and the others
			t.Errorf("prepared %d times in 1.1 s, 10 ms each, want at most half of the time", n)
		}
	})
}
