package h1

import (
	"slices"
	"time"
)

const (
	// limitSamples is how many idle connections must have been closed by the server at
	// like ages before it is believed to have a limit.
	limitSamples = 3
	// limitSpread is how much the ages may differ to be like ones.
	limitSpread = 1.25
	// shortestLimit is the shortest limit that is believed: what dies younger has died of
	// something else, and to reuse nothing would cost more than it saves.
	shortestLimit = 500 * time.Millisecond
	// limitMemory is how long a limit is believed that nothing has confirmed.
	limitMemory = 10 * time.Minute
	// limitMargin is how much earlier than the server this side gives a connection up, at
	// most; a fifth of the limit if that is less.
	limitMargin = time.Second
)

// idleLimit learns how long a server keeps idle connections, from what it says in
// Keep-Alive and from the ages at which they die. The zero value knows of no limit.
//
// A server that restarts closes all its connections at once, whatever their ages: what
// died counts only if it was older than everything that lives, and if what died together
// had about one age. A restart after a lull of all of them is taken for a limit all the
// same: for a while connections are then given up sooner than they need be, which costs
// less than the requests that a limit costs which is learned too late.
type idleLimit struct {
	said    time.Duration // zero: nothing
	deaths  [limitSamples]time.Duration
	n       int
	learned time.Duration // zero: nothing
	until   time.Time     // learned is forgotten
}

// told takes what the server says.
func (l *idleLimit) told(limit time.Duration) { l.said = limit }

// died takes the ages of connections that were found to be closed by the server, at the
// same time, and that of the oldest which were found not to be.
func (l *idleLimit) died(now time.Time, ages []time.Duration, oldest time.Duration) {
	if len(ages) == 0 {
		return
	}
	least, most := slices.Min(ages), slices.Max(ages)
	if least < oldest || least < shortestLimit || !alike(least, most) {
		return
	}
	for _, age := range ages {
		l.deaths[l.n%limitSamples] = age
		l.n++
	}
	if l.n < limitSamples {
		return
	}
	if least, most = slices.Min(l.deaths[:]), slices.Max(l.deaths[:]); alike(least, most) {
		l.learned, l.until = least, now.Add(limitMemory)
	}
}

func alike(least, most time.Duration) bool {
	return float64(most) <= limitSpread*float64(least)
}

// at is how long a connection may have been idle to be used now; zero: for ever.
func (l *idleLimit) at(now time.Time) time.Duration {
	limit := l.said
	if l.learned != 0 && now.Before(l.until) && (limit == 0 || l.learned < limit) {
		limit = l.learned
	}
	return limit - min(limitMargin, limit/5)
}
