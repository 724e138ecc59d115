package lb

import (
	"log/slog"
	"slices"
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
	// draining and ejected are a request's last resorts once it has tried the others:
	// it is better to ask a backend that wants none, or that was bad, than to answer
	// nothing. Those that failed their probes are among the ejected. Both are empty if
	// the pool fails closed.
	draining, ejected group
	failOpen          bool // none is usable, members are all the same
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

// part is what b takes part in the set as.
func (b *Backend) part() part {
	if b.settings.Load().weight == NoWeight {
		return partNone
	}
	return b.standing.Load().part()
}

// publish makes all changes until now what requests see. The strategy is prepared
// without the lock, because it may be the user's.
func (s *backendSet) publish() {
	s.mu.Lock()
	for changes := s.changes; s.shown < changes; {
		s.makeSnapshotLocked()
	}
	s.publishRestLocked()
	s.mu.Unlock()
	s.tell()
}

// publishSoon is publish for changes that can wait a little: hundreds of backends
// may go down at once, and with many of them each snapshot takes some strategies
// milliseconds to prepare. Half of the time is left for other things.
func (s *backendSet) publishSoon() {
	s.mu.Lock()
	if s.shown != s.changes && s.making == 0 && !time.Now().Before(s.rest) {
		s.makeSnapshotLocked()
	}
	s.publishRestLocked()
	s.mu.Unlock()
	s.tell()
}

// publishRestLocked sees to it that changes which are not published yet will be.
func (s *backendSet) publishRestLocked() {
	if s.shown == s.changes || s.making > 0 || s.later != nil || s.closed {
		return // whoever makes a snapshot comes here afterwards
	}
	s.later = time.AfterFunc(time.Until(s.rest), func() {
		if !s.work.enter() {
			return
		}
		defer s.work.leave()
		s.mu.Lock()
		s.later = nil
		s.mu.Unlock()
		s.publishSoon()
	})
}

// makeSnapshotLocked makes a snapshot of the present state, without the lock while
// the strategy is prepared, and publishes it unless a newer one was meanwhile.
func (s *backendSet) makeSnapshotLocked() {
	changes := s.changes
	next := s.snapshotLocked()
	s.making++
	s.mu.Unlock()
	began := time.Now()
	next.balancer = s.prepare(next.members)
	next.degraded.balancer = s.prepare(next.degraded.backends)
	next.draining.balancer = s.prepare(next.draining.backends)
	next.ejected.balancer = s.prepare(next.ejected.backends)
	took := time.Since(began)
	s.mu.Lock()
	s.making--
	s.rest = time.Now().Add(took)
	if changes <= s.shown {
		return
	}
	s.noteOutageLocked(s.current.Load(), next)
	next.stamp()
	s.current.Store(next)
	s.shown = changes
	s.wakeLocked()
}

// snapshotLocked is the candidate filter for all requests: what they see is
// already filtered.
func (s *backendSet) snapshotLocked() *snapshot {
	n := &snapshot{all: s.backends}
	spare := slices.ContainsFunc(s.backends, func(b *Backend) bool { return b.part() == partUsable })
	for _, b := range s.backends {
		switch p := b.part(); {
		case p == partUsable, p == partDegraded && !spare:
			n.usable = append(n.usable, b)
			n.members = append(n.members, b)
		case p == partDegraded:
			n.degraded.backends = append(n.degraded.backends, b)
		case p == partTrial:
			n.trials = append(n.trials, trial{b, b.passive.trialFrom})
			n.members = append(n.members, b)
		case p == partDraining && !s.cfg.failClosed:
			n.draining.backends = append(n.draining.backends, b)
		case p == partOut && !s.cfg.failClosed:
			n.ejected.backends = append(n.ejected.backends, b)
		}
	}
	if len(n.usable) == 0 && !s.cfg.failClosed {
		return s.failingOpenLocked(n)
	}
	return n
}

// failingOpenLocked makes of n, which has no usable backends, a snapshot that uses
// what there is: those that work but want no requests or, if there are none, all.
func (s *backendSet) failingOpenLocked(n *snapshot) *snapshot {
	open := &snapshot{all: n.all, failOpen: true}
	for _, b := range s.backends {
		switch p := b.part(); {
		case p == partDraining, p != partNone && len(n.draining.backends) == 0:
			open.usable = append(open.usable, b)
		case p != partNone:
			open.ejected.backends = append(open.ejected.backends, b)
		}
	}
	open.members = open.usable
	return open
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
