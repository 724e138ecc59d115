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

// webSockets are the open tunnels of a pool that can be told to leave. The zero value has
// none.
type webSockets struct {
	mu     sync.Mutex // guards the following
	open   map[*webSocket]*Backend
	window time.Duration // over which all leave, those of later too; zero: they need not
}

// add makes w one of them, over b, until it is removed.
func (s *webSockets) add(w *webSocket, b *Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[*webSocket]*Backend{}
	}
	s.open[w] = b
	for _, window := range [...]time.Duration{s.window, time.Duration(b.farewell.Load())} {
		if window > 0 {
			w.leaveWithin(window)
		}
	}
}

func (s *webSockets) remove(w *webSocket) {
	s.mu.Lock()
	delete(s.open, w)
	s.mu.Unlock()
	w.forget()
}

// leaveAll tells all WebSockets to leave within window, each at a moment of its own:
// clients that come back all at once are a storm. Zero is no window.
func (s *webSockets) leaveAll(window time.Duration) {
	if window <= 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.window = window
	for w := range s.open {
		w.leaveWithin(window)
	}
}

// leave does so with those of b, for as long as b's farewell lasts.
func (s *webSockets) leave(b *Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	window := time.Duration(b.farewell.Load())
	for w, of := range s.open {
		if of == b && window > 0 {
			w.leaveWithin(window)
		}
	}
}

// stay tells those of b that have not been asked that they need not leave.
func (s *webSockets) stay(b *Backend) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w, of := range s.open {
		if of == b && s.window == 0 {
			w.stay()
		}
	}
}

// spread is the window for the time that ctx leaves: half of it is for those that
// leave last. It is below zero if nobody is to be asked.
func (u *Upgrades) spread(ctx context.Context) time.Duration {
	if end, ok := ctx.Deadline(); ok && u.CloseSpread > 0 {
		return max(1, min(u.CloseSpread, time.Until(end)/2))
	}
	return u.CloseSpread
}

// webSocket is the client's end of a tunnel that speaks RFC 6455. What the backend says
// passes through it unchanged, until the client is told to leave: then a close frame
// follows the frame that is under way, and nothing follows that. The client's answer goes
// to the backend, which so sees its client leave.
type webSocket struct {
	net.Conn
	cut func() // ends the tunnel

	plan sync.Mutex // guards the following
	at   time.Time  // when the client is to be told; zero: it is not
	tell *time.Timer
	end  *time.Timer // of the tunnel, if that does not help

	mu      sync.Mutex // guards the following, and the writer
	frames  frames
	leaving bool // a close frame is to be sent between two frames
	left    bool // it was sent
}

// goingAway is an unmasked close frame with status 1001.
var goingAway = []byte{0x88, 2, 1001 >> 8, 1001 & 0xff}

// leaveWithin chooses a moment of window to leave, unless an earlier one was chosen.
func (w *webSocket) leaveWithin(window time.Duration) {
	d := rand.N(window)
	at := time.Now().Add(d)
	w.plan.Lock()
	defer w.plan.Unlock()
	switch {
	case w.at.IsZero():
	case !at.Before(w.at):
		return
	default:
		w.forgetLocked()
	}
	w.at = at
	w.tell = time.AfterFunc(d, w.leave)
	w.end = time.AfterFunc(d+farewellPatience, w.cut)
}

// stay undoes leaveWithin, unless the moment has come.
func (w *webSocket) stay() {
	w.plan.Lock()
	defer w.plan.Unlock()
	if w.tell != nil && w.tell.Stop() {
		w.forgetLocked()
		w.at = time.Time{}
	}
}

func (w *webSocket) forget() {
	w.plan.Lock()
	defer w.plan.Unlock()
	w.forgetLocked()
}

func (w *webSocket) forgetLocked() {
	if w.tell != nil {
		w.tell.Stop()
		w.end.Stop()
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
