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
	// backends and those on trial or, if the pool fails open, every backend that
	// may be used at all. The order is that of all.
	members []*Backend
	// usable is members without those on trial: the candidates of a request that
	// tried nothing yet while nothing is on trial, ready to be handed out.
	usable   []*Backend
	trials   []trial
	balancer Balancer // prepared for members

	degraded group // for a request that has tried the usable ones; empty if these are they
	// ejected is a request's last resort once it has tried the others, those that
	// failed their probes included: it is better to ask a backend that was bad than to
	// answer nothing. It is empty if the pool fails closed.
	ejected  group
	failOpen bool // none is usable, members are all the same
}

// group is backends with the strategy prepared for them.
type group struct {
	backends []*Backend
	balancer Balancer
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
	prober  *prober // nil without active checks
	work    gate    // the set's timers, its probes and the pool's readers, which Close waits for
	panics  panics

	mu       sync.Mutex // guards the following
	backends []*Backend
	changes  uint64 // counts what a snapshot must show
	shown    uint64 // the changes that the current snapshot shows
	events   []event
	telling  bool          // somebody is handing events to the logger
	closed   bool          // no more timers
	wake     chan struct{} // closed at the next change; nil if nobody waits
	warm     bool          // there was a verdict of every backend once
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
	return b.standing.Load().state == Active && b.settings.Load().weight != NoWeight
}

// part is what b takes part in the set as.
func (b *Backend) part() part {
	if b.settings.Load().weight == NoWeight {
		return partNone
	}
	return b.standing.Load().part()
}

// replace makes targets the set. A backend whose name and endpoint stay is kept
// with all its state.
func (s *backendSet) replace(targets []parsed) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	old := make(map[string]*Backend, len(s.backends))
	for _, b := range s.backends {
		old[b.name] = b
	}
	next := make([]*Backend, len(targets))
	var joined []*Backend
	for i, t := range targets {
		if b := old[t.name]; b != nil && b.endpoint == t.endpoint {
			delete(old, t.name)
			s.configureLocked(b, t.settings)
			next[i] = b
			continue
		}
		next[i] = s.newBackend(t)
		joined = append(joined, next[i])
		s.noteLocked(slog.LevelInfo, "backend added", slog.String("backend", t.name), slog.String("url", t.endpoint.url()))
	}
	gone := make([]*Backend, 0, len(old))
	for _, b := range s.backends {
		if old[b.name] == b {
			gone = append(gone, b)
			s.noteLocked(slog.LevelInfo, "backend removed", slog.String("backend", b.name), slog.String("url", b.URL()))
			b.passive.stop()
			b.watch.end()
			b.removed.Store(true)
		}
	}
	s.backends = next
	s.changes++
	s.mu.Unlock()
	s.publish()
	if s.prober != nil {
		s.prober.watchAll(joined)
	}
	for _, b := range gone {
		b.retire()
	}
}

func (s *backendSet) newBackend(t parsed) *Backend {
	b := newBackend(t, newConns(s.conns, t.endpoint, s.cfg, &s.panics), time.Now())
	if s.prober != nil {
		b.watch = s.prober.newWatch(b)
	}
	return b
}

