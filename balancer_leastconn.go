package lb

import (
	"math/rand/v2"
	"net/http"
	"sync/atomic"

	"example.com/lb/internal/turn"
)

// LeastConnections returns a strategy that picks the backend with the fewest
// attempts in flight for its weight. Ties, which are the rule while there is
// little to do, are shared in proportion to weight, evenly spread.
//
// A pick looks at every candidate and does not allocate.
func LeastConnections() Balancer {
	lc := &leastConnections{}
	lc.pos.Store(rand.Uint64())
	return lc
}

type leastConnections struct {
	pos atomic.Uint64 // counts the ties
}

func (lc *leastConnections) String() string { return "least-connections" }

func (lc *leastConnections) Pick(_ *http.Request, candidates []*Backend) *Backend {
	best := candidates[0]
	load, weight := best.inFlight.Load(), max(1, best.weight.Load())
	ties, tiedWeight := 1, weight
	for _, b := range candidates[1:] {
		l, w := b.inFlight.Load(), max(1, b.weight.Load())
		// l/w against load/weight, without division
		switch mine, least := l*weight, load*w; {
		case mine < least:
			best, load, weight = b, l, w
			ties, tiedWeight = 1, w
		case mine == least:
			ties++
			tiedWeight += w
		}
	}
	if ties == 1 {
		return best
	}
	at := turn.Spread(lc.pos.Add(1), tiedWeight)
	for _, b := range candidates {
		w := max(1, b.weight.Load())
		if b.inFlight.Load()*weight != load*w {
			continue
		}
		if at -= w; at < 0 {
			return b
		}
	}
	return best // the loads have changed between the two looks
}
