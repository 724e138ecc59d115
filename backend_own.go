package lb

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"sync/atomic"
	"time"

	"example.com/lb/internal/h1"
	"example.com/lb/internal/h2"
)

const (
	// pingAfter and pingTimeout bound how long a connection over HTTP/2 whose backend is
	// silently gone is taken to be alive.
	pingAfter   = 15 * time.Second
	pingTimeout = 15 * time.Second
	// settingsTimeout is how long a backend may take for its first word over HTTP/2, if
	// handshakes have no limit.
	settingsTimeout = 10 * time.Second
	// tlsSessions is how many sessions are kept for a backend, to resume.
	tlsSessions = 8
)

// way is connections of our own to one address, in whichever version of HTTP is spoken
// there. With https that is settled by the handshake (ALPN, RFC 7301): the first
// connection offers both, and if the backend has chosen HTTP/1.1 all others offer that
// alone.
//
//	http, unix    first
//	h2c           second
//	https         second until it turns out to be first; first for upgrades
type way struct {
	first  *h1.Pool // HTTP/1.1; nil with h2c
	second *h2.Pool // HTTP/2; nil with http
	at     endpoint
	fixed  bool // HTTP/1.1 alone, as Target.TLS says
	// until is when, in nanoseconds, a backend that has chosen HTTP/1.1 is to be asked again.
	until atomic.Int64
}

// chosenFor is how long a backend's choice of HTTP/1.1 is believed: it may be updated, or
// have been another server for a while.
const chosenFor = 5 * time.Minute

// onlyFirst tells that HTTP/1.1 alone is to be offered.
func (w *way) onlyFirst() bool { return w.fixed || time.Now().UnixNano() < w.until.Load() }

// choseFirst notes that the backend has chosen HTTP/1.1, or that it is to be asked.
func (w *way) choseFirst(yes bool) {
	if yes {
		w.until.Store(time.Now().Add(chosenFor).UnixNano())
	} else {
		w.until.Store(0)
	}
}

// hold makes the connections to e our own.
func (c *conns) hold(e endpoint, cfg *config, work *gate) {
	c.owned, c.raw = true, true
	dial := cfg.dialer
	if cfg.ownDialer {
		dial = abandonable(c.safely(dial))
	}
	dial = c.bounded(dial, cfg.timeouts)
	tlsConfig := clientConfig(e.tls)
	c.own = c.newWay(cfg, work, dial, e, tlsConfig)
	if cfg.check == nil {
		return
	}
	c.probeWay = func(to endpoint) *way {
		w := c.newWay(cfg, work, dial, to, tlsConfig)
		if to == e {
			w.until.Store(c.own.until.Load()) // or each probe would find it out anew
		}
		return w
	}
	c.dial = forProbe(c.registered(dial))
	c.dialTLS = handshaking(c.dial, tlsConfig)
}

// newWay returns connections to e.
func (c *conns) newWay(cfg *config, work *gate, dial dialFunc, e endpoint, tlsConfig *tls.Config) *way {
	w := &way{at: e}
	run := func(f func()) bool {
		if !work.enter() {
			return false
		}
		go func() {
			defer work.leave()
			defer func() {
				if v := recover(); v != nil {
					c.panics.caught("the dialer, or a request's body", v)
				}
			}()
			f()
		}()
		return true
	}
	open := c.opening(dial, cfg.timeouts, e, tlsConfig)
	protocols := tlsConfig.NextProtos
	if len(protocols) == 0 {
		protocols = []string{"h2", "http/1.1"}
	}
	if e.scheme != "h2c" {
		w.first = h1.New(h1.Config{
			Dial: func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
				return open(ctx, count, "http/1.1")
			},
			Go: run, Opened: c.all.add, Closed: c.all.remove,
			MaxIdle: cfg.connections.MaxIdle, IdleTimeout: cfg.connections.IdleTimeout, MaxAge: cfg.connections.MaxAge,
			HeaderTimeout: cfg.timeouts.ResponseHeader, ContinueTimeout: DefaultExpectContinueTimeout,
			MaxHeaderBytes: DefaultMaxHeaderBytes,
		})
	}
	if e.scheme == "h2c" || e.scheme == "https" {
		w.second = h2.New(h2.Config{
			Dial: func(ctx context.Context) (net.Conn, error) { return openSecond(ctx, open, e.scheme, protocols) },
			Go:   run, Opened: c.all.add, Closed: c.all.remove,
			IdleTimeout: cfg.connections.IdleTimeout, MaxAge: cfg.connections.MaxAge, SettingsTimeout: or(cfg.timeouts.TLSHandshake, settingsTimeout),
			HeaderTimeout: cfg.timeouts.ResponseHeader, ContinueTimeout: DefaultExpectContinueTimeout,
			MaxHeaderBytes: DefaultMaxHeaderBytes, PingAfter: pingAfter, PingTimeout: pingTimeout,
		})
	}
	w.fixed = !slices.Contains(protocols, "h2")
	return w
}

// clientConfig returns a copy of config to make connections with, which it has all to
// itself.
func clientConfig(config *tls.Config) *tls.Config {
	own := config.Clone()
	if own == nil {
		own = new(tls.Config)
	}
	if own.ClientSessionCache == nil {
		own.ClientSessionCache = tls.NewLRUClientSessionCache(tlsSessions)
	}
	return own
}

// openFunc opens a connection and passes it through count before a handshake, if there is
// one, which offers protocols.
type openFunc func(ctx context.Context, count func(net.Conn) net.Conn, protocols ...string) (net.Conn, error)

