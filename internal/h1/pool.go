// Package h1 sends requests over connections of its own to one HTTP/1.1 server, and
// knows at every moment what of a request has left. A request without a body runs on
// its caller's goroutine alone; one whose body streams has one more.
//
// Nothing is sent twice: what to do about a failure is the caller's affair.
package h1

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Config says how a Pool holds its connections. It does not change.
type Config struct {
	// Dial opens a connection. It passes what it has dialed through count, once, and
	// returns that or a *tls.Conn over it whose handshake is done.
	Dial func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error)
	// Go runs f on a goroutine, and tells whether it does.
	Go func(f func()) bool
	// Opened is told of each connection, and may refuse it; Closed, of its end. In
	// between the connection may be closed by who was told, with what is on it.
	Opened func(io.Closer) bool
	Closed func(io.Closer)

	MaxIdle         int           // connections that may stay idle; more only for a moment
	IdleTimeout     time.Duration // how long; zero: for ever
	MaxAge          time.Duration // after which a connection takes no new request; zero: none
	HeaderTimeout   time.Duration // for the answer's head, once the request is sent; zero: none
	ContinueTimeout time.Duration // for a 100 Continue, after which the body is sent anyway
	MaxHeaderBytes  int64         // of the heads of one answer, informational ones included
}

// Reason is why a connection was closed.
type Reason uint8

// The reasons.
const (
	ReasonAsked  Reason = iota // by who uses the pool, or the pool's end
	ReasonAnswer               // the answer or the request said that it is the last
	ReasonFailed               // something went wrong on it, or it was given up in the middle
	ReasonIdle                 // idle for too long, one of too many, or too old
	ReasonLeft                 // its peer closed it while it was idle
	reasons
)

// Stats counts a pool's connections.
type Stats struct {
	Open, Idle int64
	Opened     int64
	Closed     [reasons]int64
}

// Pool holds the connections to one server. New makes one; Retire ends it. All
// methods may be called concurrently.
type Pool struct {
	cfg Config

	mu      sync.Mutex // guards the following
	idle    []*conn    // the one that was used last is at the end
	tidier  *time.Timer
	limit   idleLimit
	retired bool

	open   atomic.Int64
	opened atomic.Int64
	ended  [reasons]atomic.Int64
}

// New returns a pool without connections.
func New(cfg Config) *Pool { return &Pool{cfg: cfg} }

// ErrClosed is the error when Config.Opened or Config.Go refuses.
var ErrClosed = errors.New("connections are closed")

// Stats returns the present counts.
func (p *Pool) Stats() Stats {
	var s Stats
	p.mu.Lock()
	s.Idle = int64(len(p.idle))
	p.mu.Unlock()
	s.Open, s.Opened = p.open.Load(), p.opened.Load()
	for i := range p.ended {
		s.Closed[i] = p.ended[i].Load()
	}
	return s
}

// Retire closes the connections that are idle, and from now on each that would become
// idle. What is under way goes on.
func (p *Pool) Retire() {
	p.mu.Lock()
	p.retired = true
	if p.tidier != nil {
		p.tidier.Stop()
	}
	p.mu.Unlock()
	p.CloseIdle()
}

// CloseIdle closes the connections that are idle now.
func (p *Pool) CloseIdle() {
	p.mu.Lock()
	idle := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, c := range idle {
		c.close(ReasonAsked)
	}
}

// get returns a connection for x: the idle one that was used last, if its peer has
// not left it, or a new one.
func (p *Pool) get(x *Exchange) (*conn, error) {
	for {
		now := time.Now()
		c, old := p.pop(now)
		switch {
		case c == nil:
			return p.dial(x)
		case c.closed.Load(): // by somebody else
		case old:
			c.close(ReasonIdle)
		case !c.alive():
			p.found(c, now)
		default:
			return c, nil
		}
	}
}

