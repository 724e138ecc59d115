package lbtest

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
)

// conn is a connection of a backend; it is in the backend's set until closed.
type conn struct {
	net.Conn
	backend  *Backend
	number   int         // set before it is served
	requests int         // guarded by the backend's lock
	idle     atomic.Bool // between two requests; net/http sets it, Read clears it
	ahead    atomic.Bool // a further request began to arrive during the last one
	aborted  atomic.Bool // the backend, not the client, ended it; never cleared
}

// Read ends the connection if this is the start of a further request and the
// backend closes reused connections.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	// While a handler runs, net/http reads a single byte to notice that the
	// client leaves; nothing else in it reads so little. A byte that it finds
	// must not close the connection under the answer: connState does it after.
	if n > 0 && len(p) == 1 {
		c.ahead.Store(true)
	}
	if n > 0 && c.idle.Swap(false) && c.backend.closesReused() {
		c.abort()
		return 0, io.EOF // net/http answers most other errors
	}
	return n, err
}

// Close takes c out of the set and closes it.
func (c *conn) Close() error {
	c.backend.mu.Lock()
	delete(c.backend.conns, c)
	c.backend.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite lets net/http end a connection without a reset, as it does with
// a *net.TCPConn.
func (c *conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// abort closes c on behalf of the backend.
func (c *conn) abort() {
	c.aborted.Store(true)
	_ = c.Close() // whoever closed it first has the error
}

// end ends c the way behavior ends connections.
func (c *conn) end(behavior Behavior) {
	if behavior.kind == refuses {
		c.reset()
		return
	}
	c.abort()
}

// reset aborts c so that the client sees a TCP reset.
func (c *conn) reset() {
	if l, ok := c.Conn.(interface{ SetLinger(int) error }); ok {
		_ = l.SetLinger(0) // fails only if the client or Close was faster
	}
	c.abort()
}

// flushed waits until the client has taken what was written, where the
// network can tell: a reset must not overtake it.
func (c *conn) flushed() {
	if w, ok := c.Conn.(interface{ WaitRead() }); ok {
		w.WaitRead()
	}
}

// connKey is the context key of a request's *conn.
type connKey struct{}

// accept serves the connections of l until l is closed.
func (b *Backend) accept(l net.Listener) {
	b.mu.Lock()
	b.listener = l
	b.mu.Unlock()
	b.running.Go(func() {
		// It returns when l is closed, always with an error.
		_ = b.server.Serve(&listener{Listener: l, backend: b})
	})
}

// listener wraps what it accepts in a conn.
type listener struct {
	net.Listener
	backend *Backend
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: nc, backend: l.backend}
		if l.backend.admit(c) {
			return c, nil
		}
		c.reset()
	}
}

// admit counts c in, or reports that it came too late. The accepting loop
// calls it, so running is not zero and may be added to.
func (b *Backend) admit(c *conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.behavior.kind == refuses {
		return false
	}
	b.lastConn++
	c.number = b.lastConn
	b.conns[c] = struct{}{}
	b.running.Add(1)
	return true
}

// connState is called by net/http in the goroutine of the connection.
func (b *Backend) connState(nc net.Conn, state http.ConnState) {
	c := nc.(*conn)
	switch state {
	case http.StateIdle:
		c.idle.Store(true)
		if c.ahead.Swap(false) && b.closesReused() {
			c.abort()
		}
	case http.StateClosed, http.StateHijacked:
		b.running.Done()
	}
}

func (b *Backend) closesReused() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.behavior.kind == closesReused
}

func (b *Backend) connsLocked() []*conn {
	open := make([]*conn, 0, len(b.conns))
	for c := range b.conns {
		open = append(open, c)
	}
	return open
}
