package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/lb"
)

// How WebSockets begin and end: refusals, closes, deaths, crowds and shutdown.

const (
	wsCode   = 4001
	wsReason = "gone for tea ☕"
)

func wantClosed(t *testing.T, where string, err error) {
	t.Helper()
	if code, reason := wsClosed(err); code != wsCode || reason != wsReason {
		t.Errorf("%s: closed with %d %q (%v), want %d %q", where, code, reason, err, wsCode, wsReason)
	}
}

// wantAnswered fails the test unless the close was answered; where the library itself
// has taken the answer, there is only its word that the connection is closed.
func wantAnswered(t *testing.T, where string, err error) {
	t.Helper()
	if code, _ := wsClosed(err); code != wsCode && !errors.Is(err, net.ErrClosed) {
		t.Errorf("%s: the connection ended with %v, want the answer to the close", where, err)
	}
}

func wsClientCloses(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo})
	c := r.dial(t, "/", wsOptions{})
	if err := c.shut(wsCode, wsReason); err != nil {
		t.Error(err)
	}
	wantClosed(t, "the backend", r.backend().end(t))
	wantAnswered(t, "the client", c.ended(t))
}

func wsBackendCloses(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: func(s *session) error {
		if err := s.shut(wsCode, wsReason); err != nil {
			return err
		}
		return s.read().err
	}})
	c := r.dial(t, "/", wsOptions{})
	wantClosed(t, "the client", c.ended(t))
	wantAnswered(t, "the backend", r.backend().end(t))
}

func wsClientGone(t *testing.T, p wsPair, reset bool) {
	r := p.rig(t, wsSetup{serve: echo})
	c := r.dial(t, "/", wsOptions{})
	if err := c.echo(text, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if n := r.pool.Stats().InFlight; n != 1 {
		t.Errorf("in flight = %d with an open WebSocket", n)
	}
	kill(c.raw, reset)
	if err := r.backend().end(t); err == nil || noClose(err) != nil {
		t.Errorf("the handler ended with %v", err)
	}
	r.waitIdle(t)
}

// The backend goes in mid-frame, because coder's client takes an end between frames for
// the end of the message.
func wsBackendGone(t *testing.T, p wsPair, reset bool) {
	die := make(chan struct{})
	r := p.rig(t, wsSetup{serve: func(s *session) error {
		if _, err := s.raw.Write(halfFrame()); err != nil {
			return err
		}
		<-die
		kill(s.raw.Conn, reset)
		return nil
	}})
	c := r.dial(t, "/", wsOptions{})
	wait(t, "the begin of a message", func() bool { return c.begun.Load() == 1 })
	close(die)
	if err := c.ended(t); noClose(err) != nil {
		t.Errorf("the connection ended with %v", err)
	}
	if err := r.backend().end(t); err != nil {
		t.Error(err)
	}
	if !reset { // else there is nothing more to wait for
		c.leave()
	}
	r.waitIdle(t)
}

func wsRefused(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo})
	for name, try := range map[string]func() (*wsClient, error){
		"by the handler": func() (*wsClient, error) { return r.tryDial("/forbidden", wsOptions{}) },
		"for its origin": func() (*wsClient, error) {
			return r.tryDial("/", wsOptions{header: http.Header{"Origin": {"https://elsewhere.example"}}})
		},
	} {
		c, err := try()
		if err == nil || c.answer == nil || c.answer.StatusCode != http.StatusForbidden {
			t.Errorf("%s: %v, %+v", name, err, c.answer)
			continue
		}
		body, err := io.ReadAll(c.answer.Body)
		if err != nil || name == "by the handler" && string(body) != "not you\n" {
			t.Errorf("%s: the answer is %q, %v", name, body, err)
		}
	}
	if s := r.pool.Stats(); s.Failures != 0 || s.Backends[0].Failures != 0 {
		t.Errorf("%d failures, %d of the backend", s.Failures, s.Backends[0].Failures)
	}
	if err := r.dial(t, "/", wsOptions{}).echo(text, []byte("hello")); err != nil {
		t.Error(err)
	}
}

// open opens as many WebSockets at once as the pair's crowd has and uses each.
func (r *wsRig) open(t *testing.T) {
	t.Helper()
	var all sync.WaitGroup
	for i := range r.crowd {
		all.Go(func() {
			c, err := r.tryDial("/", wsOptions{})
			if err == nil {
				err = c.echo(text, fmt.Appendf(nil, "I am %d", i))
			}
			if err != nil {
				t.Errorf("client %d: %v", i, err)
			}
		})
	}
	all.Wait()
	if s := r.pool.Stats(); s.InFlight != int64(r.crowd) || s.Failures != 0 {
		t.Errorf("%d in flight, %d failures", s.InFlight, s.Failures)
	}
}

