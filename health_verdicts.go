package lb

import (
	"fmt"
	"sync/atomic"
	"time"
)

// checks is what a backend's probes have said.
type checks struct {
	latest atomic.Pointer[ProbeStats] // of the last probe; nil before it

	// The following is guarded by the mu of the backendSet.
	settled Verdict // what holds until enough probes say otherwise
	known   bool    // settled means something
	fresh   bool    // the next verdict decides at once, as the first does
	row     int     // probes in a row that passed or, if below zero, failed
}

// health is the health that the probes give, unknown before the first.
func (c *checks) health() Health {
	if !c.known {
		return HealthUnknown
	}
	return c.settled.health()
}

// count takes in v and tells whether it decides.
func (c *checks) count(v Verdict, h *HealthCheck) bool {
	if v.passes() {
		c.row = max(0, c.row) + 1
	} else {
		c.row = min(0, c.row) - 1
	}
	switch {
	case !c.known || c.fresh:
	case v.passes() && !c.settled.passes() && c.row < h.Rise:
		return false
	case !v.passes() && c.settled.passes() && -c.row < h.Fall:
		return false
	}
	c.settled, c.known, c.fresh = v, true, false
	return true
}

// finding is what a probe has found.
type finding struct {
	verdict Verdict
	reason  told
	epoch   uint32 // of the backend's health when it was sent
	took    time.Duration
}

// learnProbe draws the consequences of a probe and tells whether b is in order: then
// the next one has time. What has changed is still to be published.
func (s *backendSet) learnProbe(b *Backend, f *finding) (inOrder bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ownsLocked(b) || s.closed {
		return false
	}
	c := &b.checks
	if !f.reason.local && c.count(f.verdict, s.cfg.check) {
		s.settleLocked(b, f)
	}
	c.noteLocked(f)
	return !f.reason.local && f.verdict.passes() && b.standing.Load().health == f.verdict.health()
}

// settleLocked moves b to the health that its probes give.
func (s *backendSet) settleLocked(b *Backend, f *finding) {
	s.warmLocked()
	s.wakeLocked()
	is, becomes := b.standing.Load().health, f.verdict.health()
	reason := b.checks.reason(is, f)
	switch {
	case is == becomes:
	case !f.verdict.passes():
		b.passive.forget() // the probes see what is wrong with it
		s.setHealthLocked(b, becomes, reason, time.Time{})
	case !is.takenOut():
		s.setHealthLocked(b, becomes, reason, time.Time{})
	case s.refutesLocked(b, f.epoch):
		s.endEjectionLocked(b, reason, true)
	}
}

// reason says in a few words why a backend that is of some health is not any more.
func (c *checks) reason(is Health, f *finding) string {
	var text string
	switch {
	case c.row < -1:
		text = fmt.Sprintf("probes failed in a row: %d, the last", -c.row)
	case c.row == -1:
		text = "probe failed"
	case f.verdict != VerdictHealthy:
		text = "probe said " + f.verdict.String()
	case is == HealthUnhealthy && c.row > 1:
		text = fmt.Sprintf("probes passed in a row: %d", c.row)
	default:
		text = "probe passed"
	}
	if f.reason.text == "" {
		return text
	}
	return text + ": " + f.reason.text
}

// noteLocked keeps what Stats tells of the last probe. One that could not be sent for
// want of something here is none.
func (c *checks) noteLocked(f *finding) {
	n := &ProbeStats{Verdict: f.verdict.String(), Error: f.reason.text, At: time.Now(), Latency: f.took}
	if last := c.latest.Load(); last != nil {
		n.Count, n.Failures = last.Count, last.Failures
	}
	n.Count++
	n.InARow = max(c.row, -c.row)
	switch {
	case f.reason.local:
		n.Verdict, n.InARow = "none", 0
	case !f.verdict.passes():
		n.Failures++
	}
	c.latest.Store(n)
}

// mayReturn is when a backend that was taken out may be back at the soonest, zero if
// that cannot be said.
func (b *Backend) mayReturn() time.Time {
	st := b.standing.Load()
	if b.watch == nil || st.health.usable() {
		return st.until
	}
	next, last := b.watch.next(), b.checks.latest.Load()
	switch {
	case next.IsZero() || last == nil:
		return st.until
	case st.health == HealthEjected && !st.until.IsZero() && (st.firm || st.until.Before(next)):
		return st.until
	case st.health != HealthUnhealthy:
		return next
	}
	missing := b.watch.prober.settings.Rise - 1
	if last.Verdict != VerdictUnhealthy.String() {
		missing -= last.InARow
	}
	return next.Add(time.Duration(missing) * b.watch.prober.settings.FastInterval)
}
