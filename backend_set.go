package lb

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// snapshot is one immutable view of the set: who is in it, who is a candidate
// and the strategy prepared for those. Requests read it through one atomic
// load, so a table and its set can never disagree.
type snapshot struct {
	all []*Backend // as configured
	// members is the set that the strategy was prepared for: the usable
	// backends and those on trial or, if none is usable, every backend that is
	// neither draining nor disabled. The order is that of all.
	members []*Backend
	// usable is members without those on trial: the candidates of a request that
	// tried nothing yet while nothing is on trial, ready to be handed out.
	usable []*Backend
	trials []trial
	// ejected is a request's last resort once it has tried the members: it is
	// better to ask a backend that was bad than to answer nothing.
	ejected  []*Backend
	failOpen bool     // none is usable, members are all the same
	balancer Balancer // prepared for members
	resort   Balancer // prepared for ejected
}

// trial is a backend on trial and since when.
type trial struct {
	backend *Backend
	since   time.Time
}

// backendSet is the one writer of a pool's set. Every change happens under its
// lock and is then published as a new snapshot.
type backendSet struct {
	current atomic.Pointer[snapshot]
	cfg     *config
	conns   *connSet
	work    gate // the set's timers and the pool's readers, which Close waits for
	panics  panics

	mu       sync.Mutex // guards the following
	backends []*Backend
	changes  uint64 // counts what a snapshot must show
	shown    uint64 // the changes that the current snapshot shows
	events   []event
	telling  bool // somebody is handing events to the logger
	closed   bool // no more timers
}

// maxEvents bounds what waits for a logger that is slow; the oldest give way.
const maxEvents = 1000

// event is a change of state on its way to the log.
type event struct {
	level slog.Level
	text  string
	attrs []slog.Attr
}

// ownsLocked tells whether b is in the set.
func (s *backendSet) ownsLocked(b *Backend) bool { return !b.removed.Load() }

// takesRequests tells whether b may be given new requests if its health allows.
func (b *Backend) takesRequests() bool {
	return b.status.Load().State == Active && b.settings.Load().weight != NoWeight
}

// replace makes targets the set. A backend whose name and endpoint stay is kept
// with all its state.
func (s *backendSet) replace(targets []parsed) {
	s.mu.Lock()
	old := make(map[string]*Backend, len(s.backends))
	for _, b := range s.backends {
		old[b.name] = b
	}
	next := make([]*Backend, len(targets))
	for i, t := range targets {
		if b := old[t.name]; b != nil && b.endpoint == t.endpoint {
			delete(old, t.name)
			b.configure(t.settings)
			next[i] = b
			continue
		}
		next[i] = newBackend(t, newConns(s.conns, t.endpoint, s.cfg, &s.panics), time.Now())
		s.noteLocked(slog.LevelInfo, "backend added", slog.String("backend", t.name), slog.String("url", t.endpoint.url()))
	}
	gone := make([]*Backend, 0, len(old))
	for _, b := range s.backends {
		if old[b.name] == b {
			gone = append(gone, b)
			s.noteLocked(slog.LevelInfo, "backend removed", slog.String("backend", b.name), slog.String("url", b.URL()))
			if t := b.passive.timer; t != nil {
				t.Stop()
			}
			b.removed.Store(true)
		}
	}
	s.backends = next
	s.changes++
	s.mu.Unlock()
	s.publish()
	for _, b := range gone {
		b.retire()
	}
}

// setState carries out the operator's wish for the backend of that name.
func (s *backendSet) setState(name string, state State) error {
	s.mu.Lock()
	i := slices.IndexFunc(s.backends, func(b *Backend) bool { return b.name == name })
	if i < 0 {
		s.mu.Unlock()
		return fmt.Errorf("lb: no backend is called %q", name)
	}
	b := s.backends[i]
	st := b.Status()
	if st.State != state {
		st.State, st.Reason, st.Since = state, "set by the operator", time.Now()
		s.setStatusLocked(b, st)
	}
	s.mu.Unlock()
	s.publishIfChanged()
	return nil
}

// setStatusLocked changes b's status and notes the change for the log.
func (s *backendSet) setStatusLocked(b *Backend, st Status) {
	was := b.Status()
	b.status.Store(&st)
	s.changes++
	if was.String() == st.String() {
		return // a change of health behind draining or disabled: of no effect yet
	}
	level := slog.LevelInfo
	attrs := []slog.Attr{
		slog.String("backend", b.name), slog.String("from", was.String()),
		slog.String("to", st.String()), slog.String("reason", st.Reason),
	}
	if st.Health == HealthEjected && was.Health != HealthEjected {
		level = slog.LevelWarn
		attrs = append(attrs, slog.Time("until", st.Until))
		if err := b.lastErr.Load(); err != nil {
			attrs = append(attrs, slog.String("error", *err))
		}
	}
	s.noteLocked(level, "backend state changed", attrs...)
}

