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
			advance(time.Minute)
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
		advance(time.Minute)
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
		advance(20 * time.Second)
		close(release)
		advance(3 * time.Second)
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
		advance(time.Second)
		v.mu.Lock()
		v.check = func(context.Context, lb.ProbeTarget) (lb.Verdict, error) {
			return lb.VerdictUnhealthy, fmt.Errorf("dial: %w", syscall.EMFILE)
		}
		v.mu.Unlock()
		advance(time.Minute)
		s := pool.Stats().Backends[0]
		if s.State != "healthy" || s.Probe.Verdict != "none" || !strings.Contains(s.Probe.Error, "too many open files") {
			t.Errorf("backend = %+v, probe %+v", s, s.Probe)
		}
	})
}

// A connection that a Checker opened ends with the probe, whether the Checker heeds
// its context or not.
func TestDialledConnectionsEndWithTheProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		reader := lb.CheckerFunc(func(ctx context.Context, p lb.ProbeTarget) (lb.Verdict, error) {
			c, err := p.Dial(ctx)
			if err != nil {
				return 0, err
			}
			if _, err := c.Read(make([]byte, 1)); err != nil { // the server never says anything
				return 0, err
			}
			return lb.VerdictHealthy, nil
		})
		r.startPool(lb.WithChecker(reader), lb.WithHealthCheck(lb.HealthCheck{Interval: time.Second}))
		r.after(time.Minute)
		if s := r.pool.Stats(); s.Abandoned != 0 || s.Backends[0].Probe.Count < 25 || r.backends[0].OpenConns() > 1 {
			t.Errorf("abandoned = %d, probes = %d, open connections = %d", s.Abandoned, s.Backends[0].Probe.Count, r.backends[0].OpenConns())
		}
	})
}

// A Checker can be tested without a pool.
func TestNewProbeTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		b := r.backends[0]
		p, err := lb.NewProbeTarget(lb.Target{Name: "a", URL: b.URL(), HealthURL: b.URL() + probePath + "?x=1"}, r.net.Transport())
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{"", "/other"} {
			req, _ := http.NewRequest("GET", path, nil)
			resp, err := p.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
		probes, others := b.Probes(), b.Received()
		if len(probes) != 1 || len(others) != 1 || probes[0].Target != probePath+"?x=1" || others[0].Target != "/other" ||
			others[0].Header.Get("User-Agent") != "lb-health-check" {
			t.Errorf("probes = %+v, others = %+v", probes, others)
		}
		c, err := p.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		if _, err := lb.NewProbeTarget(lb.Target{URL: "nonsense"}, nil); err == nil {
			t.Error("a bad target is accepted")
		}
		var zero lb.ProbeTarget
		if _, err := zero.Dial(t.Context()); err == nil {
			t.Error("the zero value dials")
		}
		req, _ := http.NewRequest("GET", "/", nil)
		if _, err := zero.RoundTrip(req); err == nil {
			t.Error("the zero value sends")
		}
		advance(time.Second)
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
		pool := newPool(t, []lb.Target{target}, over(r.net), lb.WithChecker(checker))
		defer pool.Close()
		r.after(time.Millisecond)
		got := r.backends[0].Received()
		if st := pool.Backends()[0].Status(); st.Health != lb.HealthHealthy || len(got) != 1 ||
			got[0].Target != "/base/check" || got[0].Host != "shop.test" || got[0].BodyBytes != 4 {
			t.Errorf("health = %v (%s), received %+v", st.Health, st.Reason, got)
		}
	})
}
