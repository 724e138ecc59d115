package h1_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// open opens n connections, which are idle when it returns.
func (r *rig) open(n int) {
	r.t.Helper()
	answers := make([]*http.Response, n)
	for i := range answers {
		resp, err := r.get()
		if err != nil {
			r.t.Fatal(err)
		}
		answers[i] = resp
	}
	for _, resp := range answers {
		io.ReadAll(resp.Body)
	}
	if s := r.pool.Stats(); s.Idle != int64(n) {
		r.t.Fatalf("Stats() = %+v, want %d idle", s, n)
	}
}

func (r *rig) wantIdle(want int64) {
	r.t.Helper()
	synctest.Wait()
	if s := r.pool.Stats(); s.Idle != want || s.Open != want {
		r.t.Errorf("Stats() = %+v, want %d idle and open", s, want)
	}
}

func TestMoreThanMaxIdleStayForASecondOnly(t *testing.T) {
	bubble(t, "five of two", h1.Config{MaxIdle: 2}, always(ok), func(t *testing.T, r *rig) {
		r.open(5)
		linger(900 * time.Millisecond)
		r.wantIdle(5)
		r.open(5) // for a lull is no reason to open them all again
		if r.dialed() != 5 {
			t.Errorf("%d connections, want 5", r.dialed())
		}
		linger(500 * time.Millisecond)
		r.wantIdle(5)
		linger(2 * time.Second)
		r.wantIdle(2)
		r.wantClosed(h1.ReasonIdle, 3)
		linger(time.Hour)
		r.wantIdle(2)
	})
}

func TestIdleConnectionsAreClosedInTime(t *testing.T) {
	bubble(t, "after IdleTimeout", h1.Config{IdleTimeout: 10 * time.Second}, always(ok), func(t *testing.T, r *rig) {
		r.open(2)
		linger(6 * time.Second)
		r.must() // one of the two is used
		linger(5 * time.Second)
		r.wantIdle(1)
		linger(6 * time.Second)
		r.wantIdle(0)
		r.wantClosed(h1.ReasonIdle, 2)
	})
	bubble(t, "or, between two looks at them, when they would be used", h1.Config{IdleTimeout: 1500 * time.Millisecond}, always(ok), func(t *testing.T, r *rig) {
		r.must()
		linger(1400 * time.Millisecond)
		r.must()
		linger(1500 * time.Millisecond)
		r.must()
		if r.dialed() != 2 {
			t.Errorf("%d connections, want 2", r.dialed())
		}
		r.wantClosed(h1.ReasonIdle, 1)
	})
	bubble(t, "never without one", h1.Config{}, always(ok), func(t *testing.T, r *rig) {
		r.must()
		linger(24 * time.Hour)
		r.must()
		r.wantIdle(1)
		if r.dialed() != 1 {
			t.Errorf("%d connections, want 1", r.dialed())
		}
	})
}

// TestConnectionsGrowOldAtDifferentTimes opens many at once: no two of them should end
// together, and all between nine tenths of MaxAge and all of it.
func TestConnectionsGrowOldAtDifferentTimes(t *testing.T) {
	bubble(t, "of a hundred seconds", h1.Config{MaxAge: 100 * time.Second}, always(ok), func(t *testing.T, r *rig) {
		r.open(20)
		linger(90*time.Second - time.Millisecond)
		r.open(20)
		if r.dialed() != 20 {
			t.Errorf("%d connections before nine tenths of MaxAge, want 20", r.dialed())
		}
		linger(5 * time.Second)
		r.open(20)
		if n := r.dialed(); n == 20 || n == 40 {
			t.Errorf("%d connections in between, want more than 20 and less than 40", n)
		}
		linger(5*time.Second + time.Millisecond)
		r.open(20)
		r.wantClosed(h1.ReasonIdle, 20)
		if r.dialed() != 40 {
			t.Errorf("%d connections after MaxAge, want 40", r.dialed())
		}
	})
}

func TestAnAnswerMayTakeLongerThanMaxAge(t *testing.T) {
	slow := func(p *peer) { p.hear(); linger(time.Hour); p.say(ok); p.hear() }
	bubble(t, "of a second", h1.Config{MaxAge: time.Second}, slow, func(t *testing.T, r *rig) { r.must() })
}

// TestRetireAndCloseIdle has one connection that is idle and one under way.
func TestRetireAndCloseIdle(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*h1.Pool)
		kept int64 // of the one under way
	}{
		{name: "CloseIdle closes what is idle now", end: (*h1.Pool).CloseIdle, kept: 1},
		{name: "Retire closes what becomes idle too", end: (*h1.Pool).Retire},
	} {
		bubble(t, c.name, h1.Config{}, always(ok), func(t *testing.T, r *rig) {
			r.open(2)
			resp, err := r.get()
			if err != nil {
				t.Fatal(err)
			}
			c.end(r.pool)
			c.end(r.pool) // once more changes nothing
			if s := r.pool.Stats(); s.Open != 1 || s.Idle != 0 || s.Closed[h1.ReasonAsked] != 1 {
				t.Errorf("Stats() = %+v, want one open, one closed", s)
			}
			if b, err := io.ReadAll(resp.Body); string(b) != "ok" || err != nil {
				t.Errorf("what was under way ends with %q, %v", b, err)
			}
			r.wantIdle(c.kept)
			r.must() // a pool that is retired still serves
			r.wantIdle(c.kept)
		})
	}
}

