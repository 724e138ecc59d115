package lb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// closeGrace is how long Close waits for user code that it has told to end: a
// request body whose Read goes on after Close, a logger that hangs.
const closeGrace = time.Second

// Pool is the set of backends and everything that decides among them. It is an
// http.Handler, which makes it a reverse proxy, and an http.RoundTripper, which
// makes it the transport of a client; both faces may be used at once and share
// one view of the backends.
//
// New makes a Pool; the zero value cannot be used. All methods may be called
// concurrently. A Pool must be closed with Close or Shutdown.
type Pool struct {
	cfg      *config
	set      backendSet
	conns    *connSet
	memory   memory
	requests gate      // requests under way
	scratch  sync.Pool // of *[]*Backend
	sockets  webSockets
	totals   totals
	silent   *log.Logger // drops what is logged to it
	learner  Learner     // the strategy, if it is one
	down     atomic.Bool // closed, with requests under way being cut
}

// New returns a pool of targets with the given options. It reports everything
// that is wrong with either in one error, which names each value; then no pool
// is made. Without active checks (see HealthCheck) no backend is contacted until the
// first request; see Ready for how to wait for their verdicts.
func New(targets []Target, opts ...Option) (*Pool, error) {
	list, errTargets := parseTargets(targets)
	cfg, errOptions := newConfig(opts)
	if err := errors.Join(errTargets, errOptions, cfg.checkWays(list)); err != nil {
		return nil, fmt.Errorf("lb: %w", err)
	}
	p := &Pool{cfg: cfg, conns: newConnSet()}
	p.memory.limit = cfg.retry.MaxPoolReplayBytes
	p.requests.init()
	p.set.work.init()
	p.set.cfg, p.set.conns = cfg, p.conns
	p.set.panics.logger = cfg.logger
	p.silent = log.New(io.Discard, "", 0)
	p.scratch.New = func() any { return new([]*Backend) }
	p.learner, _ = cfg.balancer.(Learner)
	if cfg.check != nil {
		p.set.prober = newProber(&p.set, cfg)
	}
	p.set.replace(list)
	return p, nil
}

// ServeHTTP forwards r to a backend and the backend's answer to w, trying others
// as RetryPolicy allows. When there is no answer to pass on it replies itself;
// see WithErrorHandler. CONNECT is answered with 405.
//
// The request goes out without hop-by-hop fields and without what a client may
// claim about its way here: Forwarded, X-Real-Ip and X-Forwarded-For, -Host,
// -Proto, -Port, -Prefix, -Server and -Ssl, also spelt with underscores. Then
// X-Forwarded-For, -Host and -Proto are set to what is known of r's peer; see
// WithTrustedProxies for a peer that is believed. Path and query go out byte for byte,
// with the path of the target's URL in front, and no field is invented.
//
// A middleware that wraps w must give its writer an Unwrap method (see
// http.ResponseController): without one, streams are passed on in lumps, upgrades
// fail and an answer that comes before the end of the upload has to wait for it.
//
// If the answer breaks off in mid-body, ServeHTTP panics with
// http.ErrAbortHandler, which makes net/http cut the client's connection so that
// the client can see it; without a server, as with httptest.ResponseRecorder, it
// returns.
func (p *Pool) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.totals.requests.Add(1)
	if !p.requests.enter() {
		p.fail(w, r, fmt.Errorf("lb: %w", ErrClosed))
		p.totals.failures.Add(1)
		return
	}
	defer p.requests.leave()
	p.forward(w, r)
}

// RoundTrip sends r to a backend and returns its answer, trying others as
// RetryPolicy allows. It makes the pool the Transport of an http.Client or of a
// proxy of one's own. Scheme and host of r.URL are replaced by the backend's, and
// its path follows the target's prefix; the header goes out as it is. Redirects
// of an http.Client come here too, wherever they point: set CheckRedirect where
// that is not wanted.
//
// It keeps the contract of http.RoundTripper: it does not change r and always
// closes r.Body. An error wraps an *AttemptError, ErrNoBackend or ErrClosed; an
// answer with any status is no error. The answer counts as in flight until its
// Body was read to the end or closed. The Body of a 101 answer is an
// io.ReadWriteCloser with CloseWrite.
func (p *Pool) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, _, err := p.roundTrip(r)
	return resp, err
}

// roundTrip also returns the call, which knows who has answered.
func (p *Pool) roundTrip(r *http.Request) (*http.Response, *call, error) {
	p.totals.requests.Add(1)
	if !p.requests.enter() {
		if r.Body != nil {
			r.Body.Close()
		}
		p.totals.failures.Add(1)
		return nil, nil, fmt.Errorf("lb: %w", ErrClosed)
	}
	if r.URL == nil {
		if r.Body != nil {
			r.Body.Close()
		}
		p.requests.leave()
		p.totals.failures.Add(1)
		return nil, nil, errors.New("lb: request without URL")
	}
	c := new(call).init(p, r, p.requests.leave)
	resp, err := c.run()
	return resp, c, err
}