func wsTurns(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo, backends: 3, spread: -1})
	r.open(t)
	var counts []int64
	for _, b := range r.backends {
		counts = append(counts, b.opened.Load())
	}
	slices.Sort(counts)
	if n := int64(r.crowd); counts[0]+counts[1]+counts[2] != n || counts[2]-counts[0] > 1 {
		t.Errorf("%d WebSockets went to %v", n, counts)
	}
}

func wsDead(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo, backends: 2, dead: []string{refusing(t), resetting(t)}})
	r.open(t)
	if a, b := r.backends[0].opened.Load(), r.backends[1].opened.Load(); a+b != int64(r.crowd) || a == 0 || b == 0 {
		t.Errorf("%d WebSockets went to one backend, %d to the other", a, b)
	}
	for _, b := range r.pool.Stats().Backends[:2] {
		if b.Failures == 0 {
			t.Errorf("%s has no failures", b.URL)
		}
	}
}

func wsShutdown(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo, backends: 2, spread: -1})
	var clients []*wsClient
	for range 4 {
		clients = append(clients, r.dial(t, "/", wsOptions{}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience) // the limit is ended by hand
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.pool.Shutdown(ctx) }()
	wait(t, "a refusal", func() bool {
		c, err := r.tryDial("/", wsOptions{})
		if err == nil {
			c.leave()
		}
		return err != nil && c.answer != nil && c.answer.StatusCode == http.StatusServiceUnavailable
	})
	for _, c := range clients {
		if err := c.echo(text, []byte("still here")); err != nil {
			t.Errorf("during shutdown: %v", err)
		}
	}
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Shutdown = %v", err)
		}
	case <-time.After(patience):
		t.Fatal("Shutdown does not return")
	}
	for _, c := range clients {
		if err := c.ended(t); noClose(err) != nil {
			t.Errorf("the connection ended with %v", err)
		}
	}
	r.waitIdle(t)
}

func wsShutdownInTime(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo, backends: 2, spread: -1})
	c := r.dial(t, "/", wsOptions{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.pool.Shutdown(ctx) }()
	if err := c.echo(text, []byte("the last")); err != nil {
		t.Error(err)
	}
	if err := c.shut(1000, ""); err != nil {
		t.Error(err)
	}
	_ = c.ended(t)
	c.leave()
	if err := <-ended; err != nil {
		t.Errorf("Shutdown = %v", err)
	}
}

// wsAskedToLeave shows that no message of the client is lost when it is asked to leave,
// and that the backend hears of it.
func wsAskedToLeave(t *testing.T, p wsPair) {
	const n = 8
	var got [n]atomic.Int64
	r := p.rig(t, wsSetup{spread: time.Second / 2, serve: func(s *session) error {
		for {
			m := s.read()
			if m.err != nil {
				return m.err
			}
			got[m.data[0]].Add(1)
			if err := s.write(m.kind, m.data); err != nil {
				return err
			}
		}
	}})
	var sent [n]int64
	var busy sync.WaitGroup
	for i := range n {
		c := r.dial(t, "/", wsOptions{})
		busy.Go(func() {
			defer c.leave()
			data := noise(int64(i), 10_000)
			data[0] = byte(i)
			for {
				if c.write(binaryData, data) != nil { // the library has answered the close
					break
				}
				sent[i]++
				if m, err := c.receive(); err != nil {
					if code, _ := wsClosed(err); code != 1001 {
						t.Errorf("the client's connection ended with %v", err)
					}
					break
				} else if !bytes.Equal(m.data, data) {
					t.Errorf("%d bytes came back as %d", len(data), len(m.data))
				}
			}
		})
	}
	if err := r.pool.Shutdown(t.Context()); err != nil {
		t.Errorf("Shutdown = %v", err)
	}
	busy.Wait()
	for i := range n {
		if code, _ := wsClosed(r.backend().end(t)); code != 1001 {
			t.Errorf("the backend's connection ended with code %d, want 1001", code)
		}
		if got := got[i].Load(); got < sent[i]-1 { // the last may have been written behind the answer
			t.Errorf("the backend got %d of %d messages", got, sent[i])
		}
	}
}

