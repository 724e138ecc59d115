package lb

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"
)

// picked is a backend with what was reserved on it in the same step.
type picked struct {
	backend *Backend
	epoch   uint32 // of its health
	trial   bool   // its one request on trial is reserved
}

// pick chooses the backend for the request's next attempt, which is in flight on it
// from then on: a backend that the operator takes out between the choice and that is
// asked for nothing, so that nobody is told that it has come to rest before it has.
func (c *call) pick() (picked, error) {
	for {
		p, err := c.pickNow()
		if err != nil {
			return p, err
		}
		p.backend.inFlight.Add(1)
		if p.backend.standing.Load().state == Active {
			return p, nil
		}
		p.backend.end()
		if p.trial {
			p.backend.passive.onTrial.Store(false)
		}
		runtime.Gosched() // until the snapshot without it is published
	}
}

// pickNow chooses the backend.
//
// The fast path hands out the snapshot's own list. It is right because that list
// was filtered when it was published, and the only candidates that depend on the
// request are those on trial and those it has tried; when there are any, the slow
// path filters again.
func (c *call) pickNow() (picked, error) {
	snap := c.pool.set.current.Load()
	if len(snap.members) == 0 {
		return picked{}, snap.whyNone()
	}
	if len(snap.trials) == 0 && len(c.tried) == 0 {
		b := c.pool.choose(c.in, snap, snap.balancer, snap.usable)
		if b == nil {
			return picked{}, c.pool.unwanted(snap.usable)
		}
		return picked{backend: b, epoch: b.passive.epoch.Load()}, nil
	}
	return c.pickFiltered(snap)
}

// whyNone is ErrNoBackend with the reason why nobody may be picked.
func (n *snapshot) whyNone() error { return fmt.Errorf("%w: %s", ErrNoBackend, tally(n.all)) }

// tally says how many backends are in which state, without names.
func tally(backends []*Backend) string {
	counts := map[string]int{}
	for _, b := range backends {
		word := b.Status().String()
		if b.Status().State == Active && b.settings.Load().weight == NoWeight {
			word = "without weight"
		}
		counts[word]++
	}
	var words []string
	for _, word := range slices.Sorted(maps.Keys(counts)) {
		words = append(words, fmt.Sprintf("%d %s", counts[word], word))
	}
	return fmt.Sprintf("of %d targets %s", len(backends), strings.Join(words, ", "))
}

// unwanted is ErrNoBackend because the strategy chose none of candidates.
func (p *Pool) unwanted(candidates []*Backend) error {
	return fmt.Errorf("%w: the strategy %s wanted none of %d candidates", ErrNoBackend, strategyName(p.cfg.balancer), len(candidates))
}

// pickFiltered picks among the candidates that are this request's own.
func (c *call) pickFiltered(snap *snapshot) (picked, error) {
	scratch := c.pool.scratch.Get().(*[]*Backend)
	defer c.pool.putScratch(scratch)
	for {
		candidates, strategy := c.candidates(snap, (*scratch)[:0])
		*scratch = candidates[:0]
		if len(candidates) == 0 {
			return picked{}, snap.whyNone()
		}
		b := c.pool.choose(c.in, snap, strategy, candidates)
		if b == nil {
			return picked{}, c.pool.unwanted(candidates)
		}
		p := picked{backend: b, epoch: b.passive.epoch.Load(), trial: snap.trialOf(b) != nil}
		if !p.trial || b.passive.onTrial.CompareAndSwap(false, true) {
			return p, nil
		}
		// Another request took b's trial between the look and the leap: now b is
		// no candidate, so each round has one less.
	}
}

// candidates appends to list who may be picked, the best kind that there is:
// first those that are usable or on trial, then the degraded, then any on trial, then
// the last resort, all of them untried; at last the tried. It also returns the strategy
// that was prepared for those.
func (c *call) candidates(snap *snapshot, list []*Backend) ([]*Backend, Balancer) {
	now := time.Now()
	take := func(from []*Backend, fits func(*Backend) bool) bool {
		for _, b := range from {
			if fits(b) {
				list = append(list, b)
			}
		}
		return len(list) > 0
	}
	untried := func(b *Backend) bool { return !c.hasTried(b) }
	suits := func(b *Backend) bool {
		t := snap.trialOf(b)
		return untried(b) && (t == nil || t.free() && c.suitsTrial(t, now))
	}
	onTrial := func(b *Backend) bool {
		t := snap.trialOf(b)
		return untried(b) && t != nil && t.free()
	}
	switch {
	case take(snap.members, suits):
		return list, snap.balancer
	case take(snap.degraded.backends, untried):
		return list, snap.degraded.strategy()
	case take(snap.members, onTrial):
		return list, snap.balancer
	case take(snap.resort.backends, untried):
		return list, snap.resort.strategy()
	}
	take(snap.usable, c.hasTried)
	return list, snap.balancer
}

// anyUntried tells whether a backend is left that the request has not tried.
func (c *call) anyUntried() bool {
	snap := c.pool.set.current.Load()
	untried := func(b *Backend) bool { return !c.hasTried(b) }
	for _, list := range [...][]*Backend{snap.usable, snap.degraded.backends, snap.resort.backends} {
		if slices.ContainsFunc(list, untried) {
			return true
		}
	}
	return slices.ContainsFunc(snap.trials, func(t trial) bool { return t.free() && untried(t.backend) })
}

func (c *call) hasTried(b *Backend) bool { return slices.Contains(c.tried, b) }

// suitsTrial tells whether the request is one to try a backend with: one that can
// be given to another should it fail or, if no such request comes, any.
func (c *call) suitsTrial(t *trial, now time.Time) bool {
	return c.repeatable || now.Sub(t.since) >= trialPatience
}

// free tells whether the one request that the backend may have is still to come.
func (t *trial) free() bool { return !t.backend.passive.onTrial.Load() }

// trialOf returns b's trial, nil if it is not on trial.
func (n *snapshot) trialOf(b *Backend) *trial {
	for i := range n.trials {
		if n.trials[i].backend == b {
			return &n.trials[i]
		}
	}
	return nil
}

// choose asks the strategy, whose answer must be one of candidates. For one that
// is not, or a panic, a random candidate steps in: the request is not at fault.
func (p *Pool) choose(r *http.Request, snap *snapshot, strategy Balancer, candidates []*Backend) (b *Backend) {
	defer func() {
		if v := recover(); v != nil {
			p.set.panics.caught("Pick of the strategy", v)
			b = p.stepIn(candidates)
		}
	}()
	b = strategy.Pick(r, candidates)
	if b == nil || isCandidate(b, snap, candidates) {
		return b
	}
	p.set.panics.misbehaved("the strategy picked a backend that is no candidate", slog.String("backend", b.name))
	return p.stepIn(candidates)
}

func (p *Pool) stepIn(candidates []*Backend) *Backend {
	p.totals.badPicks.Add(1)
	return candidates[rand.IntN(len(candidates))]
}

// isCandidate tells whether b is one of candidates, by a mark where that proves
// it: candidates is then the list that b was marked as a part of.
func isCandidate(b *Backend, snap *snapshot, candidates []*Backend) bool {
	if b.published.Load() == snap && &candidates[0] == &snap.usable[0] {
		return true
	}
	return slices.Contains(candidates, b)
}

// putScratch takes a list of candidates back for the next request.
func (p *Pool) putScratch(s *[]*Backend) {
	clear((*s)[:cap(*s)]) // do not keep backends that have left alive
	p.scratch.Put(s)
}
