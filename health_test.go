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

// What a probe finds and what requests meet with is one state: these are the rows of
// the table in the comment of lb.Health, told as stories. What a's
// probes say is up to the test.
func TestHealthTable(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(h *healthStory)
		want []string
	}{
		{"unknown to healthy to unhealthy and back", func(h *healthStory) {
			h.probes("healthy", "unhealthy", "unhealthy", "unhealthy", "healthy", "healthy")
		}, []string{"unknown to healthy: probe passed", "healthy to unhealthy: probes failed in a row: 3, the last: so said", "unhealthy to healthy: probes passed in a row: 2"}},
		{"unknown to unhealthy at once", func(h *healthStory) {
			h.probes("unhealthy", "healthy", "healthy")
		}, []string{"unknown to unhealthy: probe failed: so said", "unhealthy to healthy: probes passed in a row: 2"}},
		{"degraded and draining come and go at once", func(h *healthStory) {
			h.probes("degraded", "healthy", "drain", "degraded", "drain", "healthy")
		}, []string{"unknown to degraded: probe said degraded", "degraded to healthy: probe passed", "healthy to draining: probe said drain",
			"draining to degraded: probe said degraded", "degraded to draining: probe said drain", "draining to healthy: probe passed"}},
		{"draining falls like any other", func(h *healthStory) {
			h.probes("drain", "unhealthy", "unhealthy", "unhealthy", "healthy", "drain")
		}, []string{"unknown to draining: probe said drain", "draining to unhealthy: probes failed in a row: 3, the last: so said", "unhealthy to draining: probe said drain"}},
		{"ejected while unknown, the first verdict decides", func(h *healthStory) {
			h.requestsFail()
			h.probes("unhealthy")
		}, []string{"unknown to ejected: failures in a row: 3, the last: dial: refused", "ejected to unhealthy: probe failed: so said"}},
		{"a passing probe ends an ejection", func(h *healthStory) {
			h.probes("healthy")
			h.requestsFail()
			h.probes("healthy")
		}, []string{"unknown to healthy: probe passed", "healthy to ejected: failures in a row: 3, the last: dial: refused", "ejected to healthy: probe passed"}},
		{"or gives it the health it says", func(h *healthStory) {
			h.probes("healthy")
			h.requestsFail()
			h.probes("degraded")
		}, []string{"unknown to healthy: probe passed", "healthy to ejected: failures in a row: 3, the last: dial: refused", "ejected to degraded: probe said degraded"}},
		{"failing probes outdo an ejection", func(h *healthStory) {
			h.probes("healthy", "unhealthy")
			h.requestsFail()
			h.probes("unhealthy", "unhealthy")
			h.sleep(10 * time.Minute) // the ejection's end means nothing any more
			h.probes("healthy", "healthy")
		}, []string{"unknown to healthy: probe passed", "healthy to ejected: failures in a row: 3, the last: dial: refused",
			"ejected to unhealthy: probes failed in a row: 3, the last: so said", "unhealthy to healthy: probes passed in a row: 2"}},
		{"a trial that is answered gives back the last verdict", func(h *healthStory) {
			h.probes("healthy")
			h.requestsFail()
			h.sleep(6 * time.Second)
			h.requestsWork()
		}, []string{"unknown to healthy: probe passed", "healthy to ejected: failures in a row: 3, the last: dial: refused",
			"ejected to trial: ejection is over", "trial to healthy: answered a request"}},
		{"a trial that fails, then a probe that passes", func(h *healthStory) {
			h.probes("healthy")
			h.requestsFail()
			h.sleep(6 * time.Second)
			h.requestsFail()
			h.probes("healthy") // was sent before, and says nothing of that
			h.probes("healthy")
		}, []string{"unknown to healthy: probe passed", "healthy to ejected: failures in a row: 3, the last: dial: refused",
			"ejected to trial: ejection is over", "trial to ejected: failed on trial: dial: refused", "ejected to healthy: probe passed"}},
		{"a probe that passes ends a trial", func(h *healthStory) {
			h.probes("healthy")
			h.requestsFail()
			h.sleep(6 * time.Second)
			h.probes("healthy")
		}, []string{"unknown to healthy: probe passed", "healthy to ejected: failures in a row: 3, the last: dial: refused",
			"ejected to trial: ejection is over", "trial to healthy: probe passed"}},
		{"probes that fail end a trial the other way", func(h *healthStory) {
			h.probes("healthy")
			h.requestsFail()
			h.sleep(6 * time.Second)
			h.probes("unhealthy", "unhealthy", "unhealthy")
		}, []string{"unknown to healthy: probe passed", "healthy to ejected: failures in a row: 3, the last: dial: refused",
			"ejected to trial: ejection is over", "trial to unhealthy: probes failed in a row: 3, the last: so said"}},
		{"behind the operator's word it goes on, unseen", func(h *healthStory) {
			h.probes("healthy")
			h.set(lb.Draining)
			h.probes("unhealthy", "unhealthy", "unhealthy")
			h.set(lb.Active)
		}, []string{"unknown to healthy: probe passed", "healthy to draining: set by the operator", "draining to unhealthy: set by the operator"}},
	} {
		bubble(t, c.name, func(t *testing.T) {
			h := newHealthStory(t)
			c.do(h)
			h.wantOfA(c.want)
		})
	}
}

