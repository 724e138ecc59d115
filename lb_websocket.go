package lb

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// farewellPatience is how long a WebSocket that was told to leave may take for it.
const farewellPatience = 5 * time.Second

// webSockets are the open tunnels that can be told to leave. The zero value has none.
type webSockets struct {
	mu     sync.Mutex // guards the following
	open   map[*webSocket]struct{}
	window time.Duration // over which all leave, those of later too; zero: they need not
}

// add makes t one of them, until it is removed.
func (s *webSockets) add(t *tunnelled) *webSocket {
	w := &webSocket{Conn: t.client, tunnel: t}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[*webSocket]struct{}{}
	}
	s.open[w] = struct{}{}
	if window := max(s.window, time.Duration(w.of().farewell.Load())); window > 0 {
		w.leaveWithin(window)
	}
	return w
}

func (s *webSockets) remove(w *webSocket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, w)
	for _, t := range w.timers {
		t.Stop()
	}
}

// leave tells the WebSockets of b, or all if b is nil, to leave within window, each at
// a moment of its own: clients that come back all at once are a storm.
func (s *webSockets) leave(b *Backend, window time.Duration) {
	if window <= 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b == nil {
		s.window = window
	} else {
		b.farewell.Store(int64(window))
	}
	for w := range s.open {
		if b == nil || w.of() == b {
			w.leaveWithin(window)
		}
	}
}

// spread is the window for the time that ctx leaves: half of it is for those that
// leave last.
func (u *Upgrades) spread(ctx context.Context) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		return min(u.CloseSpread, time.Until(end)/2)
	}
	return u.CloseSpread
}

// webSocket is the client's end of a tunnel that speaks RFC 6455. What the backend says
// passes through it unchanged, until the client is told to leave: then a close frame
// follows the frame that is under way, and nothing follows that. The client's answer goes
// to the backend, which so sees its client leave.
type webSocket struct {
	net.Conn
	tunnel *tunnelled
	timers []*time.Timer // of the farewell; guarded by webSockets.mu

	mu      sync.Mutex // guards the following, and the writer
	frames  frames
	leaving bool // a close frame is to be sent between two frames
	left    bool // it was sent
}

// goingAway is an unmasked close frame with status 1001.
var goingAway = []byte{0x88, 2, 1001 >> 8, 1001 & 0xff}

func (w *webSocket) of() *Backend { return w.tunnel.backend.attempt.backend }

// leaveWithin is called with webSockets.mu held. Only the first call counts.
func (w *webSocket) leaveWithin(window time.Duration) {
	if w.timers == nil {
		d := rand.N(window)
		w.timers = []*time.Timer{
			time.AfterFunc(d, w.leave),
			time.AfterFunc(d+farewellPatience, w.tunnel.cut),
		}
	}
}

func (w *webSocket) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leaving = true
	_ = w.sayLocked() // the tunnel hears of an error itself
}

// sayLocked sends the close frame if it is due and may be sent now.
func (w *webSocket) sayLocked() error {
	if !w.leaving || w.left || !w.frames.between() {
		return nil
	}
	w.left = true
	_, err := w.Conn.Write(goingAway)
	return err
}

// Write passes on what the backend says.
func (w *webSocket) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for rest := p; len(rest) > 0 && !w.left; {
		n := w.frames.pass(rest)
		for !w.leaving && n < len(rest) {
			n += w.frames.pass(rest[n:])
		}
		if _, err := w.Conn.Write(rest[:n]); err != nil {
			return 0, err
		}
		if err := w.sayLocked(); err != nil {
			return 0, err
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// CloseWrite passes on that the backend has said all.
func (w *webSocket) CloseWrite() error { return closeWrite(w.Conn) }

// frames follows the frames of RFC 6455 section 5.2 by their headers. The zero value is
// at the begin of the first.
type frames struct {
	head    [14]byte
	have    int    // of head; 0 between two frames
	left    uint64 // of the payload, once head is complete
	unknown bool   // what passes is not understood
	closed  bool   // a close frame has passed or is passing
}

// between tells whether a frame may be put in here.
func (f *frames) between() bool { return f.have == 0 && !f.unknown && !f.closed }

// pass tells how much of p, which is not empty, belongs to the frame that is under way
// or begins.
func (f *frames) pass(p []byte) (n int) {
	if f.unknown || f.closed {
		return len(p)
	}
	for ; n < len(p) && f.left == 0; n++ {
		f.head[f.have] = p[n]
		f.have++
		if f.have < f.headLen() {
			continue
		}
		if f.begin(); f.left == 0 {
			f.have = 0
			return n + 1
		}
	}
	k := min(f.left, uint64(len(p)-n))
	if f.left -= k; f.left == 0 && k > 0 {
		f.have = 0
	}
	return n + int(k)
}

// headLen is how long the header is, as far as is known.
func (f *frames) headLen() int {
	if f.have < 2 {
		return 2
	}
	n := 2
	switch f.head[1] & 0x7f {
	case 126:
		n += 2
	case 127:
		n += 8
	}
	if f.head[1]&0x80 != 0 {
		n += 4 // the mask
	}
	return n
}

// begin reads the header, which is complete.
func (f *frames) begin() {
	switch opcode := f.head[0] & 0x0f; {
	case opcode == 8:
		f.closed = true
	case opcode > 10, opcode > 2 && opcode < 8:
		f.unknown = true
	}
	switch n := f.head[1] & 0x7f; n {
	case 126:
		f.left = uint64(binary.BigEndian.Uint16(f.head[2:]))
	case 127:
		f.left = binary.BigEndian.Uint64(f.head[2:])
	default:
		f.left = uint64(n)
	}
}
