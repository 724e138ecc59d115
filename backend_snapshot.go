package lb

import (
	"log/slog"
	"slices"
	"sync"
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

	degraded *group // for a request that has tried the usable ones; empty if these are they
	// resort is for a request that has tried all the others: while some are usable, the
	// ejected ones, because it is better to ask a backend that was bad than to answer
	// nothing; else whoever is not a member. It is empty if the pool fails closed.
	resort   *group
	failOpen bool // none is usable, members are used all the same
}

// group is backends with the strategy for them, which is prepared when it is first
// needed: mostly it is not.
type group struct {
	backends []*Backend
	set      *backendSet
	once     sync.Once
	balancer Balancer
}

// strategy returns the strategy prepared for the group.
func (g *group) strategy() Balancer {
	g.once.Do(func() { g.balancer = g.set.prepare(g.backends) })
	return g.balancer
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
	defer s.tell()
	s.mu.Lock()
	defer s.mu.Unlock() // deferred: Prepare may end the goroutine
	for changes := s.changes; s.shown < changes; {
		s.makeSnapshotLocked()
	}
	s.publishRestLocked()
}

// quickly is how long a strategy may take to prepare for requests and probes to wait
// for it.
const quickly = time.Millisecond

// publishSoon is publish for changes that can wait a little: hundreds of backends
// may go down at once, and with many of them each snapshot takes some strategies
// milliseconds to prepare. Half of the time is left for other things.
func (s *backendSet) publishSoon() {
	defer s.tell()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shown != s.changes && s.freeLocked() && s.took < quickly {
		s.makeSnapshotLocked()
	}
	s.publishRestLocked()
}

// freeLocked tells that a snapshot may be made now. A strategy that hangs over one must
// not keep all others from being made.
func (s *backendSet) freeLocked() bool {
	return (s.making == 0 || time.Since(s.makingSince) >= closeGrace) && !time.Now().Before(s.rest)
}

// publishRestLocked sees to it that changes which are not published yet will be.
func (s *backendSet) publishRestLocked() {
	if s.shown == s.changes || s.closed {
		return
	}
	wait := time.Until(s.rest)
	if s.making > 0 {
		wait = max(wait, time.Until(s.makingSince.Add(closeGrace))) // whoever makes one comes here before that
	}
	if s.later != nil {
		s.later.Reset(wait)
		return
	}
	s.later = time.AfterFunc(wait, func() {
		if s.work.enter() {
			defer s.work.leave()
			s.publishLater()
		}
	})
}

// publishLater publishes what publishRestLocked has seen to.
func (s *backendSet) publishLater() {
	defer s.tell()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shown != s.changes && s.freeLocked() {
		s.makeSnapshotLocked()
	}
	s.publishRestLocked()
}

// makeSnapshotLocked makes a snapshot of the present state, without the lock while
// the strategy is prepared, and publishes it unless a newer one was meanwhile.
func (s *backendSet) makeSnapshotLocked() {
	changes := s.changes
	next := s.snapshotLocked()
	s.making++
	began := time.Now()
	s.makingSince = began
	func() {
		s.mu.Unlock()
		defer func() { // also if Prepare ends its goroutine
			s.mu.Lock()
			s.making--
			s.took = time.Since(began)
			s.rest = time.Now().Add(s.took)
		}()
		next.balancer = s.prepare(next.members)
	}()
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
	n := &snapshot{all: s.backends, degraded: &group{set: s}, resort: &group{set: s}}
	has := func(p part) bool {
		return slices.ContainsFunc(s.backends, func(b *Backend) bool { return b.part() == p })
	}
	spare := has(partUsable)
	n.failOpen = !spare && !has(partDegraded) && !s.cfg.failClosed
	draining := n.failOpen && has(partDraining)
	for _, b := range s.backends {
		switch p := b.part(); {
		case p == partNone:
		case p == partUsable, p == partDegraded && !spare, n.failOpen && (p == partDraining || !draining):
			n.usable = append(n.usable, b)
			n.members = append(n.members, b)
		case p == partDegraded:
			n.degraded.backends = append(n.degraded.backends, b)
		case p == partTrial:
			n.trials = append(n.trials, trial{b, b.passive.trialFrom})
			n.members = append(n.members, b)
		case n.failOpen, p == partEjected && !s.cfg.failClosed:
			n.resort.backends = append(n.resort.backends, b)
		}
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
