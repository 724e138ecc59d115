package lb

import (
	"fmt"
	"net/http"
	"reflect"
)

// Balancer is a strategy: it chooses which of the candidates gets a request.
// The pool owns eligibility, a strategy only chooses: state, health, trial and
// what the request has tried already are dealt with before Pick is called.
//
// RoundRobin, LeastConnections and IPHash are Balancers; a function becomes one
// as a BalancerFunc. The conformance suite for one's own is
// lbtest.RunBalancer. Preparer and Learner are optional additions.
type Balancer interface {
	// Pick chooses one of candidates for r, or returns nil when none of them
	// suits, which answers the request with 503.
	//
	// candidates is never empty and holds what the pool allows for r now, in a
	// stable order: usable backends that r has not tried yet. When none is usable
	// (the pool fails open) it holds the unusable ones, but never one that the
	// operator drains or disables; when all were tried, the tried ones. Every candidate has a
	// Weight of at least 1.
	//
	// Pick is called concurrently, once per attempt, and must not block. It must
	// not change candidates or r, nor keep them after it returned: the slice is
	// used again. It must not change what it picks from either; the pool counts
	// what is in flight. A backend that is not a candidate, and a panic, are
	// counted in Stats as bad picks, and the pool picks one in its place.
	Pick(r *http.Request, candidates []*Backend) *Backend
}

// BalancerFunc makes a Balancer of a function, which must keep the contract of
// Balancer.Pick.
type BalancerFunc func(r *http.Request, candidates []*Backend) *Backend

// Pick calls f.
func (f BalancerFunc) Pick(r *http.Request, candidates []*Backend) *Backend {
	return f(r, candidates)
}

// Preparer is a Balancer that computes something ahead for a whole set of
// backends: a table, a ring.
type Preparer interface {
	Balancer

	// Prepare returns the Balancer to use for set. The pool calls it once for each
	// set of candidates that it publishes, and for sets that are a request's last
	// resort when one first needs them, and keeps what it returns with that set, so
	// that a table and its set can never disagree. Candidates are then a subset of
	// set, in its order. A nil result means: use the strategy unprepared.
	//
	// Prepare is called without any lock held and may be called concurrently,
	// also while Balancers that it returned before are still asked to Pick. set
	// is a copy that it may keep. What is to outlive an update, such as the
	// position of a rotation, belongs into the Preparer.
	//
	// A strategy must work unprepared too: a wrapper may not pass Prepare on.
	Prepare(set []*Backend) Balancer
}

// Learner is a Balancer that learns from how attempts end.
type Learner interface {
	Balancer

	// Observe is called with the outcome of an attempt on b; see Outcome for when
	// and how often. The pool calls it on the Balancer that it was configured
	// with, not on what Prepare returned. It is called concurrently, on the
	// request's goroutine, so it must not block. A panic is contained and counted.
	Observe(b *Backend, o Outcome)
}

// strategyName is the name of b in Stats: its String, else its type.
func strategyName(b Balancer) string {
	if s, ok := b.(fmt.Stringer); ok {
		return s.String()
	}
	return fmt.Sprintf("%T", b)
}

// isNil tells whether v is nil or an interface around a nil pointer or function.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	switch rv := reflect.ValueOf(v); rv.Kind() {
	case reflect.Pointer, reflect.Func, reflect.Map, reflect.Chan, reflect.Slice:
		return rv.IsNil()
	}
	return false
}

// weightsOf returns the share of each of set, at least 1, whatever a test may
// have given to NewBackend.
func weightsOf(set []*Backend) []int {
	weights := make([]int, len(set))
	for i, b := range set {
		weights[i] = max(1, b.Weight())
	}
	return weights
}