// configureLocked changes b's settings in place. What is known of a probe that is
// sent elsewhere now means nothing: the next one decides.
func (s *backendSet) configureLocked(b *Backend, to settings) {
	was := b.settings.Load().health
	b.configure(to)
	if b.watch != nil && !was.equal(to.health) {
		b.checks.fresh = true
		b.watch.start(0)
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
	if was := b.standing.Load().state; was != state {
		st := *b.standing.Load()
		st.state, st.stateReason, st.stateSince = state, "set by the operator", time.Now()
		s.setStandingLocked(b, st, st.stateReason)
		s.watchStateLocked(b, was, state)
	}
	s.mu.Unlock()
	s.publishIfChanged()
	return nil
}

// watchStateLocked stops the probes of a backend that is disabled, and begins them
// anew once it is not: what they said before may long be wrong.
func (s *backendSet) watchStateLocked(b *Backend, was, is State) {
	switch {
	case b.watch == nil:
	case is == Disabled:
		b.watch.pause()
	case was == Disabled:
		b.checks.fresh = true
		b.watch.start(0)
	}
}

// setStandingLocked changes how b stands and notes the change for the log.
func (s *backendSet) setStandingLocked(b *Backend, now standing, reason string) {
	was, is := b.Status(), now.status()
	if b.standing.Load().part() != now.part() {
		s.changes++
	}
	b.standing.Store(&now)
	if was.String() == is.String() {
		return // a change of health behind draining or disabled: of no effect yet
	}
	level := slog.LevelInfo
	attrs := []slog.Attr{
		slog.String("backend", b.name), slog.String("from", was.String()),
		slog.String("to", is.String()), slog.String("reason", reason),
	}
	if is.Health != was.Health && (is.Health == HealthEjected || is.Health == HealthUnhealthy) {
		level = slog.LevelWarn
	}
	if is.Health == HealthEjected && was.Health != HealthEjected {
		if !is.Until.IsZero() {
			attrs = append(attrs, slog.Time("until", is.Until))
		}
		if err := b.lastErr.Load(); err != nil {
			attrs = append(attrs, slog.String("error", *err))
		}
	}
	s.noteLocked(level, "backend state changed", attrs...)
}

// publishIfChanged publishes unless the current snapshot shows all changes.
func (s *backendSet) publishIfChanged() {
	s.mu.Lock()
	stale, untold := s.changes != s.shown, len(s.events) > 0
	s.mu.Unlock()
	switch {
	case stale:
		s.publish()
	case untold:
		s.tell()
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
		next.degraded.balancer = s.prepare(next.degraded.backends)
		next.ejected.balancer = s.prepare(next.ejected.backends)

		s.mu.Lock()
		if s.changes == changes {
			if last := s.current.Load(); s.shown != changes || last == nil {
				s.noteOutageLocked(last, next)
				next.stamp()
				s.current.Store(next)
				s.shown = changes
				s.wakeLocked()
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
	var open []*Backend
	spare := false // there are better than degraded ones
	for _, b := range s.backends {
		if p := b.part(); p != partNone {
			open = append(open, b)
			spare = spare || p == partUsable
		}
	}
	for _, b := range open {
		switch p := b.part(); {
		case p == partUsable, p == partDegraded && !spare:
			n.usable = append(n.usable, b)
			n.members = append(n.members, b)
		case p == partDegraded:
			n.degraded.backends = append(n.degraded.backends, b)
		case p == partTrial:
			n.trials = append(n.trials, trial{b, b.passive.trialFrom})
			n.members = append(n.members, b)
		case !s.cfg.failClosed:
			n.ejected.backends = append(n.ejected.backends, b)
		}
	}
	if len(n.usable) == 0 && !s.cfg.failClosed {
		return &snapshot{all: s.backends, members: open, usable: open, failOpen: true}
	}
	return n
}

// noteOutageLocked notes that the pool has lost its last usable backend, and what it
// does about that, or that it has one again.
func (s *backendSet) noteOutageLocked(last, next *snapshot) {
	was, is := "", next.outage()
	if last != nil {
		was = last.outage()
	}
	switch {
	case is == was:
	case is != "":
		s.noteLocked(slog.LevelError, "no backend is usable: "+is, slog.Int("backends", len(next.all)))
	default:
		s.noteLocked(slog.LevelInfo, "backends are usable again", slog.Int("usable", len(next.usable)))
	}
}

// outage says what is done with requests although no backend is usable, "" if one is.
func (n *snapshot) outage() string {
	switch {
	case n.failsOpen():
		return "failing open to unusable ones"
	case len(n.usable) == 0:
		return "refusing requests"
	}
	return ""
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

// wakeLocked tells those who wait for a change that there is one.
func (s *backendSet) wakeLocked() {
	if s.wake != nil {
		close(s.wake)
		s.wake = nil
	}
}

// wakeAll makes those who wait for a change look again.
func (s *backendSet) wakeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wakeLocked()
}

// close stops the timers of all ejections and all probes.
func (s *backendSet) close() {
	if s.prober != nil {
		s.prober.stop()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.wakeLocked()
	for _, b := range s.backends {
		b.passive.stop()
		b.watch.end()
	}
}

// abandoned is how often a Checker was found not to have returned.
func (s *backendSet) abandoned() int64 {
	if s.prober == nil {
		return 0
	}
	return s.prober.abandoned.Load()
}
