package lb

import (
	"sync/atomic"
	"time"
)

// Stats is what a pool has counted since it was made: a copy that is the caller's
// own. Each number was read once; numbers that belong together may differ by
// requests that ended meanwhile. Its JSON keys are stable.
type Stats struct {
	// Name is the pool's name, if it was given one.
	Name string `json:"name,omitempty"`
	// Strategy names the Balancer: its String, else its type.
	Strategy string `json:"strategy"`
	// Requests counts the requests that came, whatever became of them.
	Requests int64 `json:"requests"`
	// Failures counts those that got no backend's answer, for which ServeHTTP
	// replied 4xx or 5xx itself and RoundTrip returned an error; ClientClosed
	// those whose client left first, before or in the answer.
	Failures     int64 `json:"failures"`
	ClientClosed int64 `json:"client_closed"`
	// Cut counts answers that their backend broke off in mid-body.
	Cut int64 `json:"cut"`
	// Retries counts attempts beyond a request's first.
	Retries int64 `json:"retries"`
	// InFlight is how many attempts are under way now.
	InFlight int64 `json:"in_flight"`
	// Unrecorded counts requests whose body was too long to be kept whole, so that
	// they could not be repeated once it was under way; ReplayBytes is what bodies that are kept take up now.
	Unrecorded  int64 `json:"unrecorded"`
	ReplayBytes int64 `json:"replay_bytes"`
	// BadPicks counts picks of the strategy that were no candidate, and its
	// panics; Panics counts all panics of user code that were contained.
	BadPicks int64 `json:"bad_picks"`
	Panics   int64 `json:"panics"`
	// Abandoned counts calls of Checkers and of Handlers of targets that did not return
	// although their context had ended.
	Abandoned int64 `json:"abandoned"`
	// Usable is how many backends take requests like any other; see Status.Usable.
	Usable int `json:"usable"`
	// FailOpen tells that no backend is usable and unusable ones are used.
	FailOpen bool `json:"fail_open"`
	// Backends has one entry per target, in their order.
	Backends []BackendStats `json:"backends"`
}

// BackendStats is what a pool has counted for one backend.
type BackendStats struct {
	Name string `json:"name"`
	URL  string `json:"url"`
	// State is one word: draining or disabled if the operator said so, else the
	// Health: unknown, healthy, degraded, draining, unhealthy, ejected or trial.
	// Reason says why, Since when it began.
	State  string    `json:"state"`
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since"`
	// Until is when an ejection ends; see Status.Until.
	Until time.Time `json:"until,omitzero"`
	// Usable tells whether it takes requests like any other; see Status.Usable.
	Usable   bool  `json:"usable"`
	Weight   int   `json:"weight"`
	InFlight int64 `json:"in_flight"`
	// Requests counts attempts, Retries those of them that were a request's
	// second or later, Failures those that failed by the backend's fault.
	Requests int64 `json:"requests"`
	Failures int64 `json:"failures"`
	Retries  int64 `json:"retries"`
	// SentBytes and ReceivedBytes count what attempts that have ended moved.
	SentBytes     int64 `json:"sent_bytes"`
	ReceivedBytes int64 `json:"received_bytes"`
	// LastError is the text of the last failure; it may name addresses.
	LastError string `json:"last_error,omitempty"`
	// Connections counts the pool's own connections to the backend, those of probes
	// aside; nil with a Handler or a transport of the user's.
	Connections *ConnectionStats `json:"connections,omitempty"`
	// Probe is what active checks have found; nil without any yet.
	Probe *ProbeStats `json:"probe,omitempty"`
}

// ConnectionStats counts connections to one backend: Open and Idle as they are now, the
// others since the backend joined.
type ConnectionStats struct {
	Open   int64 `json:"open"`
	Idle   int64 `json:"idle"`
	Opened int64 `json:"opened"`
	// ClosedIdle counts those that were idle for too long, too many or too old.
	ClosedIdle int64 `json:"closed_idle"`
	// ClosedByBackend counts those that the backend left while they were idle.
	ClosedByBackend int64 `json:"closed_by_backend"`
	// ClosedFailed counts those that broke, or whose exchange was given up.
	ClosedFailed int64 `json:"closed_failed"`
	// ClosedOther counts those that ended as planned: as request or answer said, with the
	// backend or the pool, or with an upgrade.
	ClosedOther int64 `json:"closed_other"`
}