// healthStory is a pool of a, whose probes the test sends, and b, which is well.
type healthStory struct {
	*rig
	*story
	said  chan string
	heard chan struct{}
}

func newHealthStory(t *testing.T, opts ...lb.Option) *healthStory {
	h := &healthStory{said: make(chan string), heard: make(chan struct{}, 1)}
	words := map[string]lb.Verdict{"healthy": lb.VerdictHealthy, "unhealthy": lb.VerdictUnhealthy, "degraded": lb.VerdictDegraded, "drain": lb.VerdictDrain}
	checker := lb.CheckerFunc(func(ctx context.Context, p lb.ProbeTarget) (lb.Verdict, error) {
		if p.Backend().Name() == "b" {
			return lb.VerdictHealthy, nil
		}
		select {
		case word := <-h.said:
			defer func() { h.heard <- struct{}{} }()
			if word == "unhealthy" {
				return 0, errors.New("so said")
			}
			return words[word], nil
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	})
	story, logged := newStory()
	h.story = story
	h.rig = newBackends(t, 2)
	h.startPool(append([]lb.Option{
		lb.WithChecker(checker), lb.WithHealthCheck(lb.HealthCheck{Interval: time.Hour, FastInterval: time.Second, Timeout: time.Hour}),
		logged, lb.WithBalancer(lb.BalancerFunc(first)),
	}, opts...)...)
	return h
}

// probes makes a's next probes say words, one after the other, whenever they come.
func (h *healthStory) probes(words ...string) {
	for _, word := range words {
		h.said <- word
		<-h.heard
		synctest.Wait()
	}
}

func (h *healthStory) requestsFail() {
	h.backends[0].Set(lbtest.Refuse())
	h.requests()
}

func (h *healthStory) requestsWork() {
	h.backends[0].Set(lbtest.Answer())
	h.requests()
}

func (h *healthStory) requests() {
	for range 3 {
		h.wantStatus(h.must("GET", "", nil), 200)
	}
	synctest.Wait()
}

func (h *healthStory) sleep(d time.Duration) { h.after(d) }

func (h *healthStory) set(s lb.State) { setState(h.t, h.pool, "a", s) }

// wantOfA compares a's transitions, without their times.
func (h *healthStory) wantOfA(want []string) {
	h.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	var got []string
	for _, line := range h.lines {
		_, line, _ = strings.Cut(strings.TrimSpace(line), " ")
		if line, ok := strings.CutPrefix(line, "a "); ok {
			got = append(got, line)
		}
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		h.t.Errorf("a went\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}
