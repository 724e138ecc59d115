package lb

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// tunnel answers an upgrade: it hands the client's connection and the backend's to
// one another, byte for byte, until both directions have ended.
func (s *serving) tunnel(resp *http.Response) {
	backend, ok := resp.Body.(*tunnelAnswer)
	if !ok {
		s.failHere(fmt.Errorf("%w: no connection behind it", errBadAnswer))
		return
	}
	if s.duplex && !s.body.ended() {
		// The rest of the body would be read from the connection beside the tunnel.
		s.failHere(fmt.Errorf("%w: switched before it had the whole request", errBadAnswer))
		return
	}
	conn, rw, err := http.NewResponseController(s.w).Hijack()
	if err != nil {
		s.pool.set.panics.misbehaved("a ResponseWriter cannot be taken over for an upgrade: a middleware's needs an Unwrap method", slog.String("type", fmt.Sprintf("%T", s.w)))
		s.failHere(fmt.Errorf("%w: the ResponseWriter (%T) needs an Unwrap method: %w", errNoTunnel, s.w, err))
		return
	}
	defer conn.Close()
	defer backend.Close()
	// The server's deadlines were for the request, and end with it.
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return
	}
	head := http.Response{StatusCode: resp.StatusCode, ProtoMajor: 1, ProtoMinor: 1, Header: s.w.Header()}
	copyHeader(head.Header, resp.Header)
	head.Header["Connection"] = []string{"Upgrade"}
	head.Header["Upgrade"] = resp.Header["Upgrade"]
	if head.Write(rw) != nil || rw.Flush() != nil {
		return // the client has left
	}
	t := &tunnelled{client: conn, backend: backend, protocol: resp.Header.Get("Upgrade"), limits: s.pool.cfg.upgrades}
	defer context.AfterFunc(s.in.Context(), t.cut)()
	// What comes behind the buffer is read from the connection itself: the server's
	// reader cancels the context at the end of what the client says, which may be half
	// of a close.
	early, _ := rw.Reader.Peek(rw.Reader.Buffered())
	t.run(io.MultiReader(bytes.NewReader(early), conn))
}

// tunnelled is an upgraded exchange.
type tunnelled struct {
	client   net.Conn
	backend  *tunnelAnswer
	protocol string // that both switched to
	limits   Upgrades
	moved    atomic.Int64 // bytes, both ways: whether it is idle
	over     atomic.Bool
}

// run copies both ways until both have ended. fromClient is the client's connection
// behind what was read of it already.
func (t *tunnelled) run(fromClient io.Reader) {
	pool := t.backend.attempt.call.pool
	if !pool.set.work.enter() {
		return
	}
	defer pool.set.work.leave()
	defer t.limit()()
	if !t.backend.attempt.backend.conns.owned { // else the pool's end is that of the connection
		defer context.AfterFunc(pool.conns.ctx, t.cut)()
	}
	var toClient io.Writer = t.client
	if equalFold(t.protocol, "websocket") {
		w := &webSocket{Conn: t.client, cut: t.cut}
		for answer := range t.backend.nested() { // each pool may ask it to leave
			sockets := &answer.attempt.call.pool.sockets
			sockets.add(w, answer.attempt.backend)
			defer sockets.remove(w)
		}
		toClient = w
	}
	var wg sync.WaitGroup
	wg.Go(func() { t.copy(toClient, t.backend) })
	t.copy(t.backend, fromClient)
	wg.Wait()
}

// copy passes one direction on, its end too: a peer that has said all may still want
// to hear the rest. An error ends both directions, and as an error.
func (t *tunnelled) copy(dst io.Writer, src io.Reader) {
	pool := t.backend.attempt.call.pool
	defer func() {
		if v := recover(); v != nil { // of a connection that the user's transport has made
			pool.set.panics.caught("the connection of an upgrade", v)
			t.broken(errNoTunnel)
		}
	}()
	buf := pool.memory.Get()
	defer pool.memory.Put(buf)
	for {
		n, errRead := src.Read(buf)
		if n > 0 {
			t.moved.Add(int64(n))
			if _, err := dst.Write(buf[:n]); err != nil {
				t.broken(err)
				return
			}
		}
		if errRead == io.EOF {
			if closeWrite(dst) == nil {
				return
			}
			break
		}
		if errRead != nil {
			t.broken(errRead)
			return
		}
	}
	t.cut()
}

