package lb_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// frame is a frame of RFC 6455, masked with zeros if it is a client's.
func frame(opcode byte, payload string, masked bool) string {
	b := []byte{0x80 | opcode, byte(len(payload))}
	switch n := len(payload); {
	case n > 1<<16-1:
		b[1] = 127
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	case n > 125:
		b[1] = 126
		b = binary.BigEndian.AppendUint16(b, uint16(n))
	}
	if masked {
		b[1] |= 0x80
		b = append(b, 0, 0, 0, 0)
	}
	return string(b) + payload
}

const (
	goingAway = "\x88\x02\x03\xe9"
	answered  = "\x88\x82\x00\x00\x00\x00\x03\xe9" // the client's echo of it
)

func closeSpread(d time.Duration) lb.Option { return lb.WithUpgrades(lb.Upgrades{CloseSpread: d}) }

// leaves waits for the close frame, answers it and reads the end.
func (e *tunnelEnd) leaves(t *testing.T) {
	t.Helper()
	e.want(t, goingAway)
	io.WriteString(e, answered)
	e.wantEnd(t, 0)
	e.Close()
}

// leaving is a backend's end that answers a client's close frame as it should.
func leaving(t *testing.T) lbtest.Behavior {
	return tunnelTo(func(e *tunnelEnd) {
		e.want(t, answered)
		io.WriteString(e, goingAway) // which the client has already
	})
}

// Shutdown asks WebSockets to leave, not all at once, and returns when they have.
func TestShutdownAsksWebSocketsToLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, window = 20, 8 * time.Second
		r := newRig(t, []lbtest.Behavior{leaving(t), leaving(t)}, closeSpread(window))
		began := time.Now()
		var mu sync.Mutex
		var left []time.Duration
		var wg sync.WaitGroup
		for range n {
			e := r.tunnel()
			wg.Go(func() {
				e.leaves(t)
				mu.Lock()
				defer mu.Unlock()
				left = append(left, time.Since(began))
			})
		}
		if err := r.pool.Shutdown(t.Context()); err != nil {
			t.Errorf("Shutdown = %v", err)
		}
		wg.Wait()
		slices.Sort(left)
		if left[n-1] > window || left[n-1]-left[0] < window/4 || len(slices.Compact(slices.Clone(left))) < n/2 {
			t.Errorf("they left after %v; want it spread over %v", left, window)
		}
		if s := r.pool.Stats(); s.Failures+s.Cut+s.ClientClosed != 0 {
			t.Errorf("failures %d, cut %d, client closed %d", s.Failures, s.Cut, s.ClientClosed)
		}
		r.wantClosed()
	})
}

// The close frame follows a frame that is whole, whatever passes at that moment, and
// nothing follows it.
func TestWebSocketsLeaveBetweenFrames(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 40 {
		synctest.Test(t, func(t *testing.T) {
			var all []byte
			ends := []int{0}
			for range 30 {
				size := []int{0, 1, 125, 126, 1000, 65535, 65536}[rng.IntN(7)]
				all = append(all, frame([]byte{0, 1, 2, 9, 10}[rng.IntN(5)], text(size), rng.IntN(4) == 0)...)
				ends = append(ends, len(all))
			}
			var pieces [][]byte
			for rest := all; len(rest) > 0; {
				n := min(1+rng.IntN([]int{3, 300, 100_000}[rng.IntN(3)]), len(rest))
				pieces, rest = append(pieces, rest[:n]), rest[n:]
			}
			r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) {
				for _, p := range pieces {
					linger(time.Duration(rng.IntN(10)) * time.Millisecond)
					e.Write(p)
				}
				e.want(t, answered)
			})}, closeSpread(time.Duration(1+len(pieces)*5)*time.Millisecond))
			e := r.tunnel()
			var got []byte
			go func() { r.pool.Shutdown(context.Background()) }()
			for buf := make([]byte, 1<<16); !bytes.HasSuffix(got, []byte(goingAway)); {
				n, err := e.Read(buf)
				if got = append(got, buf[:n]...); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
			}
			io.WriteString(e, answered)
			rest, _ := io.ReadAll(e)
			got = bytes.TrimSuffix(got, []byte(goingAway))
			if len(rest) > 0 || !bytes.HasPrefix(all, got) || !slices.Contains(ends, len(got)) {
				t.Errorf("seed %d: %d bytes came before the close frame and %d after it; want whole frames, which end at %v", seed, len(got), len(rest), ends)
			}
		})
	}
}

