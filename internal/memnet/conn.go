package memnet

import (
	"bytes"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Conn is one end of a connection. DialContext and Accept return them in
// pairs; an end is over when it is closed or reset. All methods may be called
// concurrently, and concurrent writes do not mix their bytes.
//
// What an end does shows at its peer as TCP would show it:
//
//	this end                       the peer's Read           the peer's Write
//	CloseWrite                     what is left, then EOF    goes on
//	Close, all was read            what is left, then EOF    one is lost, then EPIPE
//	Close with data still unread   what is left, ECONNRESET  ECONNRESET
//	Reset, or SetLinger(0), Close  ECONNRESET                ECONNRESET
//
// A kernel may keep or drop what a reset overtakes. Close keeps it, as Linux
// does; Reset drops it, which is the worse case for a peer.
type Conn struct {
	local, remote *net.TCPAddr
	peer          *Conn

	mu            *sync.Mutex  // shared with peer; guards the following of both
	wake          sync.Cond    // broadcast when anything below may have changed
	received      bytes.Buffer // what the peer sent and Read has not taken
	ended         bool         // a FIN came: nothing follows what is in received
	reset         bool         // a RST came
	lost          bool         // a write went to a peer that had closed
	shut          bool         // CloseWrite was called
	closed        bool         // Close or Reset was called
	writing       bool         // a Write is under way; the next ones wait
	discard       bool         // SetLinger(0) was called
	readDeadline  deadline
	writeDeadline deadline
}

// deadline is one deadline of a Conn; the lock of the Conn guards it.
type deadline struct {
	timer   *time.Timer // nil if none is set or it is in the past
	expired bool
}

// newPair returns the two ends of a new connection.
func newPair(clientAddr, acceptedAddr *net.TCPAddr) (client, accepted *Conn) {
	mu := new(sync.Mutex)
	client = &Conn{local: clientAddr, remote: acceptedAddr, mu: mu}
	accepted = &Conn{local: acceptedAddr, remote: clientAddr, mu: mu}
	client.peer, accepted.peer = accepted, client
	client.wake.L, accepted.wake.L = mu, mu
	return client, accepted
}

// Read waits for data and takes what fits into p.
func (c *Conn) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, c.opError("read", net.ErrClosed)
		case c.readDeadline.expired:
			return 0, c.opError("read", os.ErrDeadlineExceeded)
		case len(p) == 0:
			return 0, nil
		case c.received.Len() > 0:
			n, _ := c.received.Read(p) // fails on an empty buffer only
			c.peer.wake.Broadcast()
			return n, nil
		case c.reset:
			return 0, c.opError("read", os.NewSyscallError("read", syscall.ECONNRESET))
		case c.ended:
			return 0, io.EOF
		}
		c.wake.Wait()
	}
}

// Write returns once all of p is buffered; the peer need not have read it.
func (c *Conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// A turn, not a second mutex: waiting for a mutex would keep the clock of
	// a synctest bubble from moving.
	for c.writing {
		if err := c.writeErrLocked(); err != nil {
			return 0, c.opError("write", err)
		}
		c.wake.Wait()
	}
	c.writing = true
	defer func() {
		c.writing = false
		c.wake.Broadcast()
	}()
	for written := 0; ; {
		if err := c.writeErrLocked(); err != nil {
			return written, c.opError("write", err)
		}
		if c.peer.closed && len(p) > 0 {
			// The kernel takes the first write after the peer has gone, and
			// learns from the peer's answer that nobody is there.
			c.lost = true
			return len(p), nil
		}
		n := min(len(p)-written, bufferBytes-c.peer.received.Len())
		if n > 0 {
			c.peer.received.Write(p[written : written+n]) // never fails
			c.peer.wake.Broadcast()
			written += n
		}
		if written == len(p) {
			return written, nil
		}
		c.wake.Wait()
	}
}

// writeErrLocked returns why nothing can be written, or nil.
func (c *Conn) writeErrLocked() error {
	switch {
	case c.closed:
		return net.ErrClosed
	case c.writeDeadline.expired:
		return os.ErrDeadlineExceeded
	case c.reset:
		return os.NewSyscallError("write", syscall.ECONNRESET)
	case c.shut || c.lost:
		return os.NewSyscallError("write", syscall.EPIPE)
	}
	return nil
}

// Close ends the connection in both directions and fails the calls that are
// waiting on this end. The table of Conn tells what the peer sees.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closeLocked(c.discard)
}

// Reset closes this end so that the peer's pending and later calls fail with
// ECONNRESET; what either end has not read yet is lost. On an end that is
// closed already it does nothing.
func (c *Conn) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.closeLocked(true) // already closed: nothing left to reset
}

func (c *Conn) closeLocked(discard bool) error {
	if c.closed {
		return c.opError("close", net.ErrClosed)
	}
	c.closed = true
	c.readDeadline.stopLocked()
	c.writeDeadline.stopLocked()
	switch {
	case discard:
		c.peer.reset = true
		c.peer.received = bytes.Buffer{}
	case c.received.Len() > 0:
		c.peer.reset = true
	default:
		c.peer.ended = true
	}
	c.received = bytes.Buffer{}
	c.wake.Broadcast()
	c.peer.wake.Broadcast()
	return nil
}

// CloseWrite sends the peer EOF after what was written so far. Reading goes
// on.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return c.opError("close", net.ErrClosed)
	case c.reset:
		return c.opError("close", os.NewSyscallError("shutdown", syscall.ENOTCONN))
	}
	c.shut = true
	c.peer.ended = true
	c.wake.Broadcast()
	c.peer.wake.Broadcast()
	return nil
}

// SetLinger with 0 makes Close behave as Reset; any other value undoes that.
// It is here for code that resets a *net.TCPConn this way.
func (c *Conn) SetLinger(sec int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return c.opError("set", net.ErrClosed)
	}
	c.discard = sec == 0
	return nil
}

// WaitRead waits until the peer has read all that was written to it, or until
// either end is over. A Reset after it cannot overtake data.
func (c *Conn) WaitRead() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.peer.received.Len() > 0 && !c.closed && !c.reset && !c.peer.closed {
		c.wake.Wait()
	}
}

// LocalAddr returns the address of this end, a *net.TCPAddr.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the address of the peer, a *net.TCPAddr.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline sets both deadlines. A deadline that has passed fails pending
// and later calls with os.ErrDeadlineExceeded; the zero time clears it.
func (c *Conn) SetDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.readDeadline, &c.writeDeadline)
}

// SetReadDeadline is SetDeadline for Read only.
func (c *Conn) SetReadDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.readDeadline)
}

// SetWriteDeadline is SetDeadline for Write only.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	return c.setDeadlines(t, &c.writeDeadline)
}

func (c *Conn) setDeadlines(t time.Time, deadlines ...*deadline) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return c.opError("set", net.ErrClosed)
	}
	for _, d := range deadlines {
		c.setDeadlineLocked(d, t)
	}
	return nil
}

func (c *Conn) setDeadlineLocked(d *deadline, t time.Time) {
	d.stopLocked()
	d.expired = false
	if t.IsZero() {
		return
	}
	wait := time.Until(t)
	if wait <= 0 {
		d.expired = true
		c.wake.Broadcast()
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(wait, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		// Stop may have come too late for a timer that was replaced.
		if d.timer == timer {
			d.expired = true
			c.wake.Broadcast()
		}
	})
	d.timer = timer
}

func (d *deadline) stopLocked() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

func (c *Conn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.local, Addr: c.remote, Err: err}
}
