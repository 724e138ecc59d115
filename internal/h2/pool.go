// Package h2 sends requests over connections of its own to one HTTP/2 server, several
// if one has no stream left. The connections are net/http's, one by one; which of them
// carries a request, and what its failure proves, is decided here.
//
// Nothing is sent twice: what to do about a failure is the caller's affair.
package h2

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Config says how a Pool holds its connections. It does not change.
type Config struct {
	// Dial opens a connection over which HTTP/2 is spoken at once, after a handshake if
	// there is one. Its ctx ends when nobody waits for the connection any more.
	Dial func(ctx context.Context) (net.Conn, error)
	// Go runs f on a goroutine, and tells whether it does.
	Go func(f func()) bool
	// Opened is told of each connection, and may refuse it; Closed, of its end. In
	// between the connection may be closed by who was told, with what is on it.
	Opened func(io.Closer) bool
	Closed func(io.Closer)

	IdleTimeout     time.Duration // how long a connection without a stream is kept; zero: for ever
	MaxAge          time.Duration // after which it takes no new stream; zero: none
	SettingsTimeout time.Duration // for the server's first word; zero: none
	HeaderTimeout   time.Duration // for the answer's head, once the request is sent; zero: none
	ContinueTimeout time.Duration // for a 100 Continue, after which the body is sent anyway
	MaxHeaderBytes  int64         // of an answer's header
	PingAfter       time.Duration // silence after which the server is asked for a sign of life
	PingTimeout     time.Duration // how long it may take for that
}

// Stats counts a pool's connections.
type Stats struct {
	Open, Idle     int64 // Idle have no stream
	Opened, Closed int64
	// Of those closed: Idled were idle for too long or too old, Left by their server,
	// Failed broken.
	Idled, Left, Failed int64
}

// Pool holds the connections to one server. New makes one; Retire ends it. All
// methods may be called concurrently.
type Pool struct {
	cfg       Config
	transport *http.Transport

	mu      sync.Mutex // guards the following
	conns   []*conn
	dialing *dialing // under way; nil without one
	tidier  *time.Timer
	retired bool

	open, opened, ended, idled, left, failed, asked atomic.Int64
}

// dialing is a dial that everybody waits for who finds no stream.
type dialing struct {
	done   chan struct{}
	err    error // once done is closed
	cancel context.CancelFunc
	// The following is guarded by Pool.mu.
	waiting   int   // for it
	abandoned bool  // nobody was, so that it was given up
	opened    *conn // with a stream that is reserved for one who waited; nil once it is taken
}

// ErrClosed is the error when Config.Opened or Config.Go refuses.
var ErrClosed = errors.New("connections are closed")

// New returns a pool without connections.
func New(cfg Config) *Pool {
	p := &Pool{cfg: cfg}
	protocols := new(http.Protocols)
	// Over TLS too: the handshake has been made when net/http gets the connection.
	protocols.SetUnencryptedHTTP2(true)
	p.transport = &http.Transport{
		Protocols:              protocols,
		DisableCompression:     true,
		ExpectContinueTimeout:  cfg.ContinueTimeout,
		MaxResponseHeaderBytes: cfg.MaxHeaderBytes,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: cfg.PingAfter, PingTimeout: cfg.PingTimeout, WriteByteTimeout: cfg.PingAfter + cfg.PingTimeout},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return ctx.Value(connKey{}).(*conn), nil
		},
	}
	return p
}

// connKey finds the connection in the context of net/http's dial, which is none.
type connKey struct{}

// Stats returns the present counts.
func (p *Pool) Stats() Stats {
	s := Stats{Open: p.open.Load(), Opened: p.opened.Load(), Closed: p.ended.Load(), Idled: p.idled.Load(), Left: p.left.Load(), Failed: p.failed.Load()}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		if !c.gone.Load() && c.InFlight() == 0 {
			s.Idle++
		}
	}
	return s
}

// Retire closes the connections without a stream, and from now on each that has none any
// more. What is under way goes on.
func (p *Pool) Retire() {
	p.mu.Lock()
	p.retired = true
	p.mu.Unlock()
	p.tidy()
}

// CloseIdle closes the connections that have no stream now.
func (p *Pool) CloseIdle() {
	for _, c := range p.take(func(c *conn) bool { return c.InFlight() == 0 }) {
		c.end(&p.asked)
	}
}

// take takes those that fit out of the list, and those that have ended.
func (p *Pool) take(fits func(*conn) bool) (taken []*conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	keep := p.conns[:0]
	for _, c := range p.conns {
		switch {
		case c.gone.Load():
		case fits(c):
			taken = append(taken, c)
		default:
			keep = append(keep, c)
		}
	}
	clear(p.conns[len(keep):])
	p.conns = keep
	return taken
}

// tidyInterval is how often idle connections are looked at.
const tidyInterval = time.Second

