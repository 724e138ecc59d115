package lb_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// probePath is where the backends of these tests are probed.
const probePath = "/healthz"

// everySecond is a check whose time-out and rise and fall tell apart.
func everySecond() lb.HealthCheck {
	return lb.HealthCheck{Path: probePath, Interval: time.Second, FastInterval: time.Second, Timeout: 500 * time.Millisecond}
}

// newProbedRig starts a pool over n backends called a, b, c, … that answer their
// requests and their probes.
func newProbedRig(t *testing.T, n int, check lb.HealthCheck, opts ...lb.Option) *rig {
	t.Helper()
	r := newBackends(t, n)
	r.startPool(append([]lb.Option{lb.WithHealthCheck(check)}, opts...)...)
	return r
}

// newBackends returns a rig whose pool is still to be started, so that its backends
// can be told what to do before the first probe comes.
func newBackends(t *testing.T, n int) *rig {
	t.Helper()
	r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
	for i := range n {
		b := r.net.NewBackend(t, string(rune('a'+i)))
		b.SetProbe(probePath, lbtest.Answer())
		r.backends = append(r.backends, b)
	}
	return r
}

// startPool starts the pool over all backends.
func (r *rig) startPool(opts ...lb.Option) {
	r.t.Helper()
	r.start(r.targets(), opts...)
}

// targets is a target for each backend, with its name.
func (r *rig) targets() (targets []lb.Target) {
	for _, b := range r.backends {
		targets = append(targets, lb.Target{Name: b.Name(), URL: b.URL()})
	}
	return targets
}

// fail makes the probes of backend i fail, pass makes them pass again.
func (r *rig) fail(i int) { r.backends[i].SetProbe(probePath, lbtest.AnswerStatus(503, "")) }
func (r *rig) pass(i int) { r.backends[i].SetProbe(probePath, lbtest.Answer()) }

// after is advance.
func (r *rig) after(d time.Duration) { advance(d) }

// states is the state of each backend, in order.
func (r *rig) states() string {
	var words []string
	for _, b := range r.pool.Stats().Backends {
		words = append(words, b.State)
	}
	return strings.Join(words, " ")
}

func (r *rig) wantStates(want string) {
	r.t.Helper()
	if got := r.states(); got != want {
		r.t.Errorf("states = %s, want %s", got, want)
	}
}

// story is a logger that keeps the transitions of backends, each with its time.
type story struct {
	slog.Handler
	began time.Time

	mu    sync.Mutex // guards the following
	lines []string
}

// newStory returns a story that begins now, and the option to have it told.
func newStory() (*story, lb.Option) {
	s := &story{Handler: slog.DiscardHandler, began: time.Now()}
	return s, lb.WithLogger(slog.New(s))
}

func (s *story) Enabled(context.Context, slog.Level) bool { return true }

func (s *story) Handle(_ context.Context, r slog.Record) error {
	attrs := map[string]string{}
	r.Attrs(func(a slog.Attr) bool {
		attrs[a.Key] = a.Value.String()
		return true
	})
	line := r.Message
	if attrs["to"] != "" {
		line = fmt.Sprintf("%s %s to %s: %s", attrs["backend"], attrs["from"], attrs["to"], attrs["reason"])
	}
	if r.Message == "backend added" {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, fmt.Sprintf("%3.0f %s", time.Since(s.began).Seconds(), line))
	return nil
}

// want compares what was told with lines, each of which begins with the second it is
// expected at.
func (s *story) want(t *testing.T, lines ...string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	got := slices.Clone(s.lines)
	for i := range got {
		got[i] = strings.TrimSpace(got[i])
	}
	if !slices.Equal(got, lines) {
		t.Errorf("the story is\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(lines, "\n\t"))
	}
}

// has tells whether some line holds text.
func (s *story) has(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.lines, func(line string) bool { return strings.Contains(line, text) })
}

// newHangingLogger returns a logger whose records of transitions wait for release.
func newHangingLogger(release chan struct{}) *slog.Logger {
	return slog.New(hanging{slog.DiscardHandler, release})
}

type hanging struct {
	slog.Handler
	release chan struct{}
}

func (hanging) Enabled(context.Context, slog.Level) bool { return true }

func (h hanging) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "backend state changed" {
		<-h.release
	}
	return nil
}
