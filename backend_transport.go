package lb

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync/atomic"

	"example.com/lb/internal/h1"
)

// adopt makes t the transport of this backend alone.
func (c *conns) adopt(t *http.Transport, e endpoint, cfg *config) {
	c.owned = true
	c.raw = t.Proxy == nil // to which the URL goes as a whole
	limits := cfg.timeouts
	// HTTP/2 connections of a pooled transport are shared by requests, resend by
	// themselves and cannot tell what was sent: HTTP/1.1 only.
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	t.TLSNextProto = nil
	if e.tls != nil {
		t.TLSClientConfig = e.tls.Clone()
	}
	if t.TLSClientConfig != nil { // net/http has offered HTTP/2 in there; it is a copy
		t.TLSClientConfig.NextProtos = nil
	}
	t.DisableCompression = true // or answers would be unpacked that the client wants as they are
	if t.TLSHandshakeTimeout == 0 {
		t.TLSHandshakeTimeout = limits.TLSHandshake
	}
	if t.ResponseHeaderTimeout == 0 {
		t.ResponseHeaderTimeout = limits.ResponseHeader
	}
	if t.ExpectContinueTimeout == 0 {
		t.ExpectContinueTimeout = DefaultExpectContinueTimeout
	}
	c.patience = t.ExpectContinueTimeout
	if t.MaxIdleConnsPerHost == 0 {
		t.MaxIdleConnsPerHost = DefaultMaxIdleConns
	}
	dial, dialTLS := dialersOf(t, cfg.dialer)
	if e.socket != "" {
		dial = dialSocket(dial, e.socket)
	}
	t.DialContext = c.counted(c.bounded(dial, limits), e.scheme == "https")
	if dialTLS != nil {
		t.DialTLSContext = c.counted(c.bounded(dialTLS, limits), false)
	}
	long := t.Clone()
	long.ResponseHeaderTimeout = 0
	c.plain, c.upgrade = t, long
	if cfg.check != nil {
		c.adoptProbes(long.Clone())
	}
}

// adoptProbes makes the connections for probes like those of t, but each for one
// probe alone, which has its own time-out.
func (c *conns) adoptProbes(t *http.Transport) {
	t.DisableKeepAlives = true
	t.MaxConnsPerHost = 0
	t.DialContext = forProbe(t.DialContext)
	if t.DialTLSContext != nil {
		t.DialTLSContext = forProbe(t.DialTLSContext)
	}
	c.probe = t
	c.dial, c.dialTLS = t.DialContext, t.DialTLSContext
	if c.dialTLS == nil {
		c.dialTLS = handshaking(c.dial, t.TLSClientConfig)
	}
}

// dialSocket returns dial for a socket, whatever address net/http thinks of.
func dialSocket(dial dialFunc, socket string) dialFunc {
	return func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, "unix", socket) }
}

// dialersOf returns how t dials, as otherwise does if it does not say, dialTLS nil if it leaves the handshake to
// net/http, and takes the older fields away, which would have their way beside
// DialContext.
func dialersOf(t *http.Transport, otherwise dialFunc) (dial, dialTLS dialFunc) {
	dial, dialTLS = t.DialContext, t.DialTLSContext
	older := func(f func(network, addr string) (net.Conn, error)) dialFunc {
		return func(_ context.Context, network, addr string) (net.Conn, error) { return f(network, addr) }
	}
	//lint:ignore SA1019 a template may still use the older fields
	if f := t.Dial; dial == nil && f != nil {
		dial = older(f)
	}
	//lint:ignore SA1019 a template may still use the older fields
	if f := t.DialTLS; dialTLS == nil && f != nil {
		dialTLS = older(f)
	}
	//lint:ignore SA1019 a template may still use the older fields
	t.Dial, t.DialTLS = nil, nil
	if dial == nil {
		dial = otherwise
	}
	return dial, dialTLS
}

// counted returns dial, which is bounded, with its connections counted and known, and
// its result told to the attempt that asked for it.
func (c *conns) counted(dial dialFunc, overTLS bool) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		a, _ := ctx.Value(attemptKey{}).(*attempt)
		if a != nil && !a.pooled.mayDial() {
			return nil, errResend
		}
		nc, err := dial(ctx, network, addr)
		if a != nil {
			a.pooled.dialEnded(err)
		}
		if err != nil {
			return nil, err
		}
		cc := &countedConn{Conn: nc, all: c.all, overTLS: overTLS, alive: h1.Looker(nc)}
		if !c.all.add(cc) {
			nc.Close()
			return nil, ErrClosed
		}
		return cc, nil
	}
}

// countedConn is a connection to a backend that counts its bytes and tells the
// attempt that has it when it is over. HTTP/1.1 connections carry one request at
// a time, so what is counted between two attempts' begins belongs to the first.
type countedConn struct {
	net.Conn
	all     *connSet
	overTLS bool
	alive   func() bool // nil where it cannot be known without reading
	check   atomic.Bool // ask alive before the next write

	sent, received atomic.Int64
	closed         atomic.Bool
	cut            atomic.Bool // a read or a write failed before it was closed
	owner          atomic.Pointer[pooled]
}

// own makes p's attempt the one that is told about the end of the connection. look asks
// for a look at the socket before it is written to: the connection has been idle, so
// its peer may have left.
func (c *countedConn) own(p *pooled, look bool) {
	if old := c.owner.Swap(p); old != nil && old != p {
		old.passedOn() // its answer is still being told about
	}
	if look && c.alive != nil {
		c.check.Store(true)
	}
	if c.closed.Load() || c.cut.Load() { // it may have ended before the line above
		p.attempt.connEnded()
	}
}

// disown undoes own, unless another attempt has the connection already.
func (c *countedConn) disown(p *pooled) { c.owner.CompareAndSwap(p, nil) }

// failed notes that a read or a write failed.
func (c *countedConn) failed() {
	if !c.closed.Load() {
		c.cut.Store(true)
	}
	c.ended()
}

func (c *countedConn) ended() {
	if p := c.owner.Load(); p != nil {
		p.attempt.connEnded()
	}
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.received.Add(int64(n))
	if err != nil {
		c.failed()
	}
	return n, err
}

func (c *countedConn) Write(p []byte) (int, error) {
	if c.check.Load() && c.check.Swap(false) && !c.alive() {
		c.failed()
		return 0, errStale
	}
	n, err := c.Conn.Write(p)
	if !c.overTLS || h1.CarriesRequest(p) {
		c.sent.Add(int64(n))
	}
	if err != nil {
		c.failed()
	}
	return n, err
}

func (c *countedConn) Close() error {
	c.closed.Store(true)
	c.all.remove(c)
	err := c.Conn.Close()
	c.ended()
	return err
}

// CloseWrite passes on the half-close of an upgraded connection.
func (c *countedConn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// NetConn returns the connection beneath, as tls.Conn does.
func (c *countedConn) NetConn() net.Conn { return c.Conn }

// countedIn finds the counted connection beneath c, through TLS.
func countedIn(c net.Conn) *countedConn {
	switch c := c.(type) {
	case *countedConn:
		return c
	case *tls.Conn:
		cc, _ := c.NetConn().(*countedConn)
		return cc
	}
	return nil
}