// ProbeStats is what is known of the probes of one backend. Probes count neither as
// requests nor as failures of those.
type ProbeStats struct {
	// Verdict is what the last probe said: healthy, unhealthy, degraded or drain;
	// "none" if it could not be sent for want of files, ports or buffers here. Error
	// is its reason, and may name addresses.
	Verdict string `json:"verdict"`
	Error   string `json:"error,omitempty"`
	// InARow counts the probes in a row that have passed, with whatever verdict, if the
	// last one did, and else those that have failed.
	InARow int `json:"in_a_row"`
	// At is when the last probe ended, Latency how long it took; in JSON it is in
	// nanoseconds.
	At      time.Time     `json:"at"`
	Latency time.Duration `json:"latency_ns"`
	// Next is when the next one is due; zero while one is under way, and for a
	// backend that is disabled.
	Next time.Time `json:"next,omitzero"`
	// Count counts all probes, Failures those of them that failed.
	Count    int64 `json:"count"`
	Failures int64 `json:"failures"`
}

// totals counts what no single backend stands for.
type totals struct {
	requests, failures, clientClosed, cut atomic.Int64
	unrecorded, badPicks                  atomic.Int64
}

// failed counts a request that got no answer because of err.
func (t *totals) failed(err error) {
	if StatusOf(err) == StatusClientClosed {
		t.clientClosed.Add(1)
		return
	}
	t.failures.Add(1)
}

// bodyEnded counts how the body of an answer ended.
func (t *totals) bodyEnded(o *Outcome) {
	switch {
	case o.Cause == CauseClientGone:
		t.clientClosed.Add(1)
	case o.failed():
		t.cut.Add(1)
	}
}

// Stats returns what the pool has counted until now.
func (p *Pool) Stats() Stats {
	snap := p.set.current.Load()
	s := Stats{
		Name:         p.cfg.name,
		Strategy:     strategyName(p.cfg.balancer),
		Requests:     p.totals.requests.Load(),
		Failures:     p.totals.failures.Load(),
		ClientClosed: p.totals.clientClosed.Load(),
		Cut:          p.totals.cut.Load(),
		Unrecorded:   p.totals.unrecorded.Load(),
		ReplayBytes:  p.memory.used.Load(),
		BadPicks:     p.totals.badPicks.Load(),
		Panics:       p.set.panics.count.Load(),
		Abandoned:    p.set.abandoned(),
		FailOpen:     snap.failsOpen(),
		Backends:     make([]BackendStats, len(snap.all)),
	}
	for i, b := range snap.all {
		st := b.stats()
		s.Backends[i] = st
		s.InFlight += st.InFlight
		if st.Usable {
			s.Usable++
		}
		s.Retries += st.Retries
	}
	return s
}

func (b *Backend) stats() BackendStats {
	st := b.Status()
	s := BackendStats{
		Name: b.name, URL: b.URL(),
		State: st.String(), Reason: st.Reason, Since: st.Since, Until: st.Until,
		Usable:   st.Usable() && b.takesRequests(),
		Weight:   b.settings.Load().weight,
		InFlight: b.inFlight.Load(),
		Requests: b.requests.Load(), Failures: b.failures.Load(), Retries: b.retries.Load(),
		SentBytes: b.sent.Load(), ReceivedBytes: b.received.Load(),
	}
	if text := b.lastErr.Load(); text != nil {
		s.LastError = *text
	}
	if b.conns != nil && b.conns.own != nil {
		conns := b.conns.own.stats()
		s.Connections = &conns
	}
	if probe := b.checks.latest.Load(); probe != nil {
		copied := *probe
		copied.Next = b.watch.next()
		s.Probe = &copied
	}
	return s
}

// observe tells the strategy, if it wants to learn.
func (p *Pool) observe(b *Backend, o *Outcome) {
	if p.learner == nil {
		return
	}
	defer func() {
		if v := recover(); v != nil {
			p.set.panics.caught("Observe of the strategy", v)
		}
	}()
	p.learner.Observe(b, *o)
}
