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
	set       *backendSet
	checker   Checker
	settings  *HealthCheck
	slots     chan struct{}
	began     time.Time
	abandoned atomic.Int64
}

func newProber(s *backendSet, cfg *config) *prober {
	return &prober{set: s, checker: cfg.checker, settings: cfg.check, slots: make(chan struct{}, maxProbes), began: time.Now()}
}

// watchAll begins to probe backends, the first maxProbes of a round at once.
func (p *prober) watchAll(backends []*Backend) {
	spread := min(probeSpread, p.settings.Interval)
	if len(backends) <= maxProbes {
		spread = 0
	}
	for i, b := range backends {
		b.watch.start(spread * time.Duration(i) / time.Duration(len(backends)))
	}
}

// watch probes one backend until it leaves.
type watch struct {
	prober  *prober
	backend *Backend
	ctx     context.Context // ends with end
	cancel  context.CancelFunc
	probes  int         // that have begun; used by one goroutine at a time
	behind  atomic.Bool // a Check that was given up has not returned yet

	mu      sync.Mutex // guards the following
	timer   *time.Timer
	due     time.Time // when the timer fires; zero while it is not set
	running bool      // a probe is under way, which will set the timer
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
	if !w.running {
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

// hurry brings the next probe forward: something has happened to the backend.
func (w *watch) hurry() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	after := w.prober.jittered(w.prober.settings.FastInterval)
	if w.timer != nil && !w.running && time.Until(w.due) > after {
		w.startLocked(after)
	}
}

// pause stops the probes until start.
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
}

// end stops the probes for good and cancels one that is under way.
func (w *watch) end() {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.stopped = true
	w.pauseLocked()
	w.mu.Unlock()
	w.cancel() // after the above: a probe that this cuts must not set the timer again
}

// next is when the next probe is due, zero if none is.
func (w *watch) next() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.due
}

// begin claims the probe that is due.
func (w *watch) begin() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running || w.stopped {
		return false
	}
	w.running, w.due = true, time.Time{}
	return true
}

// fire is called when a probe is due: it sends it, unless the backend is not to be
// probed at all.
func (w *watch) fire() {
	if !w.prober.set.work.enter() {
		return
	}
	defer w.prober.set.work.leave()
	if !w.begin() {
		return
	}
	select {
	case w.prober.slots <- struct{}{}:
	case <-w.ctx.Done():
		return
	}
	switch {
	case w.backend.disabled():
		w.done(0)
	case w.behind.Load():
		w.prober.abandoned.Add(1)
		w.prober.set.panics.misbehaved("the Checker has not returned, so its backend cannot be probed", slog.String("backend", w.backend.name))
		w.learn(&probe{watch: w, epoch: w.backend.passive.epoch.Load(), began: time.Now()}, VerdictUnhealthy, errProbeBehind)
	default:
		w.send()
	}
}

// done ends what begin began, with the next probe due after that time.
func (w *watch) done(after time.Duration) {
	<-w.prober.slots
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = false
	if !w.backend.disabled() { // asked here, for it may have changed since fire looked
		w.startLocked(after)
	}
}

// probe is one call of the Checker. It ends when that returns or, if it does not in
// time, without it.
type probe struct {
	watch *watch
	epoch uint32 // of the backend's health
	began time.Time
	ended atomic.Bool
}

var (
	errProbeTimeout = errors.New("no verdict in time")
	errProbeBehind  = errors.New("the last check has not returned yet")
	errProbeExit    = errors.New("checker ended its goroutine")
)

// send calls the Checker, which may be the user's: it may panic, lie or not return.
// It does so on the goroutine of the timer, because most probes need no other.
func (w *watch) send() {
	p := &probe{watch: w, epoch: w.backend.passive.epoch.Load(), began: time.Now()}
	ctx, cancel := context.WithTimeout(w.ctx, w.prober.settings.Timeout)
	defer cancel()
	w.behind.Store(true)
	giveUp := context.AfterFunc(ctx, func() {
		// A Checker that heeds its context is about to return, and says more.
		time.AfterFunc(probeGrace, func() { p.end(ctx, VerdictUnhealthy, nil) })
	})
	verdict, err := VerdictUnhealthy, errProbeExit
	defer func() {
		if v := recover(); v != nil {
			w.prober.set.panics.caught("the Checker of backend "+w.backend.name, v)
			verdict, err = VerdictUnhealthy, fmt.Errorf("checker panicked: %v", v)
		}
		w.behind.Store(false)
		giveUp()
		p.end(ctx, verdict, err)
	}()
	verdict, err = w.prober.checker.Check(ctx, newProbeTarget(w.backend, w.prober.settings.Port))
}

// end is called when the Checker has returned and when ctx has ended; the first call
// counts.
func (p *probe) end(ctx context.Context, v Verdict, err error) {
	w := p.watch
	if p.ended.Swap(true) || !w.prober.set.work.enter() {
		return
	}
	defer w.prober.set.work.leave()
	switch {
	case w.ctx.Err() != nil:
		w.done(0) // it was cut, and says nothing
		return
	case ctx.Err() != nil:
		v, err = VerdictUnhealthy, w.late(err)
	default:
		v, err = w.believe(v, err)
	}
	w.learn(p, v, err)
}

// late is the reason of a probe whose time was up. err is what the Checker says of it,
// if it has returned.
func (w *watch) late(err error) error {
	timeout := w.prober.settings.Timeout
	if err == nil || errors.Is(err, errProbeExit) {
		return fmt.Errorf("%w (%v)", errProbeTimeout, timeout)
	}
	return fmt.Errorf("%w (%v): %w", errProbeTimeout, timeout, err)
}

// learn hands in what a probe has found.
func (w *watch) learn(p *probe, v Verdict, err error) {
	w.probes++
	inOrder := w.prober.set.learnProbe(w.backend, p.epoch, v, err, time.Since(p.began))
	settings := w.prober.settings
	switch {
	case !inOrder:
		w.done(w.prober.jittered(settings.FastInterval))
	case w.probes == 1: // from now on at a time of its own
		w.done(time.Duration(rand.Float64() * float64(settings.Interval)))
	default:
		w.done(w.prober.jittered(settings.Interval))
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

// believe returns the verdict, or that there is none if it makes no sense.
func (w *watch) believe(v Verdict, err error) (Verdict, error) {
	switch {
	case int(v) >= len(verdictNames):
		err = fmt.Errorf("checker returned verdict %d, which does not exist", v)
	case v == VerdictHealthy && err != nil:
		err = fmt.Errorf("checker returned healthy with an error: %w", err)
	default:
		return v, err
	}
	w.prober.set.panics.misbehaved("the Checker of backend "+w.backend.name+" contradicts itself", slog.String("error", err.Error()))
	return VerdictUnhealthy, err
}
