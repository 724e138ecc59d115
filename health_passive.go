package lb

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

const (
	// ejectionJitter is the fraction by which an ejection may be shorter or
	// longer, so that backends that went together do not return together.
	ejectionJitter = 0.1
	// trialPatience is how long a trial waits for a request that could be given
	// to another backend should it fail. After that any request will do.
	trialPatience = time.Second
)

// PassiveHealth sets how a backend is ejected because requests failed on it, and
// how it returns. Only what the backend, or the way to it, is to blame for
// counts; see Outcome. An answer of any status is no failure.
//
// After Failures in a row the backend is ejected, for Ejection the first time,
// twice as long the second time and so on up to MaxEjection, each 10 % shorter
// or longer by chance. Then it is on trial: it gets one request at a time, by
// preference one that can be given to another backend should it fail, until one
// is answered. Ejections are counted anew once a backend was in for MaxEjection.
//
// The last usable backend is never ejected. Failures of dials may eject all
// others; other failures at most half of the pool, but one of two or three. What a
// probe has taken out counts as out.
//
// With active checks (see HealthCheck) a probe that was sent since and passes ends an
// ejection at once. But if requests that reached the backend fail again, less than
// MaxEjection after a probe ended the last ejection, probes do not see what is wrong:
// then the ejection lasts its time, and a trial follows, whatever they say.
//
// The zero value means the defaults.
type PassiveHealth struct {
	// Failures is how many failures in a row eject a backend. Zero means
	// DefaultFailures; a negative value turns ejection off.
	Failures int
	// Ejection is how long the first ejection lasts. Zero means
	// DefaultEjection; a negative value is an error.
	Ejection time.Duration
	// MaxEjection is the longest that an ejection lasts. Zero means
	// DefaultMaxEjection or Ejection, whichever is longer; a value below
	// Ejection is an error.
	MaxEjection time.Duration
	// RecoverByProbe lets only a probe that passes bring an ejected backend back, not
	// the time nor a request, so that no request has to try it. An ejection has no end
	// of its own then; Ejection and MaxEjection still say how long it lasts at least
	// if probes do not see what is wrong. It needs active checks; without them it is an
	// error. The default is false.
	RecoverByProbe bool
}

func (h *PassiveHealth) fill(c *config) {
	if h.RecoverByProbe && c.check == nil {
		c.faultf("PassiveHealth.RecoverByProbe needs probes: add WithHealthCheck or WithChecker")
	}
	if h.Failures == 0 {
		h.Failures = DefaultFailures
	}
	if h.Ejection < 0 {
		c.faultf("PassiveHealth.Ejection is %v: want more than zero, or 0 for %v", h.Ejection, DefaultEjection)
	}
	if h.Ejection == 0 {
		h.Ejection = DefaultEjection
	}
	switch {
	case h.MaxEjection == 0:
		h.MaxEjection = max(DefaultMaxEjection, h.Ejection)
	case h.MaxEjection < h.Ejection:
		c.faultf("PassiveHealth.MaxEjection is %v: want at least Ejection (%v), or 0 for %v", h.MaxEjection, h.Ejection, max(DefaultMaxEjection, h.Ejection))
	}
}

// ejection is how long the n-th ejection in a row lasts; chance is 0 to 1.
func (h *PassiveHealth) ejection(n int, chance float64) time.Duration {
	d := h.MaxEjection
	if int64(n) < int64(h.MaxEjection/h.Ejection) { // else n × Ejection could overflow
		d = h.Ejection * time.Duration(n)
	}
	return time.Duration(float64(d) * (1 - ejectionJitter + 2*ejectionJitter*chance))
}

// passive is what a backend's health by passive evidence hangs on.
type passive struct {
	// inRow counts the failures before the answer's headers since the last
	// answer, cuts those in mid-body since the last whole answer: an answer that
	// begins well must not hide that none ends well. Both count without a lock;
	// only what may eject takes the set's.
	inRow, cuts atomic.Int32
	// epoch counts the changes of health. An attempt remembers it, so that the
	// late outcome of an older state is not taken for news.
	epoch atomic.Uint32
	// onTrial is the reservation of the one request that a backend on trial may
	// have.
	onTrial atomic.Bool

	// The following is guarded by the mu of the backendSet.
	ejections int         // in a row
	back      time.Time   // when the last ejection ended; zero during one
	since     uint32      // the epoch of the last ejection
	byProbe   bool        // a probe ended it
	blind     bool        // probes do not see what is wrong: they passed, and requests failed again
	trialFrom time.Time   // when the trial began
	timer     *time.Timer // ends the ejection
}

// reset forgets what counted in the health that ends.
func (p *passive) reset() {
	p.inRow.Store(0)
	p.cuts.Store(0)
	p.epoch.Add(1)
	p.stop()
}

// forget clears the history of ejections.
func (p *passive) forget() {
	p.ejections, p.back, p.byProbe, p.blind = 0, time.Time{}, false, false
}

func (p *passive) stop() {
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
}

// learn draws the consequences of one outcome for b's health. epoch is b's when
// the attempt began, trial whether the attempt was b's one request on trial.
func (s *backendSet) learn(b *Backend, epoch uint32, trial bool, o *Outcome) {
	if o.failed() {
		s.learnFailure(b, epoch, trial, o)
		return
	}
	if o.Cause != CauseNone {
		return // the fault of others says nothing about b
	}
	row := &b.passive.inRow
	if o.Final {
		row = &b.passive.cuts
	}
	if whole := o.Stage == StageDone; whole == o.Final && row.Load() != 0 {
		row.Store(0) // an answer whose reader has had enough says nothing about its end
	}
	if b.standing.Load().health.takenOut() {
		s.learnReturn(b, epoch, trial)
	}
}

