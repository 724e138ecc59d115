package h2

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// conn is one connection: net/http's, and what lies beneath it as net/http sees it.
type conn struct {
	net.Conn
	*http.ClientConn
	pool      *Pool
	born      time.Time
	retire    time.Duration // after that it gets no new stream; zero: never
	idleSince time.Time     // guarded by pool.mu; zero while it has a stream, or nobody has looked

	received atomic.Int64
	// mute is what was received when a request had waited in vain for an answer; more
	// than that shows that the server lives. Zero: no request has.
	mute atomic.Int64

	used      atomic.Bool   // it has carried a request
	heard     atomic.Bool   // something was received
	spoken    chan struct{} // closed when the first that was received has been read, or nothing will be
	spokeOnce sync.Once
	late      atomic.Bool // it took the server too long
	gone      atomic.Bool // it was closed
	why       atomic.Pointer[atomic.Int64]
}

// Read is for net/http's reader. When it comes back for more it has dealt with what it
// had.
func (c *conn) Read(p []byte) (int, error) {
	if c.heard.Load() {
		c.spokeOnce.Do(func() { close(c.spoken) })
	}
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.received.Add(int64(n))
		c.heard.Store(true)
	}
	if err == io.EOF {
		c.why.CompareAndSwap(nil, &c.pool.left)
	}
	return n, err
}

// Close ends the connection with what is on it. net/http calls it too.
func (c *conn) Close() error {
	if !c.gone.CompareAndSwap(false, true) {
		return nil
	}
	c.spokeOnce.Do(func() { close(c.spoken) })
	c.pool.cfg.Closed(c.handle())
	c.pool.open.Add(-1)
	c.pool.ended.Add(1)
	if why := c.why.Load(); why != nil {
		why.Add(1)
	} else {
		c.pool.failed.Add(1)
	}
	return c.Conn.Close()
}

// end closes a connection that has no stream, and counts it as count.
func (c *conn) end(count *atomic.Int64) {
	c.why.Store(count)
	c.ClientConn.Close()
}

// handle is c for who may close it from outside, without a word over TLS, which may take
// long.
func (c *conn) handle() io.Closer { return handle{c} }

type handle struct{ c *conn }

func (h handle) Close() error {
	h.c.why.Store(&h.c.pool.asked)
	if below, ok := h.c.Conn.(interface{ NetConn() net.Conn }); ok {
		below.NetConn().Close()
	}
	return h.c.Close()
}

// ConnectionState is that of TLS, for Response.TLS.
func (c *conn) ConnectionState() tls.ConnectionState {
	if tc, ok := c.Conn.(interface{ ConnectionState() tls.ConnectionState }); ok {
		return tc.ConnectionState()
	}
	return tls.ConnectionState{}
}

func (c *conn) tooOld(now time.Time) bool {
	return c.retire > 0 && now.Sub(c.born) >= c.retire
}

// usable tells whether c may get another stream, if it has one.
func (c *conn) usable(now time.Time) bool {
	if c.gone.Load() || c.tooOld(now) && c.used.Load() {
		return false
	}
	mute := c.mute.Load()
	return mute == 0 || c.received.Load() > mute
}

// doubt notes that a request waits for its answer in vain; before is what had been
// received when it was sent.
func (c *conn) doubt(before int64) {
	if c.received.Load() == before {
		c.mute.Store(before)
	}
}