// Who does not leave though asked is cut after a while; who cannot be asked, or is
// closing by itself, is not disturbed.
func TestWebSocketsThatStayAreCut(t *testing.T) {
	const spread = 4 * time.Second
	for name, tt := range map[string]struct {
		says   string // the backend, before Shutdown
		asked  bool
		spread time.Duration
		shut   time.Duration // how long Shutdown waits; 0: an hour
		cut    [2]time.Duration
	}{
		"no answer":                   {says: frame(1, "x", false), asked: true, cut: [2]time.Duration{5 * time.Second, 9 * time.Second}},
		"no answer, and no time":      {says: frame(1, "x", false), asked: true, shut: 2 * time.Second, cut: [2]time.Duration{2 * time.Second, 2 * time.Second}},
		"a frame that does not end":   {says: frame(2, text(1000), false)[:900], cut: [2]time.Duration{5 * time.Second, 9 * time.Second}},
		"a header that does not end":  {says: frame(2, text(1000), false)[:3], cut: [2]time.Duration{5 * time.Second, 9 * time.Second}},
		"the backend's own close":     {says: frame(1, "x", false) + "\x88\x02\x03\xe8", cut: [2]time.Duration{5 * time.Second, 9 * time.Second}},
		"half of the backend's close": {says: frame(1, "x", false) + "\x88\x02\x03", cut: [2]time.Duration{5 * time.Second, 9 * time.Second}},
		"something else":              {says: "SSH-2.0 and the like", cut: [2]time.Duration{5 * time.Second, 9 * time.Second}},
		"nobody is to be asked":       {says: frame(1, "x", false), spread: -1, cut: [2]time.Duration{time.Hour, time.Hour}},
	} {
		bubble(t, name, func(t *testing.T) {
			if tt.spread == 0 {
				tt.spread = spread
			}
			if tt.shut == 0 {
				tt.shut = time.Hour
			}
			r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) {
				io.WriteString(e, tt.says)
				e.wantEnd(t, tt.cut[1])
			})}, closeSpread(tt.spread))
			e := r.tunnel()
			e.want(t, tt.says)
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), tt.shut)
			defer cancel()
			err := r.pool.Shutdown(ctx)
			if took := time.Since(began); took < tt.cut[0] || took > tt.cut[1] || (err == nil) != (took < tt.shut) {
				t.Errorf("Shutdown = %v after %v, want %v to %v", err, took, tt.cut[0], tt.cut[1])
			}
			want := ""
			if tt.asked {
				want = goingAway
			}
			if got, _ := io.ReadAll(e); string(got) != want {
				t.Errorf("the client read %q, want %q", got, want)
			}
			r.wantClosed()
		})
	}
}

// A handshake that was under way when Shutdown began is asked as well.
func TestLateWebSocketsLeaveToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.When(func(*http.Request) bool { linger(time.Minute); return true }, leaving(t), lbtest.Answer())}, closeSpread(time.Second))
		within(t, time.Minute+time.Second, func() {
			go func() { r.tunnel().leaves(t) }()
			synctest.Wait()
			if err := r.pool.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		})
		r.wantClosed()
	})
}

