package lb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxProbes is how many probes of a pool are under way at once.
	maxProbes = 32
	// maxIll is how many of them may be of backends that are unhealthy already, so
	// that waiting for those does not keep others from being probed.
	maxIll = maxProbes / 2
	// maxStuck is how many Checks that were given up may still have to return for
	// further ones to be called.
	maxStuck = 1000
	// probeSpread is the time over which the first probes of more than maxProbes
	// backends are spread.
	probeSpread = time.Second
	// probeGrace is how long a Checker may take to return once its time is up.
	probeGrace = 20 * time.Millisecond
	// probeJitter is the fraction by which an interval may be shorter or longer.
	probeJitter = 0.1
	// probeTick is the grid that times of probes are on: a process that wakes up
	// for each of many probes spends most of its time with that. A hundredth of the
	// interval is enough for a short one.
	probeTick = 10 * time.Millisecond
)

// prober runs the probes of a pool: each backend's at its own time, at most
// maxProbes at once.
type prober struct {
	set      *backendSet
	checker  Checker
	settings *HealthCheck
	slots    chan struct{} // one for each probe under way
	ill      chan struct{} // one for each of them whose backend is unhealthy; see maxIll
	began    time.Time

	abandoned atomic.Int64 // Checks that did not return in time
	stuck     atomic.Int64 // those of them that have not returned since
}

func newProber(s *backendSet, cfg *config) *prober {
	return &prober{
		set: s, checker: cfg.checker, settings: cfg.check, began: time.Now(),
		slots: make(chan struct{}, maxProbes), ill: make(chan struct{}, maxIll),
	}
}

// watchAll begins to probe backends, the first maxProbes of them at once.
func (p *prober) watchAll(backends []*Backend) {
	spread := min(probeSpread, p.settings.Interval)
	rest := max(1, len(backends)-maxProbes)
	for i, b := range backends {
		b.watch.start(spread * time.Duration(max(0, i+1-maxProbes)) / time.Duration(rest))
	}
}

// jittered returns d, longer or shorter by chance, so that it ends on a tick.
func (p *prober) jittered(d time.Duration) time.Duration {
	tick := min(probeTick, d/100)
	least := float64(d)*(1-probeJitter) + float64(tick)
	most := float64(d) * (1 + probeJitter)
	now := time.Since(p.began)
	due := now + time.Duration(least+(most-least)*rand.Float64())
	return due.Truncate(max(1, tick)) - now
}

// watch probes one backend until it leaves.
type watch struct {
	prober  *prober
	backend *Backend
	ctx     context.Context // ends with end
	cancel  context.CancelFunc
	probes  int         // that have ended; used by one goroutine at a time
	behind  atomic.Bool // a Check that was given up has not returned yet

	mu      sync.Mutex // guards the following
	timer   *time.Timer
	due     time.Time // when the timer fires; zero while it is not set
	current *probe    // under way, which will set the timer; nil without
	stopped bool
}

func (p *prober) newWatch(b *Backend) *watch {
	w := &watch{prober: p, backend: b}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	return w
}

// start sets the time of the next probe, unless one is under way.
func (w *watch) start(after time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil {
		w.startLocked(after)
	}
}

func (w *watch) startLocked(after time.Duration) {
	if w.stopped {
		return
	}
	w.due = time.Now().Add(after)
	if w.timer == nil {
		w.timer = time.AfterFunc(after, w.fire)
		return
	}
	w.timer.Reset(after)
}

// restart probes at once. A probe that is under way asks for what does not matter any
// more: it is cut and says nothing.
func (w *watch) restart() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current != nil {
		w.current.cutLocked()
		return
	}
	w.startLocked(0)
}

// hurry brings the next probe forward: something has happened to the backend.
func (w *watch) hurry() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	after := w.prober.jittered(w.prober.settings.FastInterval)
	if w.timer != nil && w.current == nil && !w.due.IsZero() && time.Until(w.due) > after {
		w.startLocked(after)
	}
}

// pause stops the probes until restart, and cuts one that is under way.
func (w *watch) pause() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pauseLocked()
}

func (w *watch) pauseLocked() {
	w.due = time.Time{}
	if w.timer != nil {
		w.timer.Stop()
	}
	if w.current != nil {
		w.current.cutLocked()
	}
}

// end stops the probes for good and cancels one that is under way.
func (w *watch) end() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	w.pauseLocked()
	w.cancel()
}

// next is when the next probe is due, zero if none is.
func (w *watch) next() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.due
}

// probe is one call of the Checker. It ends when that returns or, if it does not in
// time, without it.
type probe struct {
	watch *watch
	slots []chan struct{} // that it holds one of each of
	epoch uint32          // of the backend's health
	began time.Time
	ended atomic.Bool

	// The following is guarded by the mu of the watch.
	cancel context.CancelFunc // of the Check; nil before it
	cut    bool               // it says nothing
}

func (p *probe) cutLocked() {
	p.cut = true
	if p.cancel != nil {
		p.cancel()
	}
}

// begin claims the probe that is due, nil if there is none.
func (w *watch) begin() *probe {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current != nil || w.stopped {
		return nil
	}
	w.current, w.due = &probe{watch: w}, time.Time{}
	return w.current
}

// fire is called when a probe is due: it sends it, unless the backend is not to be
// probed at all.
func (w *watch) fire() {
	if !w.prober.set.work.enter() {
		return
	}
	defer w.prober.set.work.leave()
	p := w.begin()
	if p == nil || !p.wait() {
		return
	}
	p.epoch, p.began = w.backend.passive.epoch.Load(), time.Now()
	switch {
	case w.backend.disabled():
		p.done(0)
	case w.behind.Load():
		p.learn(VerdictUnhealthy, told{text: errProbeBehind.Error()})
		w.prober.set.panics.misbehaved("the Checker has not returned, so its backend cannot be probed", slog.String("backend", w.backend.name))
	case w.prober.stuck.Load() >= maxStuck:
		p.learn(VerdictUnhealthy, told{text: errProbesStuck.Error()})
	default:
		p.send()
	}
}