// learnReturn takes b in again: it answered on trial, or while the pool failed
// open, after the state that put it out.
func (s *backendSet) learnReturn(b *Backend, epoch uint32, trial bool) {
	s.mu.Lock()
	health := b.standing.Load().health
	news := b.passive.epoch.Load() == epoch && s.ownsLocked(b) && health.takenOut()
	if !news || s.cfg.passive.RecoverByProbe || (health == HealthTrial && !trial && !s.current.Load().failOpen) {
		s.mu.Unlock()
		return
	}
	s.endEjectionLocked(b, "answered a request", false)
	s.mu.Unlock()
	s.publishSoon()
}

// endEjectionLocked gives b back the health that its probes have settled on, unknown
// without any.
func (s *backendSet) endEjectionLocked(b *Backend, reason string, byProbe bool) {
	b.passive.back, b.passive.byProbe = time.Now(), byProbe
	s.setHealthLocked(b, b.checks.health(), reason, time.Time{})
}

// learnFailure counts one failure of b and ejects it if that was one too many.
func (s *backendSet) learnFailure(b *Backend, epoch uint32, trial bool, o *Outcome) {
	limit := int32(s.cfg.passive.Failures)
	if limit < 0 || b.passive.epoch.Load() != epoch {
		return
	}
	row := &b.passive.inRow
	if o.Final {
		row = &b.passive.cuts
	}
	n := row.Add(1)
	if !trial && n%limit != 0 {
		return // the last usable backend may fail for long: not each time under the lock
	}
	s.mu.Lock()
	defer s.publishSoon()
	defer s.mu.Unlock()
	if b.passive.epoch.Load() != epoch || !s.ownsLocked(b) || s.closed {
		return
	}
	dial := o.Stage <= StageTLS
	switch health := b.standing.Load().health; {
	case health == HealthTrial && trial:
		s.ejectLocked(b, fmt.Sprintf("failed on trial: %s: %s", o.Stage, o.Cause), dial)
	case health.usable() && s.mayEjectLocked(dial):
		s.ejectLocked(b, fmt.Sprintf("failures in a row: %d, the last: %s: %s", n, o.Stage, o.Cause), dial)
	case health.usable():
		s.noteKeptLocked(b, int(n), o)
	}
}

// mayEjectLocked tells whether one more usable backend may be ejected. dial
// tells that it failed at the dial or the handshake, which proves more than an
// exchange that failed: a request can be poison to every backend.
func (s *backendSet) mayEjectLocked(dial bool) bool {
	members, usable := 0, 0
	for _, b := range s.backends {
		if !b.takesRequests() {
			continue
		}
		members++
		if b.standing.Load().health.usable() {
			usable++
		}
	}
	if usable <= 1 {
		return false
	}
	return dial || members-usable+1 <= max(1, members/2)
}

// noteKeptLocked notes that b fails and is not taken out, because others are out.
func (s *backendSet) noteKeptLocked(b *Backend, n int, o *Outcome) {
	if !seldom(int64(n / s.cfg.passive.Failures)) {
		return
	}
	attrs := []slog.Attr{slog.String("backend", b.name), slog.Int("failures", n), slog.String("last", o.Stage.String()+": "+o.Cause.String())}
	if err := b.lastErr.Load(); err != nil {
		attrs = append(attrs, slog.String("error", *err))
	}
	s.noteLocked(slog.LevelWarn, "backend fails but stays: too few others are usable", attrs...)
}

// ejectLocked takes b out. dial tells that it could not be reached, which a probe
// sees too.
func (s *backendSet) ejectLocked(b *Backend, reason string, dial bool) {
	now := time.Now()
	p := &b.passive
	if !p.back.IsZero() && now.Sub(p.back) >= s.cfg.passive.MaxEjection {
		p.forget()
	}
	p.blind = !dial && (p.blind || p.byProbe)
	p.ejections++
	p.back, p.byProbe = time.Time{}, false
	b.watch.hurry()
	d := s.cfg.passive.ejection(p.ejections, rand.Float64())
	until := now.Add(d)
	if s.cfg.passive.RecoverByProbe && !p.blind {
		until = time.Time{}
	}
	s.setHealthLocked(b, HealthEjected, reason, until)
	p.since = p.epoch.Load()
	if s.cfg.passive.RecoverByProbe {
		return
	}
	epoch := p.since
	p.timer = time.AfterFunc(d, func() {
		if s.work.enter() {
			defer s.work.leave()
			s.beginTrial(b, epoch)
		}
	})
}

// refutesLocked tells whether a probe that began with epoch, and passes, shows that b
// can be taken in again.
func (s *backendSet) refutesLocked(b *Backend, epoch uint32) bool {
	p := &b.passive
	switch {
	case int32(epoch-p.since) < 0: // sent before the ejection; epochs may wrap
		return false
	case !p.blind:
		return true
	}
	return s.cfg.passive.RecoverByProbe && !time.Now().Before(b.standing.Load().until)
}

// beginTrial ends the ejection that began with epoch.
func (s *backendSet) beginTrial(b *Backend, epoch uint32) {
	s.mu.Lock()
	if b.passive.epoch.Load() == epoch && s.ownsLocked(b) {
		b.passive.trialFrom = time.Now()
		s.setHealthLocked(b, HealthTrial, "ejection is over", time.Time{})
	}
	s.mu.Unlock()
	s.publishSoon()
}
