package lb

import (
	"context"
	"fmt"
	"net/http"
)

// Ready waits until the pool can be expected to answer: every backend has a verdict
// of its probes and one at least is usable; see Status.Usable. Without active checks
// only the second is asked for, so that it mostly returns at once. A backend that is
// disabled needs no verdict.
//
// It returns nil then. When ctx ends before, the error says what is missing and wraps
// ctx's; after Close, or once Shutdown was called, it wraps ErrClosed.
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

// ReadyHandler answers whether the pool can be expected to answer, for the readiness
// probe of whatever stands in front of it: 200 if so, 503 and the reason if not. It
// is like Ready but for two things: it does not wait, and backends that join a pool
// which was ready before do not make it unready while they are being probed. Once
// Shutdown was called it answers 503. The reason counts backends and does not name
// them.
//
// A pool that fails open goes on to use what it has, but is not ready.
func (p *Pool) ReadyHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		why, _ := p.set.unready(false)
		if p.requests.closed() {
			why = ErrClosed.Error()
		}
		if why != "" {
			setRetryAfter(w.Header(), p.retryAfter())
			http.Error(w, "not ready: "+why, http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Cache-Control", "no-store")
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
	waiting, usable := 0, 0
	for _, b := range s.backends {
		if b.watch != nil && !b.checks.known && !b.disabled() {
			waiting++
		}
		if b.Status().Usable() && b.takesRequests() {
			usable++
		}
	}
	s.warm = s.warm || waiting == 0
	switch {
	case waiting > 0 && (all || !s.warm):
		return fmt.Sprintf("of %d targets %d have not been probed yet", len(s.backends), waiting), s.wake
	case all && s.changes != s.shown:
		return "what is known is not published yet", s.wake
	case usable == 0:
		return tally(s.backends), s.wake
	}
	return "", s.wake
}
