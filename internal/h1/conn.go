package h1

import (
	"bufio"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"time"
)

// conn is one connection. At any time it is idle, or one exchange has it.
type conn struct {
	net.Conn // to read from and write to
	pool     *Pool
	wire     *wire         // beneath, where bytes are counted
	look     func() bool   // tells whether the peer is there and quiet; nil: watched instead
	born     time.Time     // when it was opened
	retire   time.Duration // after that it takes no new request; zero: never
	used     bool          // has carried a request
	untimed  bool          // knows no deadlines: nobody can tell in time whether its peer is there

	since   time.Time     // idle since then
	watched chan struct{} // closed when the watcher has ended; nil without one
	left    atomic.Bool   // the watcher has seen the peer leave, or speak

	closed atomic.Bool
	// The following belongs to the exchange.
	room    int64 // bytes that may still be read; for heads
	readErr error // what ended reading
}

// wire counts the bytes of a connection.
type wire struct {
	net.Conn
	sent, received atomic.Int64
	// secret tells that what is written are records of TLS, not all of which carry a
	// request. Once one has (begun), those after it are counted too: the end of a body can
	// be shorter than an alert.
	secret bool
	begun  atomic.Bool
}

func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	w.received.Add(int64(n))
	return n, err
}

func (w *wire) Write(p []byte) (int, error) {
	n, err := w.Conn.Write(p)
	if !w.secret || w.begun.Load() || CarriesRequest(p) {
		w.sent.Add(int64(n))
		w.begun.Store(true)
	}
	return n, err
}

// NetConn returns the connection beneath.
func (w *wire) NetConn() net.Conn { return w.Conn }

// CarriesRequest tells whether a TLS record that is written after the handshake can
// hold a part of a request. crypto/tls writes one record at a time. An alert, such as
// the one that closes the connection, must not be taken for a request: TLS 1.2 shows its
// type in the first byte; TLS 1.3 shows every record as application data (23), but an
// alert or a key update is at most 27 bytes long, and the record with the head of a
// request at least 48.
func CarriesRequest(record []byte) bool {
	const applicationData, longestOther = 23, 32
	return len(record) > longestOther && record[0] == applicationData
}

// dial opens a connection for x.
func (p *Pool) dial(x *Exchange) (*conn, error) {
	c := &conn{pool: p, born: time.Now()}
	nc, err := p.cfg.Dial(x.ctx, func(nc net.Conn) net.Conn {
		c.wire = &wire{Conn: nc}
		return c.wire
	})
	if err != nil {
		return nil, err
	}
	c.Conn = nc
	c.wire.secret = nc != net.Conn(c.wire)
	c.look = Looker(c.wire.Conn)
	c.untimed = nc.SetReadDeadline(time.Time{}) != nil
	if age := p.cfg.MaxAge; age > 0 {
		c.retire = age - rand.N(age/10+1) // or all that were opened together end together
	}
	if !p.cfg.Opened(c) {
		nc.Close()
		return nil, ErrClosed
	}
	p.open.Add(1)
	p.opened.Add(1)
	return c, nil
}

// Close ends the connection with what is on it.
func (c *conn) Close() error {
	c.close(ReasonAsked)
	return nil
}

// close ends the connection because of why. Calls after the first do nothing.
func (c *conn) close(why Reason) {
	if !c.closed.CompareAndSwap(false, true) {
		return
	}
	c.pool.cfg.Closed(c)
	c.pool.open.Add(-1)
	c.pool.ended[why].Add(1)
	if why == ReasonFailed || why == ReasonAsked {
		c.wire.Close() // or TLS would wait to say that this is the end, to a peer that may not listen
	}
	c.Conn.Close()
}

// Read reads what the peer says, as far as there is room.
func (c *conn) Read(p []byte) (int, error) {
	if c.room <= 0 {
		c.readErr = ErrHeadTooLarge
		return 0, ErrHeadTooLarge
	}
	n, err := c.Conn.Read(p[:min(int64(len(p)), c.room)])
	c.room -= int64(n)
	if err != nil {
		c.readErr = err
	}
	return n, err
}

var past = time.Unix(1, 0)

// watch begins to read, of a connection that cannot be looked at: a peer that leaves is
// noticed at once. It ends with alive. It tells whether c can be left idle.
func (c *conn) watch() bool {
	if c.look != nil {
		return true
	}
	c.watched = make(chan struct{})
	return c.pool.cfg.Go(func() {
		var b [1]byte
		_, err := c.Conn.Read(b[:])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			close(c.watched)
			return
		}
		c.left.Store(true)
		close(c.watched)
		if c.pool.remove(c) && !c.closed.Load() {
			c.pool.found(c, time.Now())
		}
	})
}

// alive tells whether a connection that was idle can be used. It ends the watching.
func (c *conn) alive() bool {
	switch {
	case c.closed.Load():
		return false
	case c.look != nil && !c.wire.secret:
		return c.look()
	case c.SetReadDeadline(past) != nil:
		return false
	case c.look == nil:
		<-c.watched
		return !c.left.Load() && c.SetReadDeadline(time.Time{}) == nil
	}
	// What TLS has read of the socket already is not there to be seen.
	var b [1]byte
	n, err := c.Conn.Read(b[:])
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded) && c.SetReadDeadline(time.Time{}) == nil && c.look()
}

// peerThere tells, of an idle connection, whether its peer is there and quiet.
func (c *conn) peerThere() bool {
	if c.look != nil {
		return c.look()
	}
	return !c.left.Load()
}

// tunnel is a connection after a 101: what is left of it, in both directions.
type tunnel struct {
	x  *Exchange
	c  *conn
	br *bufio.Reader
}

func (t *tunnel) Read(p []byte) (int, error)  { return t.br.Read(p) }
func (t *tunnel) Write(p []byte) (int, error) { return t.c.Write(p) }

// Close ends both directions.
func (t *tunnel) Close() error {
	t.x.drop(ReasonAnswer)
	return nil
}

// CloseWrite ends the direction to the peer.
func (t *tunnel) CloseWrite() error {
	if cw, ok := t.c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// NetConn returns the connection beneath.
func (t *tunnel) NetConn() net.Conn { return t.c.Conn }

// CloseWrite passes on the half-close of a connection that carries no TLS.
func (w *wire) CloseWrite() error {
	if cw, ok := w.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}