// TestWhoWasToldOfAConnectionMayCloseIt with what is on it.
func TestWhoWasToldOfAConnectionMayCloseIt(t *testing.T) {
	bubble(t, "under a request", h1.Config{}, mute, func(t *testing.T, r *rig) {
		done := make(chan error)
		go func() { _, err := r.get(); done <- err }()
		synctest.Wait()
		r.closeHeld()
		if err := <-done; err == nil {
			t.Error("RoundTrip() = nil")
		}
		r.wantClosed(h1.ReasonAsked, 1)
	})
	bubble(t, "while it is idle", h1.Config{}, always(ok), func(t *testing.T, r *rig) {
		r.must()
		r.closeHeld()
		r.wantIdle(0)
		r.must()
		r.wantClosed(h1.ReasonAsked, 1)
	})
}

// closeHeld closes all connections that the pool has told of.
func (r *rig) closeHeld() {
	r.mu.Lock()
	var all []io.Closer
	for c := range r.held {
		all = append(all, c)
	}
	r.mu.Unlock()
	for _, c := range all {
		c.Close()
	}
}

// TestWhatTheServerSaysOfItsPatienceIsObeyed with a second's margin.
func TestWhatTheServerSaysOfItsPatienceIsObeyed(t *testing.T) {
	const said = "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nContent-Length: 2\r\n\r\nok"
	for _, c := range []struct {
		name  string
		after time.Duration
		again bool
	}{
		{name: "before", after: 4*time.Second - time.Millisecond, again: true},
		{name: "after", after: 4 * time.Second},
	} {
		bubble(t, c.name, h1.Config{IdleTimeout: time.Minute}, always(said), func(t *testing.T, r *rig) {
			r.must()
			linger(c.after)
			r.must()
			if got := r.dialed() == 1; got != c.again {
				t.Errorf("the connection is used again: %v, want %v", got, c.again)
			}
		})
	}
}

// TestTheServersPatienceIsLearned from three connections that die, one after the other.
func TestTheServersPatienceIsLearned(t *testing.T) {
	impatient := func(p *peer) {
		for {
			p.SetReadDeadline(time.Now().Add(10 * time.Second))
			if p.hear() == nil {
				p.Close()
				return
			}
			p.say(ok)
		}
	}
	bubble(t, "of ten seconds", h1.Config{}, impatient, func(t *testing.T, r *rig) {
		for range 3 {
			r.must()
			linger(11 * time.Second)
			r.wantIdle(0)
		}
		r.wantClosed(h1.ReasonLeft, 3)
		for range 5 {
			r.must()
			linger(9500 * time.Millisecond)
		}
		r.wantIdle(0)
		r.wantClosed(h1.ReasonLeft, 3) // now this side is the first to give up
		r.wantClosed(h1.ReasonIdle, 5)
	})
}

// TestIdleConnectionsThatDieAreNoticedAtOnce where they can be watched.
func TestIdleConnectionsThatDieAreNoticedAtOnce(t *testing.T) {
	for _, c := range []struct {
		name string
		die  func(*peer)
	}{
		{name: "closed", die: func(p *peer) { p.Close() }},
		{name: "reset", die: func(p *peer) { p.Reset() }},
		{name: "half closed", die: func(p *peer) { p.CloseWrite() }},
		{name: "a time-out that is said", die: func(p *peer) { p.say("HTTP/1.1 408 x\r\nConnection: close\r\n\r\n"); p.Close() }},
		{name: "another answer", die: func(p *peer) { p.say(evil) }},
		{name: "a byte", die: func(p *peer) { p.say("x") }},
	} {
		bubble(t, c.name, h1.Config{}, always(ok), func(t *testing.T, r *rig) {
			r.open(3)
			c.die(r.peer(2))
			r.wantIdle(2)
			r.wantClosed(h1.ReasonLeft, 1)
			c.die(r.peer(1))
			c.die(r.peer(3))
			synctest.Wait()
			r.must()
			if r.dialed() != 4 {
				t.Errorf("%d connections, want 4", r.dialed())
			}
			r.wantIdle(1)
		})
	}
}

// TestRecordsBeyondAnAnswerAreNoticedWhereConnectionsAreWatched has bytes that lie in
// TLS's own buffer before anybody watches.
func TestRecordsBeyondAnAnswerAreNoticedWhereConnectionsAreWatched(t *testing.T) {
	clientTLS, serverTLS := tlsConfigs(t)
	synctest.Test(t, func(t *testing.T) {
		var r *rig
		r = newRig(t, h1.Config{Dial: func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
			nc, err := r.network.DialContext(ctx, "tcp", addr)
			if err != nil {
				return nil, err
			}
			tc := tls.Client(count(nc), clientTLS)
			return tc, tc.HandshakeContext(ctx)
		}}, func(p *peer) {
			segments := &gathering{Conn: p.Conn}
			tc := tls.Server(segments, serverTLS)
			br := bufio.NewReader(tc)
			for {
				if _, err := http.ReadRequest(br); err != nil {
					return
				}
				segments.hold = true
				io.WriteString(tc, ok)
				io.WriteString(tc, evil)
				segments.flush()
			}
		})
		for range 5 {
			r.must() // at once: the watcher may not have begun
		}
		if r.dialed() != 5 {
			t.Errorf("%d connections for 5 requests", r.dialed())
		}
		r.wantClosed(h1.ReasonLeft, 5)
	})
}

// gathering sends what is written while it holds in one piece.
type gathering struct {
	net.Conn
	hold bool
	held []byte
}

func (g *gathering) Write(p []byte) (int, error) {
	if !g.hold {
		return g.Conn.Write(p)
	}
	g.held = append(g.held, p...)
	return len(p), nil
}

func (g *gathering) flush() {
	g.hold = false
	_, _ = g.Conn.Write(g.held) // the client may have left
	g.held = nil
}