// SetTargets replaces the targets in one step. A target that keeps its name, URL,
// Host, TLS and Transport keeps its Backend with all its state; its weight, metadata,
// HealthURL and Handler change in place, and hold for the very next pick. Backends of
// other targets leave: they get no new request, and those under way go on to their end,
// WebSockets too; Drain before asks their clients to leave.
//
// When anything is wrong with targets, or there are none, SetTargets changes
// nothing and reports every fault in one error. After Close it returns ErrClosed.
func (p *Pool) SetTargets(targets []Target) error {
	list, err := parseTargets(targets)
	if err = errors.Join(err, p.cfg.checkWays(list)); err != nil {
		return fmt.Errorf("lb: %w", err)
	}
	if p.closed() {
		return fmt.Errorf("lb: %w", ErrClosed)
	}
	p.set.replace(list)
	return nil
}

// SetState makes the backend of that name Active, Draining or Disabled. The
// state lasts until it is set again or the backend leaves. An unknown name or
// state is an error. After Close it returns ErrClosed.
func (p *Pool) SetState(name string, s State) error {
	if int(s) >= len(stateNames) {
		return fmt.Errorf("lb: state %d: want Active, Draining or Disabled", s)
	}
	if p.closed() {
		return fmt.Errorf("lb: %w", ErrClosed)
	}
	b, err := p.set.setState(name, s, 0)
	if err == nil && s != Draining {
		p.sockets.stay(b)
	}
	return err
}

// Drain makes the backend of that name Draining and returns when nothing is in flight
// on it any more, or with an error that says how much is, when ctx ends or SetState has
// made the backend something else. When ctx ends the backend stays Draining and requests
// go on; only WebSockets do not for long: their clients are asked to leave as
// Upgrades.CloseSpread says. An unknown name is an error. After Close it returns ErrClosed.
func (p *Pool) Drain(ctx context.Context, name string) error {
	if p.closed() {
		return fmt.Errorf("lb: %w", ErrClosed)
	}
	b, err := p.set.setState(name, Draining, max(0, p.cfg.upgrades.spread(ctx)))
	if err != nil {
		return err
	}
	p.sockets.leave(b)
	switch err := b.waitIdle(ctx, p.conns.ctx); {
	case p.closed():
		return fmt.Errorf("lb: %w", ErrClosed)
	case err != nil:
		return fmt.Errorf("lb: backend %q still has attempts in flight (%d): %w", name, b.InFlight(), err)
	}
	return nil
}

// Backends returns the backends in the order of their targets.
func (p *Pool) Backends() []*Backend { return slices.Clone(p.set.current.Load().all) }

// CloseIdleConnections closes the connections to backends that no request uses
// now. http.Client.CloseIdleConnections calls it.
func (p *Pool) CloseIdleConnections() {
	for _, b := range p.set.current.Load().all {
		b.conns.closeIdle()
	}
}

// CloseWebSockets asks the clients of all WebSockets, those that open later too, to
// leave as Upgrades.CloseSpread says, and returns at once. Shutdown does so by itself; but
// where it follows that of an http.Server, which waits for the longest of its requests,
// there may be no time left:
//
//	server.RegisterOnShutdown(pool.CloseWebSockets)
//
// Upgrades.CloseSpread should then be less than half of the time for the shutdown. Streams
// over plain HTTP are not asked: they last as long as the server lets them.
func (p *Pool) CloseWebSockets() { p.sockets.leaveAll(p.cfg.upgrades.CloseSpread) }

// Shutdown closes the pool gently: new requests are refused with ErrClosed, which
// ServeHTTP answers with 503; those under way go on until they have ended or ctx
// has, and then the pool is closed as by Close. Clients of WebSockets are asked to leave;
// see Upgrades.CloseSpread. It returns ctx's error if that
// cut requests, else nil; after Close it does nothing. With an http.Server in
// front, shut that down first: it stops accepting and waits for its handlers; but see
// CloseWebSockets.
func (p *Pool) Shutdown(ctx context.Context) error {
	if p.closed() {
		return nil
	}
	p.requests.close()
	p.set.wakeAll()
	p.sockets.leaveAll(p.cfg.upgrades.spread(ctx))
	err := p.requests.wait(ctx, p.conns.ctx)
	p.Close()
	return err
}

// Close ends the pool at once: new requests are refused, requests under way lose
// their connections, and timers stop. It returns when every goroutine of the
// pool's own has ended, always nil. Code of the user's that goes on for more than
// a second after it was told to end (a request body in Read, a Checker, a logger) is
// not waited for; nor are requests under way on a RoundTripper of the user's. Calls
// after the first do nothing. Shutdown lets requests end first.
func (p *Pool) Close() error {
	p.down.Store(true)
	p.requests.close()
	p.set.work.close()
	p.set.close()
	p.conns.close()
	for _, b := range p.set.current.Load().all {
		b.conns.retire()
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	_ = p.set.work.wait(ctx, context.Background()) // waited long enough
	return nil
}

// closed tells that requests under way are being cut.
func (p *Pool) closed() bool { return p.down.Load() }