// publishIfChanged publishes unless the current snapshot shows all changes.
func (s *backendSet) publishIfChanged() {
	s.mu.Lock()
	stale := s.changes != s.shown
	s.mu.Unlock()
	if stale {
		s.publish()
	}
}

// publish makes the present state of the set what requests see. The strategy is
// prepared outside of the lock, because it may be the user's; if the set has
// changed meanwhile, it is prepared again.
func (s *backendSet) publish() {
	for {
		s.mu.Lock()
		changes := s.changes
		next := s.snapshotLocked()
		s.mu.Unlock()

		next.balancer = s.prepare(next.members)
		next.resort = s.prepare(next.ejected)

		s.mu.Lock()
		if s.changes == changes {
			if last := s.current.Load(); s.shown != changes || last == nil {
				s.noteFailOpenLocked(last, next)
				next.stamp()
				s.current.Store(next)
				s.shown = changes
			}
			s.mu.Unlock()
			s.tell()
			return
		}
		s.mu.Unlock()
	}
}

// snapshotLocked is the candidate filter for all requests: what they see is
// already filtered.
func (s *backendSet) snapshotLocked() *snapshot {
	n := &snapshot{all: s.backends}
	for _, b := range s.backends {
		if !b.takesRequests() {
			continue
		}
		switch b.Status().Health {
		case HealthUnknown:
			n.usable = append(n.usable, b)
			n.members = append(n.members, b)
		case HealthTrial:
			n.trials = append(n.trials, trial{b, b.passive.trialFrom})
			n.members = append(n.members, b)
		case HealthEjected:
			n.ejected = append(n.ejected, b)
		}
	}
	if len(n.usable) > 0 {
		return n
	}
	n.failOpen, n.trials, n.members, n.ejected = true, nil, nil, nil
	for _, b := range s.backends {
		if b.takesRequests() {
			n.members = append(n.members, b)
		}
	}
	n.usable = n.members
	return n
}

// noteFailOpenLocked notes that the pool begins or ceases to use unusable backends.
func (s *backendSet) noteFailOpenLocked(last, next *snapshot) {
	was, is := last != nil && last.failsOpen(), next.failsOpen()
	switch {
	case is && !was:
		s.noteLocked(slog.LevelError, "no backend is usable: failing open to unusable ones", slog.Int("backends", len(next.members)))
	case was && !is:
		s.noteLocked(slog.LevelInfo, "no longer failing open", slog.Int("usable", len(next.usable)))
	}
}

// failsOpen tells whether unusable backends are used.
func (n *snapshot) failsOpen() bool { return n.failOpen && len(n.members) > 0 }

// stamp marks the candidates, so that a pick can be checked without a search.
func (n *snapshot) stamp() {
	for _, b := range n.usable {
		b.published.Store(n)
	}
}

// prepare returns the strategy for set, prepared if it wants to be.
func (s *backendSet) prepare(set []*Backend) (ready Balancer) {
	ready = s.cfg.balancer
	p, ok := ready.(Preparer)
	if !ok || len(set) == 0 {
		return ready
	}
	defer func() {
		if v := recover(); v != nil {
			s.panics.caught("Prepare of the strategy", v)
			ready = s.cfg.balancer // which works unprepared too
		}
	}()
	if b := p.Prepare(slices.Clone(set)); !isNil(b) {
		return b
	}
	return ready
}

// noteLocked queues an event for the log.
func (s *backendSet) noteLocked(level slog.Level, text string, attrs ...slog.Attr) {
	if s.cfg.name != "" {
		attrs = append(attrs, slog.String("pool", s.cfg.name))
	}
	if len(s.events) >= maxEvents {
		s.events = s.events[1:]
	}
	s.events = append(s.events, event{level, text, attrs})
}

// tell hands the queued events to the logger, in order and without the lock.
// Whoever comes while another does so leaves its events to that one.
func (s *backendSet) tell() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.telling {
		return
	}
	s.telling = true
	for len(s.events) > 0 {
		events := s.events
		s.events = nil
		s.mu.Unlock()
		for _, e := range events {
			s.log(e)
		}
		s.mu.Lock()
	}
	s.telling = false
}

// log hands one event to the logger, whose panic is contained.
func (s *backendSet) log(e event) {
	defer func() {
		if recover() != nil {
			s.panics.count.Add(1) // and not logged: the logger is what panicked
		}
	}()
	s.cfg.logger.LogAttrs(context.Background(), e.level, e.text, e.attrs...)
}

// close stops the timers of all ejections.
func (s *backendSet) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, b := range s.backends {
		if t := b.passive.timer; t != nil {
			t.Stop()
		}
	}
}