// closeWrite tells w's peer that all was said, if w can.
func closeWrite(w io.Writer) error {
	if cw, ok := w.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// broken ends both directions because of err. Unless that comes from an end of our own,
// neither peer is to take it for the other's word that it has said all: many protocols,
// and some WebSocket libraries, take an orderly end for the end of what was sent.
func (t *tunnelled) broken(err error) {
	if !errors.Is(err, net.ErrClosed) {
		reset(t.client)
		for answer := range t.backend.nested() {
			if cc := answer.conn(); cc != nil {
				reset(cc)
			}
		}
	}
	t.cut()
}

// reset closes the connection beneath c and lets its peer see a reset, where it can; over
// TLS nothing is said before, such as that this is the end.
func reset(c net.Conn) {
	for {
		above, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		c = above.NetConn()
	}
	if tcp, ok := c.(interface{ SetLinger(sec int) error }); ok {
		_ = tcp.SetLinger(0) // fails if it is closed
	}
	c.Close()
}

// cut ends both directions.
func (t *tunnelled) cut() {
	t.client.Close()
	t.backend.Close()
}

// limit ends the tunnel when its time is up, or when it has been idle for too long,
// until the function it returns is called.
func (t *tunnelled) limit() (stop func()) {
	var timers []*time.Timer
	if d := t.limits.MaxDuration; d > 0 {
		timers = append(timers, time.AfterFunc(d, t.cut))
	}
	if d := t.limits.IdleTimeout; d > 0 {
		last := t.moved.Load()
		var idle *time.Timer
		idle = time.AfterFunc(math.MaxInt64, func() { // for ever: it begins below, once idle is set
			if t.over.Load() {
				return
			}
			now := t.moved.Load()
			if now == last {
				t.cut()
				return
			}
			last = now
			idle.Reset(d)
		})
		idle.Reset(d)
		timers = append(timers, idle)
	}
	return func() {
		t.over.Store(true)
		for _, timer := range timers {
			timer.Stop()
		}
	}
}

// Upgrades sets which upgrades of a connection ServeHTTP passes on, and how long they
// may last. The zero value means WebSocket (RFC 6455), for as long as both sides like.
type Upgrades struct {
	// Protocols lists the protocols, by their name with or without a version, that a
	// client may ask to switch to. A request that asks for others goes out without
	// asking. h2c is an error: requests inside of it would pass the pool unseen. The
	// default is "websocket"; an empty list that is not nil means none.
	Protocols []string
	// IdleTimeout ends a tunnel in which nothing has moved in either direction for
	// that long, at most twice that long. Zero, the default, means no limit; a negative
	// value is an error.
	IdleTimeout time.Duration
	// MaxDuration ends a tunnel after that time. Zero, the default, means no limit; a
	// negative value is an error.
	MaxDuration time.Duration
	// CloseSpread is the time over which Shutdown and Drain ask the clients of WebSockets
	// to leave, each at a random moment of it, with a close frame of status 1001 (going
	// away) behind the frame that is under way; who has not left 5 s after that is cut.
	// All at once they would come back all at once. If Shutdown or Drain has less than
	// twice this time, half of what it has is taken. Zero means DefaultCloseSpread; a
	// negative value asks nobody, and WebSockets last until they end or are cut, as
	// tunnels of other protocols do.
	CloseSpread time.Duration
}

func (u *Upgrades) fill(c *config) {
	if u.Protocols == nil {
		u.Protocols = []string{"websocket"}
	}
	for _, protocol := range u.Protocols {
		name, _, _ := strings.Cut(protocol, "/")
		switch {
		case strings.EqualFold(name, "h2c"):
			c.faultf("Upgrades.Protocols has %q: requests inside of it would not be seen", protocol)
		case name == "" || strings.ContainsFunc(name, notInToken):
			c.faultf("Upgrades.Protocols has %q: want the name of a protocol, like websocket", protocol)
		}
	}
	if u.IdleTimeout < 0 {
		c.faultf("Upgrades.IdleTimeout is %v: want more than zero, or 0 for no limit", u.IdleTimeout)
	}
	if u.MaxDuration < 0 {
		c.faultf("Upgrades.MaxDuration is %v: want more than zero, or 0 for no limit", u.MaxDuration)
	}
	if u.CloseSpread == 0 {
		u.CloseSpread = DefaultCloseSpread
	}
	u.Protocols = slices.Clone(u.Protocols)
}