// Who has been asked leaves, also with less time than it was given first, and however
// little there is.
func TestWebSocketsLeaveInTheTimeThatIsLeft(t *testing.T) {
	for name, tt := range map[string]struct {
		first func(p *lb.Pool, name string)
		left  time.Duration
	}{
		"Drain before Shutdown":           {func(p *lb.Pool, name string) { p.Drain(context.Background(), name) }, 30 * time.Second},
		"CloseWebSockets before Shutdown": {func(p *lb.Pool, _ string) { p.CloseWebSockets() }, 30 * time.Second},
		"Shutdown alone":                  {func(*lb.Pool, string) {}, 30 * time.Second},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{leaving(t)}, closeSpread(10*time.Minute))
			var wg sync.WaitGroup
			for range 20 {
				e := r.tunnel()
				wg.Go(func() { e.leaves(t) })
			}
			wg.Go(func() { tt.first(r.pool, r.backends[0].URL()) })
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), tt.left)
			defer cancel()
			if err := r.pool.Shutdown(ctx); err != nil {
				t.Errorf("Shutdown = %v", err)
			}
			wg.Wait()
		})
	}
	bubble(t, "Drain without time", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{leaving(t)})
		e := r.tunnel()
		ctx, cancel := context.WithTimeout(t.Context(), 0)
		defer cancel()
		if err := r.pool.Drain(ctx, r.backends[0].URL()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Drain = %v", err)
		}
		within(t, 0, func() { e.leaves(t) })
	})
}

// CloseWebSockets asks while the server in front waits for its requests.
func TestWebSocketsLeaveWhileTheServerShutsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.When(func(r *http.Request) bool { return r.URL.Path == "/chat" }, leaving(t), lbtest.Stream(1000, time.Second))})
		r.server.RegisterOnShutdown(r.pool.CloseWebSockets)
		var stream, wg sync.WaitGroup
		stream.Go(func() { r.do("GET", "", nil) })
		synctest.Wait()
		e := r.tunnel()
		wg.Go(func() { e.leaves(t) })
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		within(t, 30*time.Second, func() { r.server.Shutdown(ctx) })
		wg.Wait() // before the pool's Shutdown, which has no time left
		r.pool.Shutdown(ctx)
		stream.Wait()
	})
}

// A pool within a pool asks the clients of its WebSockets as well, and passes on that one
// has broken off.
func TestWebSocketsOfANestedPool(t *testing.T) {
	nest := func(t *testing.T, b lbtest.Behavior) *rig {
		r := newRig(t, []lbtest.Behavior{b}, closeSpread(2*time.Second))
		r.server.Handler = newPool(t, []lb.Target{{Name: "inner", Handler: r.pool}})
		return r
	}
	bubble(t, "drained", func(t *testing.T) {
		r := nest(t, leaving(t))
		e := r.tunnel()
		var wg sync.WaitGroup
		wg.Go(func() { e.leaves(t) })
		if err := r.pool.Drain(t.Context(), r.backends[0].URL()); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
	bubble(t, "reset", func(t *testing.T) {
		got := make(chan error, 1)
		r := nest(t, tunnelTo(func(e *tunnelEnd) {
			_, err := io.Copy(io.Discard, e)
			got <- err
		}))
		e := r.tunnel()
		io.WriteString(e, "half of a message")
		synctest.Wait()
		e.Conn.(interface{ SetLinger(int) error }).SetLinger(0)
		e.Close()
		if err := <-got; !isReset(err) {
			t.Errorf("the backend reads %v, want a reset", err)
		}
	})
}

// A connection of the user's transport that panics ends its tunnel, not the program.
func TestPanicInATunnelIsContained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, answers(1), lb.WithTransport(roundTripperFunc(func(req *http.Request) (*http.Response, error) {
			return &http.Response{
				StatusCode: 101, Header: http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "X-Of": {"backend"}},
				Body: panickyConn{},
			}, nil
		})))
		_, br := r.openWith(handshake)
		within(t, 0, func() { io.ReadAll(br) })
		synctest.Wait()
		r.wantIdle()
		if n := r.pool.Stats().Panics; n != 1 {
			t.Errorf("panics = %d, want 1", n)
		}
	})
}

type panickyConn struct{ io.ReadWriteCloser }

func (panickyConn) Read([]byte) (int, error) { panic("no") }
func (panickyConn) Close() error             { return nil }
