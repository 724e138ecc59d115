package lb

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// conns is how one backend is reached: a transport of its own, whose connections
// are counted. One transport per backend, because CloseIdleConnections of a
// shared one would close everybody's.
type conns struct {
	plain    http.RoundTripper
	upgrade  http.RoundTripper // for requests that ask for an upgrade: no header time-out
	probe    http.RoundTripper // for probes: a fresh connection each
	dial     dialFunc          // of a connection for a probe; nil if connections are not ours
	dialTLS  dialFunc          // the same with a handshake
	handler  *handlerTransport // in place of all of these; nil for a URL
	raw      bool              // the path of a URL can be given as it is to be written
	owned    bool              // the transports and their connections are ours
	patience time.Duration     // for a backend's 100 Continue
	all      *connSet
	panics   *panics
}

// newConns returns the connections to e, which join all.
func newConns(all *connSet, e endpoint, transport http.RoundTripper, cfg *config, panics *panics) *conns {
	c := &conns{all: all, panics: panics}
	switch t := transport.(type) {
	case nil:
		c.adopt(defaultTransport(), e, cfg)
	case *http.Transport:
		c.adopt(t.Clone(), e, cfg)
	default:
		c.plain, c.upgrade, c.probe = t, t, t
	}
	return c
}

func defaultTransport() *http.Transport {
	return &http.Transport{
		MaxIdleConnsPerHost: DefaultMaxIdleConns,
		IdleConnTimeout:     DefaultIdleConnTimeout,
		ForceAttemptHTTP2:   false,
	}
}

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
	dial, dialTLS := dialersOf(t)
	t.DialContext = c.counted(withTimeout(dial, limits), e.scheme == "https")
	if dialTLS != nil {
		t.DialTLSContext = c.counted(withTimeout(dialTLS, limits), false)
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

// handshaking returns dial followed by a handshake as net/http makes it.
func handshaking(dial dialFunc, config *tls.Config) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		own := config.Clone()
		if own == nil {
			own = new(tls.Config)
		}
		if own.ServerName == "" {
			own.ServerName, _, _ = net.SplitHostPort(addr) // which net/http's dial has put together
		}
		tc := tls.Client(nc, own)
		if err := tc.HandshakeContext(ctx); err != nil {
			nc.Close()
			return nil, err
		}
		return tc, nil
	}
}

// dialProbe opens a connection for a probe of e.
func (c *conns) dialProbe(ctx context.Context, e *endpoint) (net.Conn, error) {
	switch {
	case c.dial == nil:
		return nil, fmt.Errorf("lb: no dial over a transport of the user's: %w", errors.ErrUnsupported)
	case e.scheme == "https":
		return c.dialTLS(ctx, "tcp", e.addr())
	}
	return c.dial(ctx, "tcp", e.addr())
}

// dialersOf returns how t dials, dialTLS nil if it leaves the handshake to
// net/http, and takes the older fields away, which would have their way beside
// DialContext.
func dialersOf(t *http.Transport) (dial, dialTLS dialFunc) {
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
		dial = new(net.Dialer).DialContext
	}
	return dial, dialTLS
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

// counted returns dial with its connections counted and known, and its result
// told to the attempt that asked for it. The dial ends when the pool is closed.
func (c *conns) counted(dial dialFunc, overTLS bool) dialFunc {
	dial = c.safely(dial)
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		a, _ := ctx.Value(attemptKey{}).(*attempt)
		if a != nil && !a.mayDial() {
			return nil, errResend
		}
		dialCtx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(c.all.ctx, cancel)()
		nc, err := dial(dialCtx, network, addr)
		if err == nil && nc == nil {
			err = errNoConn
		}
		if a != nil {
			a.dialEnded(err)
		}
		if err != nil {
			return nil, err
		}
		cc := &countedConn{Conn: nc, all: c.all, overTLS: overTLS, alive: aliveCheck(nc)}
		if !c.all.add(cc) {
			nc.Close()
			return nil, ErrClosed
		}
		return cc, nil
	}
}

// closeIdle closes what is idle now, and what becomes idle before the next
// request asks for a connection.
func (c *conns) closeIdle() {
	type idleCloser interface{ CloseIdleConnections() }
	for _, rt := range [...]http.RoundTripper{c.plain, c.upgrade} {
		if t, ok := rt.(idleCloser); ok && c.owned {
			t.CloseIdleConnections()
		}
	}
}

// connSet is all connections of a pool, those of backends that left it included,
// so that closing the pool ends them.
type connSet struct {
	ctx  context.Context // ends with close; dials watch it
	stop context.CancelFunc

	mu     sync.Mutex // guards the following
	open   map[*countedConn]struct{}
	closed bool
}

func newConnSet() *connSet {
	s := &connSet{open: make(map[*countedConn]struct{})}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s
}

func (s *connSet) add(c *countedConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.open[c] = struct{}{}
	return true
}

func (s *connSet) remove(c *countedConn) {
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
	owner          atomic.Pointer[attempt]
}

// own makes a the attempt that is told about the end of the connection. look asks
// for a look at the socket before it is written to: the connection has been idle, so
// its peer may have left.
func (c *countedConn) own(a *attempt, look bool) {
	if old := c.owner.Swap(a); old != nil && old != a {
		old.passedOn() // its answer is still being told about
	}
	if look && c.alive != nil {
		c.check.Store(true)
	}
	if c.closed.Load() || c.cut.Load() { // it may have ended before the line above
		a.connEnded()
	}
}

// disown undoes own, unless another attempt has the connection already.
func (c *countedConn) disown(a *attempt) { c.owner.CompareAndSwap(a, nil) }

// failed notes that a read or a write failed.
func (c *countedConn) failed() {
	if !c.closed.Load() {
		c.cut.Store(true)
	}
	c.ended()
}

func (c *countedConn) ended() {
	if a := c.owner.Load(); a != nil {
		a.connEnded()
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
	if !c.overTLS || carriesRequest(p) {
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

// carriesRequest tells whether a TLS record that is written after the handshake
// can hold a part of a request. crypto/tls writes one record at a time. An alert,
// such as the one that closes the connection, must not be taken for a request:
// TLS 1.2 shows its type in the first byte; TLS 1.3 shows every record as
// application data (23), but an alert or a key update is at most 27 bytes long,
// and the record with the head of a request at least 48.
func carriesRequest(record []byte) bool {
	const applicationData, longestOther = 23, 32
	return len(record) > longestOther && record[0] == applicationData
}

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
