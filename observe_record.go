package lb

import (
	"context"
	"slices"
	"sync"
)

type recordKey struct{}

// RequestRecord tells what became of one request inside of a pool. It is made by
// Record; the zero value is empty. It may be read at any time, also while the
// request is under way.
type RequestRecord struct {
	mu       sync.Mutex // guards the following
	attempts []AttemptRecord
}

// AttemptRecord is one attempt of a RequestRecord.
type AttemptRecord struct {
	// Backend is the name of the backend.
	Backend string
	// Outcome is how the attempt ended, or how it stands: Final is set once the
	// answer's body has ended.
	Outcome Outcome
}

// Record returns a context that makes a pool keep a record of the request that
// carries it. A middleware in front of the pool asks before and reads after, to
// log who served, how often it was tried and what each attempt gave. It reads in a
// deferred function, because ServeHTTP panics if the answer breaks off:
//
//	ctx, rec := lb.Record(r.Context())
//	defer func() { log(rec.Attempts()) }()
//	pool.ServeHTTP(w, r.WithContext(ctx))
func Record(ctx context.Context) (context.Context, *RequestRecord) {
	rec := new(RequestRecord)
	return context.WithValue(ctx, recordKey{}, rec), rec
}

// Attempts returns the attempts in their order; it is a copy.
func (r *RequestRecord) Attempts() []AttemptRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.attempts)
}

// Backend returns the name of the backend that was tried last, empty if none was.
func (r *RequestRecord) Backend() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.attempts) == 0 {
		return ""
	}
	return r.attempts[len(r.attempts)-1].Backend
}

// add notes o, in place of an earlier outcome of the same attempt.
func (r *RequestRecord) add(a *attempt, o *Outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.Final && len(r.attempts) >= a.number {
		r.attempts[a.number-1].Outcome = *o
		return
	}
	r.attempts = append(r.attempts, AttemptRecord{Backend: a.backend.name, Outcome: *o})
}
