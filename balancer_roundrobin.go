package lb

import (
	"math/rand/v2"
	"net/http"
	"slices"
	"sync/atomic"

	"example.com/lb/internal/turn"
)

// RoundRobin returns a strategy that gives backends their turns in proportion to
// their weights, spread out instead of in bursts: weights 5, 1, 1 give a a b a c
// a a. This is nginx's smooth weighted round robin, worked out once per set.
//
// It begins at a random place, so that many pools do not begin with the same
// backend, and an update does not set it back. A pick takes constant time and
// does not allocate. When a request may not be given to every backend (it failed
// on one already, one is on trial), one of the others is chosen at random by
// weight, so that nobody gets all of what a neighbour leaves.
func RoundRobin() Balancer {
	rr := &roundRobin{}
	rr.pos.Store(rand.Uint64())
	return rr
}

type roundRobin struct {
	pos  atomic.Uint64 // survives updates
	last atomic.Pointer[preparedRoundRobin]
}

func (rr *roundRobin) String() string { return "round-robin" }

// Pick serves unprepared use: the candidates are then all there is. The order for
// the candidates that were seen last is kept.
func (rr *roundRobin) Pick(_ *http.Request, candidates []*Backend) *Backend {
	p := rr.last.Load()
	if p == nil || !p.fits(candidates) {
		p = rr.prepare(slices.Clone(candidates))
		rr.last.Store(p)
	}
	return candidates[p.order.At(rr.pos.Add(1))]
}

func (rr *roundRobin) Prepare(set []*Backend) Balancer { return rr.prepare(set) }

func (rr *roundRobin) prepare(set []*Backend) *preparedRoundRobin {
	weights := weightsOf(set)
	return &preparedRoundRobin{rr: rr, set: set, weights: weights, order: turn.New(weights)}
}

type preparedRoundRobin struct {
	rr      *roundRobin
	set     []*Backend
	weights []int
	order   *turn.Order
}

// fits tells whether candidates are the set, with the same weights.
func (p *preparedRoundRobin) fits(candidates []*Backend) bool {
	if !slices.Equal(p.set, candidates) {
		return false
	}
	for i, b := range candidates {
		if max(1, b.Weight()) != p.weights[i] {
			return false
		}
	}
	return true
}

func (p *preparedRoundRobin) Pick(_ *http.Request, candidates []*Backend) *Backend {
	if len(candidates) == len(p.set) { // a subset of the same size is the set
		return candidates[p.order.At(p.rr.pos.Add(1))]
	}
	return randomByWeight(candidates)
}

// randomByWeight chooses one of candidates with the probability of its weight.
func randomByWeight(candidates []*Backend) *Backend {
	total := 0
	for _, b := range candidates {
		total += max(1, b.Weight())
	}
	at := rand.IntN(total)
	for _, b := range candidates {
		if at -= max(1, b.Weight()); at < 0 {
			return b
		}
	}
	return candidates[len(candidates)-1] // a weight changed meanwhile
}
