package lb

import (
	"context"
	"fmt"
	"net/http"
	"slices"
)

// Ready waits until every backend has a verdict of its probes and one of them may be
// used: a usable one (see Status.Usable) or, if the pool fails open, any. Without
// active checks it so returns at once, unless the operator has taken all backends out.
// A backend that is disabled needs no verdict.
//
// It returns nil then. When ctx ends before, the error says what is missing and wraps
// ctx's; a program may well go on and serve. After Close, or once Shutdown was called,
// the error wraps ErrClosed.
func (p *Pool) Ready(ctx context.Context) error {
	for {
		why, wake := p.set.unready(true)
		switch {
		case p.requests.closed():
			return fmt.Errorf("lb: %w", ErrClosed)
		case why == "":
			return nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return fmt.Errorf("lb: not ready: %s: %w", why, ctx.Err())
		}
	}
}

// ReadyHandler returns a handler for the readiness probe of what stands in front of the
// program: it answers 200 if Ready would return at once, else 503 with the reason, which
// counts backends and does not name them. There is one difference: backends that join a
// pool which was ready do not make it unready until they are probed.
//
// So a pool that fails open stays ready when all its backends fail their probes, and one
// with WithFailClosed does not. Choose the latter only if there are others that can take
// over: with the same backends behind them, all would become unready together.
//
// It answers 503 once Shutdown was called. A program that first has its server end the
// requests under way, as Shutdown advises, should answer 503 by itself from the signal on;
// examples/gateway does.
func (p *Pool) ReadyHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		why, _ := p.set.unready(false)
		if p.requests.closed() {
			why = ErrClosed.Error()
		}
		if why != "" {
			setRetryAfter(w.Header(), p.retryAfter())
			http.Error(w, "not ready: "+why, http.StatusServiceUnavailable)
			return
		}
		if snap := p.set.current.Load(); snap.failsOpen() {
			fmt.Fprintf(w, "ready, failing open: %s\n", tally(snap.all))
			return
		}
		fmt.Fprintln(w, "ready")
	})
}

// unready says what keeps the set from being ready, "" if nothing does, and returns
// a channel that is closed at the next change. all asks for a verdict of each
// backend even if there once were all.
func (s *backendSet) unready(all bool) (why string, wake <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wake == nil {
		s.wake = make(chan struct{})
	}
	waiting := 0
	for _, b := range s.backends {
		if b.awaitsVerdictLocked() {
			waiting++
		}
	}
	switch {
	case waiting > 0 && (all || !s.warm):
		return fmt.Sprintf("of %d targets %d have no verdict yet", len(s.backends), waiting), s.wake
	case all && s.changes != s.shown:
		return "the last verdicts are not published yet", s.wake
	case len(s.current.Load().usable) == 0:
		return tally(s.backends), s.wake
	}
	return "", s.wake
}

// warmLocked notes whether all backends have a verdict by now.
func (s *backendSet) warmLocked() {
	s.warm = s.warm || !slices.ContainsFunc(s.backends, (*Backend).awaitsVerdictLocked)
}

// awaitsVerdictLocked tells whether nothing is known of b that a probe will find out.
func (b *Backend) awaitsVerdictLocked() bool {
	return b.watch != nil && !b.checks.known && !b.disabled()
}
