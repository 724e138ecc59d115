package lb_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
)

// A Checker that panics, lies, ends its goroutine or does not return harms nobody but
// its verdict, and the schedule goes on.
func TestCheckersThatMisbehaveAreContained(t *testing.T) {
	for _, c := range []struct {
		name   string
		check  lb.CheckerFunc
		reason string
		panics int64
	}{
		{"panics", func(context.Context, lb.ProbeTarget) (lb.Verdict, error) { panic("boom") }, "checker panicked: boom", 1},
		{"ends its goroutine", func(context.Context, lb.ProbeTarget) (lb.Verdict, error) { runtime.Goexit(); return 1, nil }, "checker ended its goroutine", 0},
		{"returns a verdict that does not exist", func(context.Context, lb.ProbeTarget) (lb.Verdict, error) { return 17, nil }, "checker returned verdict 17", 0},
		{"returns healthy with an error", func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			return lb.VerdictHealthy, errors.New("but no")
		}, "checker returned healthy with an error: but no", 0},
		{"returns healthy too late", func(ctx context.Context, _ lb.ProbeTarget) (lb.Verdict, error) {
			<-ctx.Done()
			return lb.VerdictHealthy, nil
		}, "no verdict in time (2s)", 0},
	} {
		bubble(t, c.name, func(t *testing.T) {
			v := newVerdicts()
			v.check = func(ctx context.Context, target lb.ProbeTarget) (lb.Verdict, error) {
				if target.Backend().Name() == "t0" {
					return c.check(ctx, target)
				}
				return lb.VerdictHealthy, nil
			}
			pool := newPool(t, manyTargets(2), lb.WithChecker(v))
			defer pool.Close()
			time.Sleep(time.Minute)
			s := pool.Stats()
			bad, good := s.Backends[0], s.Backends[1]
			if bad.State != "unhealthy" || !strings.Contains(bad.Reason, c.reason) || bad.Probe.Count < 15 || bad.Probe.Failures != bad.Probe.Count {
				t.Errorf("backend = %+v, probe %+v", bad, bad.Probe)
			}
			if good.State != "healthy" || good.Probe.Failures != 0 {
				t.Errorf("the other backend = %+v, probe %+v", good, good.Probe)
			}
			if s.Panics != c.panics*bad.Probe.Count || s.Abandoned != 0 {
				t.Errorf("panics = %d, abandoned = %d for %d probes", s.Panics, s.Abandoned, bad.Probe.Count)
			}
		})
	}
}

// A Checker that ignores its context blocks neither the others nor Close, is not
// called again before it returns, and counts as failed until then.
func TestCheckerThatBlocksIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerdicts()
		release := make(chan struct{})
		blocked := manyTargets(40)
		v.check = func(_ context.Context, target lb.ProbeTarget) (lb.Verdict, error) {
			if target.Backend().Name() != "good" {
				<-release
			}
			return lb.VerdictHealthy, nil
		}
		targets := append(slices.Clone(blocked), lb.Target{Name: "good", URL: "http://good.test"})
		pool := newPool(t, targets, lb.WithChecker(v))
		time.Sleep(time.Minute)
		s := pool.Stats()
		for _, b := range s.Backends[:len(blocked)] {
			if n := len(v.probes(b.Name)); n != 1 || b.State != "unhealthy" {
				t.Fatalf("%s is %s after %d calls, want unhealthy after 1", b.Name, b.State, n)
			}
		}
		good := s.Backends[len(blocked)]
		if good.State != "healthy" || good.Probe.Count < 9 || s.Abandoned < 40 {
			t.Errorf("the good one is %s after %d probes; abandoned = %d", good.State, good.Probe.Count, s.Abandoned)
		}
		began := time.Now()
		pool.Close()
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("Close took %v", d)
		}
		close(release)
	})
}

// A released Checker goes on as if nothing had been.
func TestCheckerThatReturnsLateIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerdicts()
		release := make(chan struct{})
		v.check = func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			<-release
			return lb.VerdictHealthy, nil
		}
		pool := newPool(t, manyTargets(1), lb.WithChecker(v))
		defer pool.Close()
		time.Sleep(20 * time.Second)
		close(release)
		time.Sleep(3 * time.Second)
		if st := pool.Backends()[0].Status(); st.Health != lb.HealthHealthy {
			t.Errorf("health = %v (%s), want healthy", st.Health, st.Reason)
		}
	})
}

// Want of files or ports here says nothing about a backend.
func TestProbeThatCannotBeSentBlamesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newVerdicts()
		pool := newPool(t, manyTargets(1), lb.WithChecker(v))
		defer pool.Close()
		time.Sleep(time.Second)
		v.mu.Lock()
		v.check = func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			return lb.VerdictUnhealthy, fmt.Errorf("dial: %w", syscall.EMFILE)
		}
		v.mu.Unlock()
		time.Sleep(time.Minute)
		s := pool.Stats().Backends[0]
		if s.State != "healthy" || s.Probe.Verdict != "none" || !strings.Contains(s.Probe.Error, "too many open files") {
			t.Errorf("backend = %+v, probe %+v", s, s.Probe)
		}
	})
}

// A ProbeTarget is the transport of an http.Client, and tells whom it stands for.
func TestProbeTargetServesAClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		target := lb.Target{Name: "a", URL: r.backends[0].URL() + "/base", Host: "shop.test", Metadata: map[string]string{"zone": "x"}}
		checker := lb.CheckerFunc(func(ctx context.Context, p lb.ProbeTarget) (lb.Verdict, error) {
			if zone, _ := p.Backend().Metadata("zone"); zone != "x" || p.URL() != r.backends[0].URL()+"/base" {
				t.Errorf("target is in zone %q at %s", zone, p.URL())
			}
			req, err := http.NewRequestWithContext(ctx, "POST", "/check", strings.NewReader("ping"))
			if err != nil {
				return 0, err
			}
			client := http.Client{Transport: p}
			resp, err := client.Do(req)
			if err != nil {
				return 0, err
			}
			resp.Body.Close()
			nc, err := p.Dial(ctx)
			if err != nil {
				return 0, err
			}
			return lb.VerdictHealthy, nc.Close()
		})
		pool := newPool(t, []lb.Target{target}, lb.WithTransport(r.net.Transport()), lb.WithChecker(checker))
		defer pool.Close()
		r.after(time.Millisecond)
		got := r.backends[0].Received()
		if st := pool.Backends()[0].Status(); st.Health != lb.HealthHealthy || len(got) != 1 ||
			got[0].Target != "/base/check" || got[0].Host != "shop.test" || got[0].BodyBytes != 4 {
			t.Errorf("health = %v (%s), received %+v", st.Health, st.Reason, got)
		}
	})
}
