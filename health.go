package lb

import "time"

// Health is what a pool holds of a backend. It decides, together with the State
// that the operator sets, who is a candidate. Two kinds of evidence move it, what
// becomes of requests (PassiveHealth) and, if asked for, probes (HealthCheck):
//
//	health     candidate?              becomes     when
//	unknown    yes                     healthy     the first probe passed (*)
//	                                   unhealthy   the first probe failed
//	                                   ejected     requests failed in a row
//	healthy    yes                     unhealthy   Fall probes in a row failed
//	                                   ejected     requests failed in a row
//	degraded   if no healthy or        healthy     a probe passed (*)
//	           unknown one is left     unhealthy   Fall probes in a row failed
//	           for the request         ejected     requests failed in a row
//	draining   if none is usable       healthy     a probe passed (*)
//	                                   unhealthy   Fall probes in a row failed
//	unhealthy  if none is usable or    healthy     Rise probes in a row passed (*)
//	           draining
//	ejected    if the request has      healthy     a probe passed (**)
//	           tried all the others    unhealthy   Fall probes in a row failed, or the
//	                                               very first
//	                                   trial       its time is up
//	                                   settled     a request was answered all the same
//	trial      for one request at a    settled     that request was answered
//	           time                    healthy     a probe passed (**)
//	                                   ejected     that request failed; for longer
//	                                   unhealthy   Fall probes in a row failed
//
// (*) Or degraded, or draining, if that is what the probe's Verdict said; these
// three change into one another with each probe that says so. (**) The same, but not
// with every probe; see PassiveHealth, also for RecoverByProbe, with which there is no
// trial. "settled" is what the probes had settled on before, unknown without any.
//
// While the operator has set a backend Draining or Disabled its health goes on to
// change, but for a disabled one there are no probes: once that is Active again, it is
// what it was before, is probed at once, and that one verdict decides.
//
// The last usable backend is never ejected, but probes may take it out. When none
// is usable, the pool fails open: it uses those whose probes ask for draining or, if
// there are none, every backend that the operator has left Active, whatever its health.
// See WithFailClosed for a pool that does not, and leaves ejected ones alone too.
type Health uint8

// The kinds of health.
const (
	// HealthUnknown is a backend of which nothing is known yet. It is usable.
	HealthUnknown Health = iota
	// HealthHealthy is a backend whose probes pass.
	HealthHealthy
	// HealthDegraded is a backend whose probe asks to be spared: it gets requests
	// that no other backend can take.
	HealthDegraded
	// HealthDraining is a backend whose probe asks for no new requests; those under
	// way go on to their end. It works, so a pool that fails open asks it before those
	// that do not. See Draining for the operator's word, which holds always.
	HealthDraining
	// HealthUnhealthy is a backend whose probes fail.
	HealthUnhealthy
	// HealthEjected is a backend that was taken out because requests failed on it.
	HealthEjected
	// HealthTrial is a backend whose ejection is over and that has yet to show
	// that it works again.
	HealthTrial
)

var healthNames = [...]string{"unknown", "healthy", "degraded", "draining", "unhealthy", "ejected", "trial"}

// String returns the health as one lower-case word.
func (h Health) String() string { return nameIn(healthNames[:], int(h)) }

// MarshalText makes it the word of String in JSON and in logs.
func (h Health) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// usable tells whether a backend of this health takes requests like any other.
func (h Health) usable() bool {
	return h == HealthUnknown || h == HealthHealthy || h == HealthDegraded
}

// takenOut tells whether passive evidence keeps a backend of this health away from
// most requests, so that one which is answered is news.
func (h Health) takenOut() bool { return h == HealthEjected || h == HealthTrial }

// setHealthLocked moves b to another health and forgets what counted in the old
// one, unless it is usable in both: a probe's word on how well it works does not
// undo what requests have shown. until is the end of an ejection.
func (s *backendSet) setHealthLocked(b *Backend, h Health, reason string, until time.Time) {
	st := *b.standing.Load()
	if !st.health.usable() || !h.usable() {
		b.passive.reset()
	}
	st.health, st.reason, st.since, st.until = h, reason, time.Now(), until
	st.firm = h == HealthEjected && b.passive.blind
	s.setStandingLocked(b, st, reason)
}