// Shutdown returns when its time is up, however many sockets are open and in use.
func TestShutdownEndsWebSocketsInTime(t *testing.T) {
	t.Parallel()
	const limit, atMost = 100 * time.Millisecond, 10 * time.Second
	for _, p := range wsPairs(plain) {
		t.Run(fmt.Sprintf("%s client, %s server", p.client.name, p.server.name), func(t *testing.T) {
			t.Parallel()
			r := p.rig(t, wsSetup{serve: echo, backends: 3, spread: -1})
			for range 10 {
				r.dial(t, "/", wsOptions{})
			}
			var busy sync.WaitGroup
			for _, c := range r.clients[:5] {
				busy.Go(func() {
					for c.echo(binaryData, noise(1, 10_000)) == nil {
					}
				})
			}
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			if err := r.pool.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Shutdown = %v", err)
			}
			if took := time.Since(began); took < limit || took > atMost {
				t.Errorf("Shutdown took %v, want %v and little more", took, limit)
			}
			busy.Wait()
			for _, c := range r.clients[5:] {
				if err := c.ended(t); noClose(err) != nil {
					t.Errorf("the connection ended with %v", err)
				}
			}
			r.waitIdle(t)
		})
	}
}

// A server's time-outs are for requests: they end neither a socket that is silent nor
// one that is in use.
func TestWebSocketsOutliveTheServersTimeouts(t *testing.T) {
	t.Parallel()
	const limit = time.Second
	var silent, busy []*wsClient
	for _, p := range wsPairs(withTimeouts(limit)) {
		r := p.rig(t, wsSetup{serve: echo})
		for _, list := range []*[]*wsClient{&silent, &busy} {
			wait(t, "a handshake that the time-outs leave whole", func() bool {
				c, err := r.tryDial("/", wsOptions{})
				if err == nil {
					*list = append(*list, c)
				}
				return err == nil
			})
		}
	}
	began := time.Now()
	wait(t, "the time-outs to pass", func() bool {
		for _, c := range busy {
			if err := c.echo(binaryData, noise(1, 1000)); err != nil {
				t.Fatalf("in use, after %v: %v", time.Since(began), err)
			}
		}
		return time.Since(began) > limit*5/4
	})
	for _, c := range silent {
		if err := c.echo(text, []byte("good morning")); err != nil {
			t.Errorf("silent for %v: %v", time.Since(began), err)
		}
	}
}

// The pool as the transport of a client: coder's takes one, gorilla's does not. What
// ends the context of the dial does not end the connection, as with net/http's own
// transport; a client's Timeout ends it as soon as Dial returns.
func TestWebSocketsPassThroughRoundTrip(t *testing.T) {
	t.Parallel()
	for _, server := range libraries {
		for name, limit := range map[string]time.Duration{"without Timeout": 0, "with Timeout": patience} {
			t.Run(server.name+" server, client "+name, func(t *testing.T) {
				t.Parallel()
				r := wsPair{server: server}.rig(t, wsSetup{serve: echo, dead: []string{refusing(t)}})
				client := &http.Client{Transport: r.pool, Timeout: limit}
				for range 3 {
					c := dialRoundTrip(t, r, client)
					for _, n := range []int{10, 100_000} {
						if err := c.echo(binaryData, noise(1, n)); err != nil {
							t.Fatal(err)
						}
					}
					if n := r.pool.Stats().InFlight; n != 1 {
						t.Errorf("in flight = %d with an open WebSocket", n)
					}
					if err := c.shut(wsCode, wsReason); err != nil {
						t.Error(err)
					}
					_ = c.ended(t)
					wantClosed(t, "the backend", r.backend().end(t))
					r.waitIdle(t)
				}
				if s := r.pool.Stats(); s.Failures != 0 || s.Cut != 0 {
					t.Errorf("failures %d, cut %d", s.Failures, s.Cut)
				}

				_, resp, err := dialCoderOver(t.Context(), client, "ws://pool.example/forbidden", wsOptions{})
				if err == nil || resp == nil || resp.StatusCode != http.StatusForbidden {
					t.Errorf("refused: %v, %v", err, resp)
				}
				c := dialRoundTrip(t, r, client)
				r.pool.Close()
				if err := c.ended(t); noClose(err) != nil {
					t.Errorf("the connection ended with %v", err)
				}
				if _, _, err := dialCoderOver(t.Context(), client, "ws://pool.example/", wsOptions{}); !errors.Is(err, lb.ErrClosed) {
					t.Errorf("a dial over a closed pool: %v", err)
				}
			})
		}
	}
}

// dialRoundTrip connects over a client whose transport is the pool, within a context
// that ends with the dial.
func dialRoundTrip(t *testing.T, r *wsRig, client *http.Client) *wsClient {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, _, err := dialCoderOver(ctx, client, "ws://pool.example/", wsOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := newWSClient(s)
	r.take(c)
	return c
}