// wait waits for the probe's turn, and tells whether the backend is still there then.
func (p *probe) wait() bool {
	w := p.watch
	turns := []chan struct{}{w.prober.slots}
	if w.backend.standing.Load().health == HealthUnhealthy {
		turns = []chan struct{}{w.prober.ill, w.prober.slots}
	}
	for _, turn := range turns {
		select {
		case turn <- struct{}{}:
			p.slots = append(p.slots, turn)
		case <-w.ctx.Done():
		}
		if w.ctx.Err() != nil { // select may have chosen either
			p.release()
			return false
		}
	}
	return true
}

func (p *probe) release() {
	for _, slot := range p.slots {
		<-slot
	}
	p.slots = nil
}

// done ends what begin began, with the next probe due after that time.
func (p *probe) done(after time.Duration) {
	p.release()
	w := p.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	w.current = nil
	if p.cut {
		after = 0 // what it was cut for wants to be known
	}
	if !w.backend.disabled() { // asked here, for it may have changed since fire looked
		w.startLocked(after)
	}
}

// isCut tells that the probe says nothing.
func (p *probe) isCut() bool {
	p.watch.mu.Lock()
	defer p.watch.mu.Unlock()
	return p.cut || p.watch.stopped
}

var (
	errProbeTimeout = errors.New("no verdict in time")
	errProbeBehind  = errors.New("the last check has not returned yet")
	errProbesStuck  = errors.New("too many checks have not returned yet")
	errProbeExit    = errors.New("checker ended its goroutine")
)

// send calls the Checker, which may be the user's: it may panic, lie or not return.
// It does so on the goroutine of the timer, because most probes need no other.
func (p *probe) send() {
	w := p.watch
	ctx, cancel := context.WithTimeout(w.ctx, w.prober.settings.Timeout)
	defer cancel()
	w.mu.Lock()
	p.cancel = cancel
	if p.cut {
		cancel()
	}
	w.mu.Unlock()
	w.behind.Store(true)
	giveUp := context.AfterFunc(ctx, func() {
		// A Checker that heeds its context is about to return, and says more.
		time.AfterFunc(probeGrace, func() { p.abandon(ctx) })
	})
	verdict, err := VerdictUnhealthy, errProbeExit
	defer func() {
		if v := recover(); v != nil {
			w.prober.set.panics.caught("the Checker of backend "+w.backend.name, v)
			verdict, err = VerdictUnhealthy, fmt.Errorf("checker panicked: %v", v)
		}
		w.behind.Store(false)
		giveUp()
		if p.ended.Swap(true) {
			w.prober.stuck.Add(-1) // it was abandoned
			return
		}
		p.conclude(ctx, verdict, err)
	}()
	target := newProbeTarget(w.backend, w.prober.settings.Port)
	target.ctx = ctx
	verdict, err = w.prober.checker.Check(ctx, target)
}

// abandon goes on without the Checker, which has not returned although ctx has ended.
func (p *probe) abandon(ctx context.Context) {
	prober := p.watch.prober
	if p.ended.Swap(true) {
		return
	}
	prober.abandoned.Add(1)
	prober.stuck.Add(1)
	if prober.set.work.enter() {
		defer prober.set.work.leave()
		p.conclude(ctx, VerdictUnhealthy, nil)
	}
}

// conclude makes a finding of what the Checker has returned. It is called once.
func (p *probe) conclude(ctx context.Context, v Verdict, err error) {
	panics := &p.watch.prober.set.panics
	where := "an error of the Checker of backend " + p.watch.backend.name
	switch {
	case p.isCut():
		p.done(0)
	case ctx.Err() != nil:
		p.learn(VerdictUnhealthy, p.late(panics.tell(where, err)))
	default:
		p.learn(p.believe(v, panics.tell(where, err)))
	}
}

// late is the reason of a probe whose time was up. said is what the Checker says of
// it, if it has returned.
func (p *probe) late(said told) told {
	text := fmt.Sprintf("%v (%v)", errProbeTimeout, p.watch.prober.settings.Timeout)
	if said.text != "" && said.text != errProbeExit.Error() {
		text += ": " + said.text
	}
	return told{text: text}
}

// believe returns the verdict, or that there is none if it makes no sense.
func (p *probe) believe(v Verdict, said told) (Verdict, told) {
	switch {
	case int(v) >= len(verdictNames):
		said = told{text: fmt.Sprintf("checker returned verdict %d, which does not exist", v)}
	case v == VerdictHealthy && said.text != "":
		said = told{text: "checker returned healthy with an error: " + said.text}
	default:
		return v, said
	}
	p.watch.prober.set.panics.misbehaved("the Checker of backend "+p.watch.backend.name+" contradicts itself", slog.String("error", said.text))
	return VerdictUnhealthy, said
}

// learn hands in what the probe has found, and then, with the next one on its way,
// has it published and told: that is user code, which may take its time.
func (p *probe) learn(v Verdict, reason told) {
	w := p.watch
	w.probes++
	prober := w.prober
	inOrder := prober.set.learnProbe(w.backend, &finding{v, reason, p.epoch, time.Since(p.began)})
	switch settings := prober.settings; {
	case !inOrder:
		p.done(prober.jittered(settings.FastInterval))
	case w.probes == 1: // from now on at a time of its own
		p.done(time.Duration(rand.Float64() * float64(settings.Interval)))
	default:
		p.done(prober.jittered(settings.Interval))
	}
	prober.set.publishSoon()
}
