package lb

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Connections says how long the pool's own connections to a backend are kept between
// requests. The zero value means the defaults. It has no effect on WithTransport and
// Target.Transport.
//
// A backend's own limit counts too: what it says in Keep-Alive, and what the ages show at
// which its idle connections end. A connection that the backend has left is not used.
type Connections struct {
	// MaxIdle is how many connections to a backend may be idle for longer than a second;
	// those of HTTP/2 do not count. Zero means DefaultMaxIdleConns; below zero is an
	// error.
	MaxIdle int
	// IdleTimeout is how long an idle connection is kept. Zero means
	// DefaultIdleConnTimeout; a negative value keeps it for as long as the backend does.
	IdleTimeout time.Duration
	// MaxAge is how old a connection may be to get another request, less up to a tenth
	// of that, so that not all end at once. Set it where a target's host is a name whose
	// addresses change: a name is looked up when a connection is opened. Zero, the
	// default, means no limit; a negative value is an error.
	MaxAge time.Duration
}

func (n *Connections) fill(c *config) {
	if n.MaxIdle < 0 {
		c.faultf("Connections.MaxIdle is %d: want 1 or more, or 0 for %d", n.MaxIdle, DefaultMaxIdleConns)
	}
	if n.MaxAge < 0 {
		c.faultf("Connections.MaxAge is %v: want more than zero, or 0 for no limit", n.MaxAge)
	}
	n.MaxIdle = or(n.MaxIdle, DefaultMaxIdleConns)
	n.IdleTimeout = timeoutOr(n.IdleTimeout, DefaultIdleConnTimeout)
}

// conns is how one backend is reached: over connections of our own, a transport of its
// own whose connections are counted, or whatever the user has given. One transport per
// backend, because CloseIdleConnections of a shared one would close everybody's.
type conns struct {
	own      *way                // nil over a transport
	probeWay func(endpoint) *way // fresh connections of our own, for a probe; nil over a transport
	plain    http.RoundTripper   // nil over connections of our own
	upgrade  http.RoundTripper   // for upgrades and gRPC: no header time-out
	probe    http.RoundTripper   // for probes: a fresh connection each
	dial     dialFunc            // of a connection for a probe; nil if connections are not ours
	dialTLS  dialFunc            // the same with a handshake
	handler  *handlerTransport   // in place of all of these; nil for a URL
	raw      bool                // the path of a URL can be given as it is to be written
	owned    bool                // the connections are ours
	patience time.Duration       // for a backend's 100 Continue
	all      *connSet
	panics   *panics
}

// newConns returns the connections to e, which join all. transport is nil for those of
// our own.
func newConns(all *connSet, e endpoint, transport http.RoundTripper, cfg *config, work *gate, panics *panics) *conns {
	c := &conns{all: all, panics: panics}
	switch t := transport.(type) {
	case nil:
		c.hold(e, cfg, work)
	case *http.Transport:
		c.adopt(t.Clone(), e, cfg)
	default:
		c.plain, c.upgrade, c.probe = t, t, t
	}
	return c
}

// dialProbe opens a connection for a probe of e.
func (c *conns) dialProbe(ctx context.Context, e *endpoint) (net.Conn, error) {
	switch {
	case c.dial == nil:
		return nil, fmt.Errorf("lb: no dial over a transport of the user's: %w", errors.ErrUnsupported)
	case e.scheme == "https":
		return c.dialTLS(ctx, e.network(), e.addr())
	}
	return c.dial(ctx, e.network(), e.addr())
}

// closeIdle closes what is idle now, and what becomes idle before the next
// request asks for a connection.
func (c *conns) closeIdle() {
	if c.own != nil {
		c.own.closeIdle()
		return
	}
	type idleCloser interface{ CloseIdleConnections() }
	for _, rt := range [...]http.RoundTripper{c.plain, c.upgrade} {
		if t, ok := rt.(idleCloser); ok && c.owned {
			t.CloseIdleConnections()
		}
	}
}

// retire closes what is idle now or becomes idle later: the backend has left its pool.
func (c *conns) retire() {
	if c.own != nil {
		c.own.retire()
		return
	}
	c.closeIdle()
}

type dialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

func withTimeout(dial dialFunc, limits Timeouts) dialFunc {
	if limits.Dial <= 0 {
		return dial
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, limits.Dial)
		defer cancel()
		return dial(ctx, network, addr)
	}
}

// bounded returns dial with what holds for all dials: it takes at most as long as limits
// say, ends with the pool, and neither panics nor returns nothing.
func (c *conns) bounded(dial dialFunc, limits Timeouts) dialFunc {
	dial = c.safely(withTimeout(dial, limits))
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(c.all.ctx, cancel)()
		nc, err := dial(ctx, network, addr)
		if err == nil && nc == nil {
			err = errNoConn
		}
		return nc, err
	}
}

// safely returns dial with panics, which would end the program, made errors.
func (c *conns) safely(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (nc net.Conn, err error) {
		defer func() {
			if v := recover(); v != nil {
				c.panics.caught("the dialer", v)
				nc, err = nil, fmt.Errorf("dial panicked: %v", v)
			}
		}()
		return dial(ctx, network, addr)
	}
}

// handshaking returns dial followed by a handshake as net/http makes it.
func handshaking(dial dialFunc, config *tls.Config) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		tc, err := shakeHands(ctx, nc, config, addr, Timeouts{})
		if err != nil {
			nc.Close()
			return nil, err
		}
		return tc, nil
	}
}

// shakeHands makes of nc, which leads to addr, a connection over TLS.
func shakeHands(ctx context.Context, nc net.Conn, config *tls.Config, addr string, limits Timeouts) (*tls.Conn, error) {
	own := config.Clone()
	if own == nil {
		own = new(tls.Config)
	}
	if own.ServerName == "" {
		own.ServerName, _, _ = net.SplitHostPort(addr)
	}
	if limits.TLSHandshake > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limits.TLSHandshake)
		defer cancel()
	}
	tc := tls.Client(nc, own)
	return tc, tc.HandshakeContext(ctx)
}

// probeKey finds the context of the probe in the context of its dial.
type probeKey struct{}

// forProbe returns dial for connections that end with the probe that asked for them.
// net/http goes on with a dial, and with a handshake, whose request has ended.
func forProbe(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		probe, ok := ctx.Value(probeKey{}).(context.Context)
		if !ok {
			return dial(ctx, network, addr)
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(probe, cancel)()
		nc, err := dial(ctx, network, addr)
		if err == nil {
			context.AfterFunc(probe, func() { nc.Close() })
		}
		return nc, err
	}
}

// connSet is all connections of a pool, those of backends that left it included,
// so that closing the pool ends them.
type connSet struct {
	ctx  context.Context // ends with close; dials watch it
	stop context.CancelFunc

	mu     sync.Mutex // guards the following
	open   map[io.Closer]struct{}
	closed bool
}

func newConnSet() *connSet {
	s := &connSet{open: make(map[io.Closer]struct{})}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s
}

func (s *connSet) add(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.open[c] = struct{}{}
	return true
}

func (s *connSet) remove(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
}

// close ends every connection with whatever is on it, and every dial.
func (s *connSet) close() {
	s.stop()
	s.mu.Lock()
	s.closed = true
	open := slices.Collect(maps.Keys(s.open))
	s.mu.Unlock()
	for _, c := range open {
		c.Close()
	}
}
