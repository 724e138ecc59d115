package lb

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"time"
)

// State is what the operator wants of a backend; see Pool.SetState. The zero
// value is Active.
type State uint8

// The states. What a backend that is Active is fit for is told by its Health.
const (
	// Active takes part.
	Active State = iota
	// Draining gets no new requests; those under way go on to their end.
	Draining
	// Disabled gets no requests at all, as if it were not there.
	Disabled
)

var stateNames = [...]string{"active", "draining", "disabled"}

// String returns the state as one lower-case word.
func (s State) String() string { return nameIn(stateNames[:], int(s)) }

// MarshalText makes it the word of String in JSON and in logs.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Status is the state of a backend at one moment, with its reason.
type Status struct {
	// State is what the operator wants.
	State State
	// Health is what the pool holds of the backend.
	Health Health
	// Reason says in a few words why it became so, of the State unless that is Active,
	// else of the Health; empty at the start. What the last probe has found since is in
	// ProbeStats.Error.
	Reason string
	// Since is when it became so.
	Since time.Time
	// Until is when an ejected backend gets its trial or, if only a probe may bring it
	// back, from when on probes may do so; zero if at once, and if it is not ejected.
	Until time.Time
}

// String returns the state as one word, or the health if the state is Active.
func (s Status) String() string {
	if s.State != Active {
		return s.State.String()
	}
	return s.Health.String()
}

// Usable tells whether the backend takes requests like any other: it is active and
// its health unknown, healthy or degraded. One on trial is not, nor is one that gets
// requests only because the pool fails open.
func (s Status) Usable() bool { return s.State == Active && s.Health.usable() }

// standing is what a backend's Status is made of: the reasons of state and health
// are kept apart, so that one that changes behind the other does not hide it. The
// value is immutable: a change swaps the pointer to it.
type standing struct {
	state       State
	stateReason string
	stateSince  time.Time

	health       Health
	reason       string
	since, until time.Time
	firm         bool // no probe ends the ejection before until
}

func (s *standing) status() Status {
	st := Status{State: s.state, Health: s.health, Reason: s.reason, Since: s.since, Until: s.until}
	if s.state != Active {
		st.Reason, st.Since = s.stateReason, s.stateSince
	}
	return st
}

// part is what a snapshot shows of a standing.
func (s *standing) part() part {
	switch {
	case s.state != Active:
		return partNone
	case s.health == HealthDraining:
		return partDraining
	case s.health == HealthDegraded:
		return partDegraded
	case s.health == HealthTrial:
		return partTrial
	case s.health.usable():
		return partUsable
	case s.health == HealthEjected:
		return partEjected
	}
	return partUnhealthy
}

// part is what a backend that has a weight takes part as.
type part uint8

const (
	partNone      part = iota // the operator took it out: in nothing at all
	partUsable                // like any other
	partDegraded              // usable, to be spared
	partTrial                 // for one request at a time
	partEjected               // the last resort
	partDraining              // asks for no requests: only if nobody else is usable
	partUnhealthy             // only if nobody else is there
)

// Backend is a target at run time: its identity, state and counters. A pool
// makes one per target and keeps it for as long as the target keeps its name,
// URL and Host. All methods may be called concurrently.
type Backend struct {
	name      string
	endpoint  endpoint
	transport http.RoundTripper // Target.Transport
	conns     *conns            // nil if detached

	settings atomic.Pointer[settings]
	standing atomic.Pointer[standing]
	lastErr  atomic.Pointer[string]

	// The counters live here and not in the snapshot: a snapshot is replaced
	// whenever a state changes, and requests that began under the old one must
	// still be counted when they end.
	inFlight       atomic.Int64
	weight         atomic.Int64 // for the scans of strategies; see configure
	requests       atomic.Int64
	failures       atomic.Int64
	retries        atomic.Int64
	sent, received atomic.Int64

	// published is the newest snapshot that has this backend among its usable
	// ones. It makes the check of a pick cheap; see isCandidate.
	published atomic.Pointer[snapshot]
	// idle is closed when nothing is in flight, or the state has changed; nil if nobody
	// waits for that.
	idle atomic.Pointer[chan struct{}]
	// farewell is the time over which its WebSockets leave, in nanoseconds; zero: they
	// need not.
	farewell atomic.Int64
	// removed tells that the backend left the pool: its connections are closed
	// as they become idle.
	removed atomic.Bool

	passive passive
	checks  checks
	watch   *watch // nil without active checks
}

// NewBackend returns a backend that belongs to no pool, to test strategies with.
// t is not checked and needs no URL; what is out of range is brought into it.
func NewBackend(t Target) *Backend {
	e, _ := parseEndpoint(t.URL)
	name := t.Name
	if name == "" {
		name = e.url()
	}
	t.Weight = min(max(t.Weight, NoWeight), MaxWeight)
	return newBackend(parsed{name: name, endpoint: e, settings: settingsOf(t)}, nil, time.Now())
}