// pop takes the idle connection that was used last, nil without one; old tells that it has
// been idle for too long to be used, or has lived for too long.
func (p *Pool) pop(now time.Time) (c *conn, old bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.idle) - 1
	if last < 0 {
		return nil, false
	}
	c = p.idle[last]
	p.idle[last] = nil
	p.idle = p.idle[:last]
	return c, c.retire != 0 && now.Sub(c.born) >= c.retire || p.tooLongIdleLocked(c, now)
}

func (p *Pool) tooLongIdleLocked(c *conn, now time.Time) bool {
	idle := now.Sub(c.since)
	if p.cfg.IdleTimeout > 0 && idle >= p.cfg.IdleTimeout {
		return true
	}
	limit := p.limit.at(now)
	return limit > 0 && idle >= limit
}

// put makes c idle, if it can carry another request.
func (p *Pool) put(c *conn) {
	c.since = time.Now()
	p.mu.Lock()
	if p.retired || c.closed.Load() {
		p.mu.Unlock()
		c.close(ReasonAsked)
		return
	}
	p.idle = append(p.idle, c)
	if p.tidier == nil {
		p.tidier = time.AfterFunc(tidyInterval, p.tidy)
	}
	watched := c.watch() // before anybody can take it
	if !watched {
		p.idle = p.idle[:len(p.idle)-1]
	}
	p.mu.Unlock()
	if !watched {
		c.close(ReasonAsked)
	}
}

// remove takes c out of the idle ones and tells whether it was one of them.
func (p *Pool) remove(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.idle {
		if other == c {
			p.idle = append(p.idle[:i], p.idle[i+1:]...)
			return true
		}
	}
	return false
}

// tidyInterval is how often idle connections are looked at, and how long more of them
// than Config.MaxIdle may stay: for as long a lull between two bursts is no reason to
// open them all again.
const tidyInterval = time.Second

// tidy closes the connections that have been idle for too long, those above the limit
// and those that their peer has left.
func (p *Pool) tidy() {
	now := time.Now()
	var old []*conn
	p.mu.Lock()
	keep := p.idle[:0]
	over := len(p.idle) - p.cfg.MaxIdle
	for _, c := range p.idle { // the first has been idle for the longest time
		if p.tooLongIdleLocked(c, now) || (over > 0 && now.Sub(c.since) >= tidyInterval) {
			old = append(old, c)
			over--
		} else {
			keep = append(keep, c)
		}
	}
	clear(p.idle[len(keep):])
	p.idle = keep
	p.mu.Unlock()
	for _, c := range old {
		c.close(ReasonIdle)
	}
	p.sweep(nil, now)

	p.mu.Lock()
	defer p.mu.Unlock()
	p.tidier = nil
	if len(p.idle) > 0 {
		p.tidier = time.AfterFunc(tidyInterval, p.tidy)
	}
}

// found is told that c's peer had left it while it was idle.
func (p *Pool) found(c *conn, now time.Time) {
	p.sweep(c, now)
	c.close(ReasonLeft)
}

// sweep looks at all idle connections, closes those that their peers have left and
// learns from what it sees. first is one that is known to have been left, if not nil.
func (p *Pool) sweep(first *conn, now time.Time) {
	var left []*conn
	var ages []time.Duration   // of those
	oldest := time.Duration(0) // of the others
	if first != nil {
		ages = append(ages, now.Sub(first.since))
	}
	p.mu.Lock()
	keep := p.idle[:0]
	for _, c := range p.idle {
		switch {
		case c.closed.Load(): // by somebody else
		case c.peerThere():
			keep = append(keep, c)
			oldest = max(oldest, now.Sub(c.since))
		default:
			left = append(left, c)
			ages = append(ages, now.Sub(c.since))
		}
	}
	clear(p.idle[len(keep):])
	p.idle = keep
	p.limit.died(now, ages, oldest)
	p.mu.Unlock()
	for _, c := range left {
		c.close(ReasonLeft)
	}
}

// told is told how long the server keeps idle connections, as it says.
func (p *Pool) told(limit time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limit.told(limit)
}
