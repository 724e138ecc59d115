package memnet

import (
	"net"
	"net/netip"
	"sync"
)

// listener is what Listen returns. It ends with Close, which also frees its
// address. All methods may be called concurrently.
type listener struct {
	network *Network
	at      netip.AddrPort

	mu      sync.Mutex // guards the following
	arrived sync.Cond  // signalled when queue grows and on Close
	queue   []*Conn    // connected but not accepted yet, at most acceptBacklog
	room    chan struct{}
	closed  bool
}

// Accept waits for the next connection, which is a *Conn.
func (l *listener) Accept() (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) == 0 && !l.closed {
		l.arrived.Wait()
	}
	if l.closed {
		return nil, l.opError("accept", net.ErrClosed)
	}
	c := l.queue[0]
	l.queue[0] = nil // the slice keeps its array
	l.queue = l.queue[1:]
	l.admitLocked()
	return c, nil
}

// Close stops listening. Connections that were not accepted are reset, and
// dials that wait for room are refused.
func (l *listener) Close() error {
	l.network.remove(l)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return l.opError("close", net.ErrClosed)
	}
	l.closed = true
	left := l.queue
	l.queue = nil
	l.arrived.Broadcast()
	l.admitLocked()
	l.mu.Unlock()
	for _, c := range left {
		c.Reset()
	}
	return nil
}

// Addr returns the address listened on, a *net.TCPAddr.
func (l *listener) Addr() net.Addr {
	return net.TCPAddrFromAddrPort(l.at)
}

// enqueue hands c to Accept. If the backlog is full it returns a channel that
// is closed when it is worth another try, if l is closed it returns nil.
func (l *listener) enqueue(c *Conn) (retry <-chan struct{}, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, false
	}
	if len(l.queue) < acceptBacklog {
		l.queue = append(l.queue, c)
		l.arrived.Signal()
		return nil, true
	}
	if l.room == nil {
		l.room = make(chan struct{})
	}
	return l.room, false
}

// admitLocked lets the dials try again that found the backlog full.
func (l *listener) admitLocked() {
	if l.room != nil {
		close(l.room)
		l.room = nil
	}
}

func (l *listener) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: "tcp", Addr: l.Addr(), Err: err}
}