func newBackend(p parsed, c *conns, now time.Time) *Backend {
	b := &Backend{name: p.name, endpoint: p.endpoint, transport: p.transport, conns: c}
	b.configure(p.settings)
	b.standing.Store(&standing{since: now})
	return b
}

// configure publishes s. The weight that strategies see stays as it was if it
// becomes NoWeight: a request may have picked its candidates a moment before, and
// they are promised to have a share.
func (b *Backend) configure(s settings) {
	b.settings.Store(&s)
	if b.conns != nil && b.conns.handler != nil && s.handler != nil {
		b.conns.handler.handler.Store(&s.handler)
	}
	if s.weight != NoWeight || b.weight.Load() == 0 {
		b.weight.Store(int64(s.weight))
	}
}

// Name returns the name that identifies the backend in its pool.
func (b *Backend) Name() string { return b.name }

// URL returns the target's URL in its canonical form, without a trailing slash.
func (b *Backend) URL() string { return b.endpoint.url() }

// Weight returns the backend's share among the candidates, at least 1. It is
// NoWeight for a backend that never had another weight; one that lost its weight
// goes on to show the last it had, but is no candidate any more.
func (b *Backend) Weight() int { return int(b.weight.Load()) }

// Metadata returns the value that the target's Metadata has for key, and
// whether it has one.
func (b *Backend) Metadata(key string) (value string, ok bool) {
	value, ok = b.settings.Load().metadata[key]
	return value, ok
}

// InFlight returns how many attempts are on the backend now, answers whose body
// has not ended included.
func (b *Backend) InFlight() int { return int(b.inFlight.Load()) }

// Status returns the backend's present state.
func (b *Backend) Status() Status { return b.standing.Load().status() }

// disabled tells that the operator took the backend out altogether.
func (b *Backend) disabled() bool { return b.standing.Load().state == Disabled }

// String returns the name.
func (b *Backend) String() string { return b.name }

// Acquire counts one attempt as in flight, as the pool does for each, until
// release is called with how it ended. Calls of release after the first do
// nothing. It is meant for tests of strategies on backends of NewBackend.
func (b *Backend) Acquire() (release func(Outcome)) {
	b.inFlight.Add(1)
	b.begin(1)
	var done atomic.Bool
	return func(o Outcome) {
		if done.CompareAndSwap(false, true) {
			b.count(&o)
			b.end()
		}
	}
}

// begin counts the start of an attempt, in flight already, that is its request's n-th.
func (b *Backend) begin(n int) {
	b.requests.Add(1)
	if n > 1 {
		b.retries.Add(1)
	}
}

// end counts an attempt as no longer in flight.
func (b *Backend) end() {
	if b.inFlight.Add(-1) != 0 {
		return
	}
	b.wakeIdle()
	if b.removed.Load() {
		// A request that had picked this backend just before it left the pool
		// may have made the transport keep idle connections again.
		b.conns.closeIdle()
	}
}

// wakeIdle wakes who is in waitIdle.
func (b *Backend) wakeIdle() {
	if b.idle.Load() != nil {
		if idle := b.idle.Swap(nil); idle != nil {
			close(*idle)
		}
	}
}

var errNotDraining = errors.New("it is not draining any more")

// waitIdle returns when nothing is in flight, with an error when ctx or pool ends or the
// operator has changed his mind.
func (b *Backend) waitIdle(ctx, pool context.Context) error {
	for b.inFlight.Load() > 0 {
		if b.standing.Load().state != Draining {
			return errNotDraining
		}
		idle := make(chan struct{})
		if !b.idle.CompareAndSwap(nil, &idle) {
			if other := b.idle.Load(); other != nil {
				idle = *other
			} else {
				continue
			}
		}
		// It may have come to rest, or changed, before it could see the channel.
		if b.inFlight.Load() == 0 || b.standing.Load().state != Draining {
			continue
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return ctx.Err()
		case <-pool.Done():
			return pool.Err()
		}
	}
	return nil
}

// count adds the outcome to the backend's counters.
func (b *Backend) count(o *Outcome) {
	if o.failed() {
		b.failures.Add(1)
		text := o.Cause.String()
		if o.Err != nil {
			text = o.Err.Error()
		}
		b.lastErr.Store(&text)
	}
	if o.Final || o.Err != nil {
		b.sent.Add(o.SentBytes)
		b.received.Add(o.ReceivedBytes)
	}
}

// retire lets go of the connections of a backend that left its pool.
func (b *Backend) retire() { b.conns.retire() }