// handshakeError is what went wrong between dial and request.
type handshakeError struct{ error }

func (e handshakeError) Unwrap() error { return e.error }

// opening returns how connections to e are opened.
func (c *conns) opening(dial dialFunc, limits Timeouts, e endpoint, config *tls.Config) openFunc {
	network, addr := e.network(), e.addr()
	return func(ctx context.Context, count func(net.Conn) net.Conn, protocols ...string) (net.Conn, error) {
		nc, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		nc = count(nc)
		if e.scheme != "https" {
			return nc, nil
		}
		offer := config.Clone()
		offer.NextProtos = protocols
		tc, err := c.shakeHandsSafely(ctx, nc, offer, addr, limits)
		if err != nil {
			nc.Close()
			return nil, handshakeError{err}
		}
		return tc, nil
	}
}

// shakeHandsSafely is shakeHands for as long as the pool is there, with panics of the
// callbacks of config made errors.
func (c *conns) shakeHandsSafely(ctx context.Context, nc net.Conn, config *tls.Config, addr string, limits Timeouts) (tc *tls.Conn, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.all.ctx, cancel)()
	defer func() {
		if v := recover(); v != nil {
			c.panics.caught("a callback of the tls.Config", v)
			err = fmt.Errorf("callback of the tls.Config panicked: %v", v)
		}
	}()
	return shakeHands(ctx, nc, config, addr, limits)
}

// openSecond opens a connection for HTTP/2.
func openSecond(ctx context.Context, open openFunc, scheme string, protocols []string) (net.Conn, error) {
	nc, err := open(ctx, func(nc net.Conn) net.Conn { return nc }, protocols...)
	if err != nil || scheme == "h2c" {
		return nc, err
	}
	if nc.(*tls.Conn).ConnectionState().NegotiatedProtocol != "h2" {
		nc.Close()
		return nil, h2.ErrOther
	}
	return nc, nil
}

// abandonable returns dial, which may be code of the user's that does not heed its
// context, with an end to the wait for it: what it brings too late is closed.
func abandonable(dial dialFunc) dialFunc {
	type dialed struct {
		nc  net.Conn
		err error
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		got := make(chan dialed)
		go func() {
			nc, err := dial(ctx, network, addr)
			select {
			case got <- dialed{nc, err}:
			case <-ctx.Done():
				if err == nil && nc != nil {
					nc.Close()
				}
			}
		}()
		select {
		case d := <-got:
			return d.nc, d.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// connectStage is the stage of an attempt that got no connection because of err.
func connectStage(err error) Stage {
	if errors.Is(err, h1.ErrRequest) {
		return StageRequest // which was not even tried
	}
	if _, ok := errors.AsType[handshakeError](err); ok || errors.Is(err, h2.ErrProtocol) {
		return StageTLS
	}
	return StageDial
}

// retire closes what is idle now, and what becomes idle later.
func (w *way) retire() {
	if w.first != nil {
		w.first.Retire()
	}
	if w.second != nil {
		w.second.Retire()
	}
}

func (w *way) closeIdle() {
	if w.first != nil {
		w.first.CloseIdle()
	}
	if w.second != nil {
		w.second.CloseIdle()
	}
}

// stats counts the connections.
func (w *way) stats() ConnectionStats {
	var s ConnectionStats
	if w.first != nil {
		first := w.first.Stats()
		s = ConnectionStats{
			Open: first.Open, Idle: first.Idle, Opened: first.Opened,
			ClosedIdle: first.Closed[h1.ReasonIdle], ClosedByBackend: first.Closed[h1.ReasonLeft], ClosedFailed: first.Closed[h1.ReasonFailed],
			ClosedOther: first.Closed[h1.ReasonAnswer] + first.Closed[h1.ReasonAsked],
		}
	}
	if w.second != nil {
		second := w.second.Stats()
		s.Open += second.Open
		s.Idle += second.Idle
		s.Opened += second.Opened
		s.ClosedIdle += second.Idled
		s.ClosedByBackend += second.Left
		s.ClosedFailed += second.Failed
		s.ClosedOther += second.Closed - second.Idled - second.Left - second.Failed
	}
	return s
}

// registered returns dial with its connections known to the pool, which closes them when
// it is closed.
func (c *conns) registered(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		known := &knownConn{Conn: nc, all: c.all}
		if !c.all.add(known) {
			nc.Close()
			return nil, ErrClosed
		}
		return known, nil
	}
}

// knownConn is a connection that the pool knows of.
type knownConn struct {
	net.Conn
	all *connSet
}

func (c *knownConn) Close() error {
	c.all.remove(c)
	return c.Conn.Close()
}

// probeOwn sends r over a connection of its own to e.
func (c *conns) probeOwn(e endpoint, r *http.Request) (*http.Response, error) {
	ctx := r.Context()
	if probe, ok := ctx.Value(probeKey{}).(context.Context); ok {
		bounded, cancel := context.WithCancel(ctx)
		context.AfterFunc(probe, cancel) // and no sooner: what is read of the answer needs it
		ctx = bounded
	}
	out := r.WithContext(ctx)
	out.Close = true
	w := c.probeWay(e)
	resp, err := w.roundTrip(new(trip), out, r, httptrace.ContextClientTrace(r.Context()), noHints{})
	if w.at == c.own.at {
		c.own.until.Store(w.until.Load()) // for the next probe, and for requests
	}
	w.retire()
	return resp, err
}

// noHints hears of what nobody wants to know.
type noHints struct{}

func (noHints) Informational(int, textproto.MIMEHeader) error { return nil }
