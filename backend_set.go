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

// backendSet is the one writer of a pool's set. Every change happens under its
// lock and is then published as a new snapshot.
type backendSet struct {
	current atomic.Pointer[snapshot]
	cfg     *config
	conns   *connSet
	prober  *prober // nil without active checks
	work    gate    // the set's timers, its probes and the pool's readers, which Close waits for
	panics  panics

	abandonedHandlers atomic.Int64

	mu          sync.Mutex // guards the following
	backends    []*Backend
	changes     uint64        // counts what a snapshot must show
	shown       uint64        // the changes that the current snapshot shows
	making      int           // snapshots that are being made
	makingSince time.Time     // the last of them
	took        time.Duration // that the last one took
	rest        time.Time     // when changes that can wait may be published next
	later       *time.Timer   // publishes them
	events      []event
	dropped     int           // events that the logger was too slow for
	telling     bool          // somebody is handing events to the logger
	closed      bool          // no more timers
	wake        chan struct{} // closed at the next change; nil if nobody waits
	warm        bool          // there was a verdict of every backend once
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
		if b := old[t.name]; b != nil && b.endpoint == t.endpoint && sameTransport(b.transport, t.transport) {
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
	s.warmLocked()
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
	var c *conns
	switch {
	case t.settings.handler != nil:
		c = s.handlerConns()
	case t.transport != nil:
		c = newConns(s.conns, t.endpoint, t.transport, s.cfg, &s.work, &s.panics)
	default:
		c = newConns(s.conns, t.endpoint, s.cfg.transport, s.cfg, &s.work, &s.panics)
	}
	b := newBackend(t, c, time.Now())
	if s.prober != nil {
		b.watch = s.prober.newWatch(b)
	}
	return b
}

// handlerConns returns the way to a target that is a Handler.
func (s *backendSet) handlerConns() *conns {
	t := &handlerTransport{work: &s.work, panics: &s.panics, abandoned: &s.abandonedHandlers}
	return &conns{plain: t, upgrade: t, probe: t, handler: t, all: s.conns, panics: &s.panics}
}

// configureLocked changes b's settings in place. What is known of a probe that is
// sent elsewhere now means nothing: the next one decides.
func (s *backendSet) configureLocked(b *Backend, to settings) {
	was := b.settings.Load().health
	b.configure(to)
	if b.watch != nil && !was.equal(to.health) {
		b.checks.fresh = true
		b.watch.restart()
	}
}

// setState carries out the operator's wish for the backend of that name; farewell is the
// time over which its WebSockets are to leave, if not zero.
func (s *backendSet) setState(name string, state State, farewell time.Duration) (*Backend, error) {
	s.mu.Lock()
	i := slices.IndexFunc(s.backends, func(b *Backend) bool { return b.name == name })
	if i < 0 {
		s.mu.Unlock()
		return nil, fmt.Errorf("lb: no backend is called %q", name)
	}
	b := s.backends[i]
	if state != Draining || farewell > 0 {
		b.farewell.Store(int64(farewell))
	}
	if was := b.standing.Load().state; was != state {
		st := *b.standing.Load()
		st.state, st.stateReason, st.stateSince = state, "set by the operator", time.Now()
		s.setStandingLocked(b, st, st.stateReason)
		s.warmLocked()
		s.wakeLocked()
		s.watchStateLocked(b, was, state)
	}
	s.mu.Unlock()
	s.publish()
	b.wakeIdle() // who waits for it may have to wait no more
	return b, nil
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
		b.watch.restart()
	}
}

// setStandingLocked changes how b stands and notes the change for the log.
func (s *backendSet) setStandingLocked(b *Backend, now standing, reason string) {
	was, is := b.Status(), now.status()
	before := b.standing.Load().part()
	if before != now.part() {
		s.changes++
	}
	b.standing.Store(&now)
	if down := now.part(); down != before && (down == partEjected || down == partUnhealthy) {
		s.dropIdleLocked(b)
	}
	if was.String() == is.String() && was.State == is.State {
		return // a change of health behind draining or disabled: of no effect yet
	}
	level := slog.LevelInfo
	attrs := []slog.Attr{
		slog.String("backend", b.name), slog.String("from", was.String()),
		slog.String("to", is.String()), slog.String("reason", reason),
	}
	if is.Health == HealthUnhealthy && was.Usable() {
		level = slog.LevelWarn
	}
	if is.Health == HealthEjected && was.Health != HealthEjected {
		level = slog.LevelWarn
		if !is.Until.IsZero() {
			attrs = append(attrs, slog.Time("until", is.Until))
		}
		if err := b.lastErr.Load(); err != nil {
			attrs = append(attrs, slog.String("error", *err))
		}
	}
	s.noteLocked(level, "backend state changed", attrs...)
}

// dropIdleLocked closes the idle connections of a backend that went down: when it is back
// they are of a process that may be gone. Closing may take a while over TLS.
func (s *backendSet) dropIdleLocked(b *Backend) {
	if b.conns != nil && s.work.enter() {
		go func() {
			defer s.work.leave()
			b.conns.closeIdle()
		}()
	}
}

// noteLocked queues an event for the log.
func (s *backendSet) noteLocked(level slog.Level, text string, attrs ...slog.Attr) {
	if s.cfg.name != "" {
		attrs = append(attrs, slog.String("pool", s.cfg.name))
	}
	if len(s.events) >= maxEvents {
		s.events = s.events[1:]
		s.dropped++
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
		if s.dropped > 0 {
			lost := event{slog.LevelWarn, "events were lost: the logger is too slow for them", []slog.Attr{slog.Int("count", s.dropped)}}
			events = append([]event{lost}, events...)
		}
		s.events, s.dropped = nil, 0
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
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.wakeLocked()
	if s.later != nil {
		s.later.Stop()
	}
	for _, b := range s.backends {
		b.passive.stop()
		b.watch.end()
	}
}

// abandoned is how often user code was found to go on after its context had ended.
func (s *backendSet) abandoned() int64 {
	n := s.abandonedHandlers.Load()
	if s.prober != nil {
		n += s.prober.abandoned.Load()
	}
	return n
}