// tidy closes the connections that have been without a stream for too long, or are too
// old to get another.
func (p *Pool) tidy() {
	now := time.Now()
	for _, c := range p.take(func(c *conn) bool { return p.overLocked(c, now) }) {
		c.end(&p.idled)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tidier != nil {
		p.tidier.Stop()
	}
	p.tidier = nil
	p.tidyLaterLocked()
}

func (p *Pool) tidyLaterLocked() {
	if p.tidier == nil && len(p.conns) > 0 {
		p.tidier = time.AfterFunc(tidyInterval, p.tidy)
	}
}

func (p *Pool) overLocked(c *conn, now time.Time) bool {
	switch {
	case c.InFlight() > 0:
		c.idleSince = time.Time{}
		return false
	case c.idleSince.IsZero():
		c.idleSince = now
	}
	return p.retired || c.tooOld(now) || p.cfg.IdleTimeout > 0 && now.Sub(c.idleSince) >= p.cfg.IdleTimeout
}

// get returns a connection on which a stream is reserved.
func (p *Pool) get(ctx context.Context) (*conn, error) {
	for {
		p.mu.Lock()
		if c := p.reserveLocked(time.Now()); c != nil {
			p.mu.Unlock()
			return c, nil
		}
		d := p.dialing
		if d == nil {
			d = p.dialLocked(ctx)
		}
		d.waiting++
		p.mu.Unlock()
		select {
		case <-d.done:
			c, again := p.taken(d)
			if c != nil || !again {
				return c, d.err
			}
		case <-ctx.Done():
			p.leave(d)
			return nil, context.Cause(ctx)
		}
	}
}

// taken returns the connection of a dial that has ended, to the first who comes for it;
// again tells the others to look for a stream as before.
func (p *Pool) taken(d *dialing) (c *conn, again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d.waiting--
	c, d.opened = d.opened, nil
	return c, d.err == nil || d.abandoned
}

// leave is told that one who waited for d does so no more. The last one ends it.
func (p *Pool) leave(d *dialing) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.waiting--; d.waiting > 0 {
		return
	}
	d.abandoned = true
	d.cancel()
	if p.dialing == d {
		p.dialing = nil // whoever comes now is not to wait for a dialer that does not heed its context
	}
	if c := d.opened; c != nil {
		d.opened = nil
		c.Release()
	}
}

// reserveLocked reserves a stream on a connection that has one, nil if none has. The
// first are filled before others, so that those that are not needed become idle.
func (p *Pool) reserveLocked(now time.Time) *conn {
	for _, c := range p.conns {
		if c.usable(now) && c.Reserve() == nil {
			c.idleSince = time.Time{}
			return c
		}
	}
	return nil
}

// dialLocked begins to open another connection. The values of ctx are those of who wants
// it first.
func (p *Pool) dialLocked(ctx context.Context) *dialing {
	d := &dialing{done: make(chan struct{})}
	ctx, d.cancel = context.WithCancel(context.WithoutCancel(ctx))
	p.dialing = d
	run := func() {
		defer d.cancel()
		c, err := p.dial(ctx)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.dialedLocked(d, c, err)
	}
	if !p.cfg.Go(run) {
		d.cancel()
		p.dialedLocked(d, nil, ErrClosed)
	}
	return d
}

// dialedLocked ends d.
func (p *Pool) dialedLocked(d *dialing, c *conn, err error) {
	if d.err = err; err == nil {
		p.conns = append(p.conns, c)
		p.tidyLaterLocked()
		if d.abandoned {
			c.Release()
		} else {
			d.opened = c
		}
	}
	if p.dialing == d {
		p.dialing = nil
	}
	close(d.done)
}

// dial opens a connection and reserves a stream on it: one that has none to give is of no
// use, and another would have none either.
func (p *Pool) dial(ctx context.Context) (*conn, error) {
	nc, err := p.cfg.Dial(ctx)
	if err != nil {
		return nil, err
	}
	c, err := p.settle(ctx, nc)
	if err == nil && c.Reserve() != nil {
		c.Close()
		return nil, errNoStream
	}
	return c, err
}

// settle begins to speak HTTP/2 over nc, and waits for the server's settings: they say how
// many streams there are.
func (p *Pool) settle(ctx context.Context, nc net.Conn) (*conn, error) {
	c := &conn{Conn: nc, pool: p, born: time.Now(), spoken: make(chan struct{})}
	if age := p.cfg.MaxAge; age > 0 {
		c.retire = age - rand.N(age/10+1) // or all that were opened together end together
	}
	if !p.cfg.Opened(c.handle()) {
		nc.Close()
		return nil, ErrClosed
	}
	p.open.Add(1)
	p.opened.Add(1)
	var err error
	if c.ClientConn, err = p.transport.NewClientConn(context.WithValue(ctx, connKey{}, c), "http", "h2:80"); err != nil {
		c.Close()
		return nil, err
	}
	if d := p.cfg.SettingsTimeout; d > 0 {
		t := time.AfterFunc(d, func() { c.late.Store(true); c.Close() })
		defer t.Stop()
	}
	select {
	case <-c.spoken:
	case <-ctx.Done():
		c.Close()
		return nil, context.Cause(ctx)
	}
	switch {
	case c.late.Load():
		return nil, errSilent
	case c.Err() != nil || c.gone.Load():
		c.Close()
		return nil, ErrProtocol
	}
	return c, nil
}

var (
	// ErrOther is for Config.Dial, if the server speaks another protocol.
	ErrOther = errors.New("server speaks another protocol")
	// ErrProtocol is the error of a server that was taken to speak HTTP/2 and does not.
	ErrProtocol = errors.New("server does not speak HTTP/2")
	errNoStream = fmt.Errorf("%w: it grants no stream", ErrProtocol)
	errSilent   = fmt.Errorf("%w: it says nothing: %w", ErrProtocol, context.DeadlineExceeded)
)
