package lb_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// tunnelEnd is one end of a tunnel.
type tunnelEnd struct {
	net.Conn
	br *bufio.Reader // of Conn, which may hold the first bytes
}

func (e *tunnelEnd) Read(p []byte) (int, error) { return e.br.Read(p) }

func (e *tunnelEnd) CloseWrite() error {
	return e.Conn.(interface{ CloseWrite() error }).CloseWrite()
}

// want reads text and nothing else.
func (e *tunnelEnd) want(t *testing.T, text string) {
	t.Helper()
	got := make([]byte, len(text))
	if n, err := io.ReadFull(e, got); err != nil || string(got) != text {
		t.Errorf("read %q, %v; want %q", got[:n], err, text)
	}
}

// wantEnd waits for the end of what the other side has to say.
func (e *tunnelEnd) wantEnd(t *testing.T, d time.Duration) {
	t.Helper()
	within(t, d, func() {
		if b, err := io.ReadAll(e); len(b) > 0 || err != nil && !isReset(err) {
			t.Errorf("read %q, %v; want the end", b, err)
		}
	})
}

func isReset(err error) bool { _, ok := errors.AsType[*net.OpError](err); return ok }

// tunnelTo switches to WebSocket, by name only, and lets f have the connection.
func tunnelTo(f func(*tunnelEnd)) lbtest.Behavior {
	return lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Of: backend\r\n\r\n")
		f(&tunnelEnd{c, rw.Reader})
	}))
}

// echo sends back what comes, also the end of it.
func echo(e *tunnelEnd) { io.Copy(e, e.br) }

const handshake = "GET /chat HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"

// tunnel opens a tunnel to a backend.
func (r *rig) tunnel() *tunnelEnd {
	r.t.Helper()
	c, br := r.openWith(handshake)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != 101 || resp.Header.Get("Upgrade") != "websocket" || resp.Header.Get("X-Of") != "backend" {
		r.t.Fatalf("answer to the handshake = %v, %v", resp, err)
	}
	return &tunnelEnd{c, br}
}

// wantClosed checks that nothing is left of any tunnel, and that no backend is blamed.
func (r *rig) wantClosed() {
	r.t.Helper()
	synctest.Wait()
	for _, b := range r.backends {
		if n := b.OpenConns(); n != 0 {
			r.t.Errorf("%d connections are open to %s", n, b.Name())
		}
	}
	r.wantIdle()
	r.wantUnblamed()
}

// Shutdown waits for tunnels until its time is up and then ends both sides of each;
// Close ends them at once (caddyserver/caddy PR#4895, dotnet/yarp#1756).
func TestTunnelsEndWithThePool(t *testing.T) {
	for name, tt := range map[string]struct {
		end   func(p *lb.Pool) error
		after time.Duration
		want  error
	}{
		"Shutdown": {func(p *lb.Pool) error {
			ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
			defer cancel()
			return p.Shutdown(ctx)
		}, 500 * time.Millisecond, context.DeadlineExceeded},
		"Close": {(*lb.Pool).Close, 0, nil},
	} {
		bubble(t, name, func(t *testing.T) {
			var left atomic.Int64
			r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) { e.wantEnd(t, time.Hour); left.Add(1) })}, closeSpread(-1))
			var wg sync.WaitGroup
			var tunnels []*tunnelEnd
			for range 5 {
				tunnels = append(tunnels, r.tunnel())
			}
			began := time.Now()
			for _, e := range tunnels {
				wg.Go(func() { e.wantEnd(t, tt.after) })
			}
			wg.Go(func() {
				if err := tt.end(r.pool); !errors.Is(err, tt.want) || time.Since(began) != tt.after {
					t.Errorf("ended with %v after %v, want %v after %v", err, time.Since(began), tt.want, tt.after)
				}
			})
			synctest.Wait()
			_, br := r.openWith(handshake)
			if codes, _, _ := finalAnswer(t, br); !slices.Equal(codes, []int{503}) {
				t.Errorf("a handshake that comes too late is answered with %v", codes)
			}
			wg.Wait()
			synctest.Wait()
			if n := left.Load(); n != 5 {
				t.Errorf("the backend saw %d of 5 tunnels end", n)
			}
			r.wantClosed()
		})
	}
	bubble(t, "Shutdown with a tunnel that ends in time", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{tunnelTo(echo)})
		e := r.tunnel()
		time.AfterFunc(time.Second, func() { e.Close() })
		within(t, time.Second, func() {
			if err := r.pool.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		})
		r.wantClosed()
	})
}

// A side that has said all still hears the rest (caddyserver/caddy#8026).
func TestHalfClosePassesATunnel(t *testing.T) {
	rest := text(1024)
	bubble(t, "the client's", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) {
			e.want(t, "bye")
			e.wantEnd(t, 0)
			linger(300 * time.Millisecond)
			if _, err := io.WriteString(e, rest); err != nil {
				t.Error(err)
			}
		})})
		for range 10 {
			e := r.tunnel()
			io.WriteString(e, "bye")
			e.CloseWrite()
			if b, err := io.ReadAll(e); string(b) != rest || err != nil {
				t.Errorf("the client read %d bytes, %v; want %d", len(b), err, len(rest))
			}
		}
		r.wantClosed()
	})
	bubble(t, "the backend's", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) {
			io.WriteString(e, "bye")
			e.CloseWrite()
			e.want(t, rest)
			e.wantEnd(t, 0)
		})})
		for range 10 {
			e := r.tunnel()
			e.want(t, "bye")
			e.wantEnd(t, 0)
			linger(300 * time.Millisecond)
			if n := r.pool.Stats().InFlight; n != 1 {
				t.Errorf("in flight = %d with one half of a tunnel", n)
			}
			io.WriteString(e, rest)
			e.Close()
		}
		r.wantClosed()
	})
}

// What a client sends in one piece with its handshake arrives behind it
// (golang/go#80875), and so does what a backend sends with its 101.
func TestFirstFramesOfATunnelArrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			c, rw, _ := http.NewResponseController(w).Hijack()
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello")
			(&tunnelEnd{c, rw.Reader}).want(t, "first frame and the second")
		}))})
		for i := range 200 {
			c, br := r.openWith(handshake + "first frame"[:1+i%11])
			io.WriteString(c, "first frame and the second"[1+i%11:])
			resp, err := http.ReadResponse(br, nil)
			if err != nil || resp.StatusCode != 101 {
				t.Fatalf("answer = %v, %v", resp, err)
			}
			(&tunnelEnd{c, br}).want(t, "hello")
			c.Close()
		}
		r.wantClosed()
	})
}

// A request for h2c goes out as an ordinary one, because requests inside of it would
// pass the pool unseen (golang/go#80416).
func TestH2CIsNotAskedFor(t *testing.T) {
	for upgrade, want := range map[string]string{
		"h2c": "", "H2C": "", "h2c\r\nUpgrade: h2c": "", "tls/1.0, h2c": "", "h2c, websocket": "websocket", "websocket\r\nUpgrade: h2c": "websocket",
	} {
		bubble(t, upgrade, func(t *testing.T) {
			r := newRig(t, answers(1))
			for _, code := range []int{200, 502} { // the second time from a backend that switches all the same
				_, br := r.openWith("GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nUpgrade: " + upgrade + "\r\n\r\n")
				codes, _, _ := finalAnswer(t, br)
				got := r.backends[0].Received()
				h := got[len(got)-1].Header
				wantConnection := ""
				if want != "" {
					wantConnection = "Upgrade"
				}
				if h.Get("Upgrade") != want || h.Get("Connection") != wantConnection || h["Http2-Settings"] != nil {
					t.Errorf("the backend got %v", h)
				}
				if !slices.Equal(codes, []int{code}) {
					t.Errorf("the client got %v, want %d", codes, code)
				}
				r.backends[0].Set(lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"))
			}
		})
	}
}

// A handshake that is refused makes no tunnel: what follows on the connection is a
// request like any other (kemalcr/kemal PR#767, oauth2-proxy/oauth2-proxy#1347).
func TestRefusedHandshakeMakesNoTunnel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.When(func(r *http.Request) bool { return r.URL.Path == "/chat" }, lbtest.AnswerStatus(403, "no"), lbtest.Answer())})
		for range 50 {
			c, br := r.openWith(handshake + "GET /second HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n")
			for _, want := range []int{403, 200} {
				if codes, _, _ := finalAnswer(t, br); !slices.Equal(codes, []int{want}) {
					t.Fatalf("codes = %v, want %d", codes, want)
				}
			}
			c.Close()
		}
		for i, got := range r.backends[0].Received() {
			if want := []string{"/chat", "/second"}[i%2]; got.Target != want || got.Header.Get("X-Forwarded-For") != "198.18.0.1" {
				t.Errorf("request %d is for %s with %v", i, got.Target, got.Header)
			}
		}
		if s := r.pool.Stats(); s.Requests != 100 || s.Backends[0].Requests != 100 {
			t.Errorf("requests = %d, of the backend %d; want 100", s.Requests, s.Backends[0].Requests)
		}
		r.wantIdle()
	})
}

// A tunnel changes no byte, in either direction (vulcand/oxy#150).
func TestTunnelIsTransparent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		noise := func(stream uint64) []byte {
			rng, b := rand.New(rand.NewPCG(seed, stream)), make([]byte, 1<<20)
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			return b
		}
		fromClient, fromBackend := noise(1), noise(2)
		talk := func(e *tunnelEnd, send, expect []byte) {
			var wg sync.WaitGroup
			wg.Go(func() {
				for piece := range slices.Chunk(send, 7777) {
					e.Write(piece)
				}
				e.CloseWrite()
			})
			sum := sha256.New()
			n, err := io.Copy(sum, e.br)
			if want := sha256.Sum256(expect); err != nil || !slices.Equal(sum.Sum(nil), want[:]) {
				t.Errorf("read %d bytes, %v; want the %d that were sent", n, err, len(expect))
			}
			wg.Wait()
		}
		r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) { talk(e, fromBackend, fromClient) })})
		talk(r.tunnel(), fromClient, fromBackend)
		r.wantClosed()
		if s := r.pool.Stats().Backends[0]; s.SentBytes < 1<<20 || s.ReceivedBytes < 1<<20 {
			t.Errorf("sent = %d, received = %d; want more than 1 MiB of both", s.SentBytes, s.ReceivedBytes)
		}
	})
}

// The header of a handshake follows the rules of all requests (vulcand/oxy#63).
func TestHandshakeHasTheHeaderOfAnyRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, answers(1))
		const fields = "X-Forwarded-For: 1.2.3.4\r\nX-Real-IP: 1.2.3.4\r\nForwarded: for=1.2.3.4\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\nCookie: a=b\r\nAccept: */*\r\n\r\n"
		c, br := r.openWith("GET / HTTP/1.1\r\nHost: x\r\nConnection: X-Hop\r\n" + fields)
		finalAnswer(t, br)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: X-Hop, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\nSec-WebSocket-Version: 13\r\n"+fields)
		finalAnswer(t, br)
		got := r.backends[0].Received()
		plain, upgrade := got[0].Header, got[1].Header
		for name, want := range map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-Websocket-Key": "k", "Sec-Websocket-Version": "13"} {
			if upgrade.Get(name) != want || plain[name] != nil {
				t.Errorf("%s = %q, without an upgrade %q", name, upgrade[name], plain[name])
			}
			delete(upgrade, name)
		}
		if !maps.EqualFunc(plain, upgrade, slices.Equal) || plain.Get("X-Forwarded-For") != "198.18.0.1" || plain.Get("Cookie") != "a=b" || plain["X-Hop"] != nil {
			t.Errorf("an ordinary request has\n\t%v\nand a handshake\n\t%v", plain, upgrade)
		}
	})
}

// A middleware's writer lets upgrades pass if it can be unwrapped; else the client is
// told, and the connection to the backend is closed (traefik/traefik#452,
// go-chi/chi#544).
func TestUpgradeBehindAMiddleware(t *testing.T) {
	bubble(t, "with Unwrap, and every option set", func(t *testing.T) {
		r := newBackends(t, 2)
		for _, b := range r.backends {
			b.Set(tunnelTo(echo))
		}
		r.startPool(lb.WithHealthCheck(everySecond()), lb.WithPassiveHealth(lb.PassiveHealth{}), lb.WithBalancer(lb.LeastConnections()),
			lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}}), lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second}), lb.WithUpgrades(lb.Upgrades{}))
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			ctx, _ := lb.Record(req.Context())
			w.Header().Set("X-Outer", "kept")
			r.pool.ServeHTTP(unwrapOnly{unwrapOnly{w}}, req.WithContext(ctx))
		})
		for range 10 {
			c, br := r.openWith(handshake + "ping")
			resp, err := http.ReadResponse(br, nil)
			if err != nil || resp.StatusCode != 101 || resp.Header.Get("X-Outer") != "kept" {
				t.Fatalf("answer = %v, %v", resp, err)
			}
			(&tunnelEnd{c, br}).want(t, "ping")
			c.Close()
		}
		synctest.Wait()
		r.wantIdle()
	})
	bubble(t, "without", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{tunnelTo(echo)})
		r.wrapped(func(w http.ResponseWriter) http.ResponseWriter { return plainWriter{unwrapOnly{w}} })
		for i := range 10 {
			c, br := r.openWith(handshake)
			if codes, _, _ := finalAnswer(t, br); !slices.Equal(codes, []int{502}) {
				t.Errorf("codes = %v, want 502", codes)
			}
			c.Close()
			rec := httptest.NewRecorder()
			req := httptest.NewRequest("GET", "/", nil)
			req.Header.Set("Connection", "Upgrade")
			req.Header.Set("Upgrade", "websocket")
			if r.pool.ServeHTTP(rec, req); rec.Code != 502 {
				t.Errorf("recorder got %d, want 502", rec.Code)
			}
			if n := r.pool.Stats().Failures; n != int64(2*(i+1)) {
				t.Errorf("failures = %d, want %d", n, 2*(i+1))
			}
		}
		r.wantClosed()
	})
}

// A handshake that did not reach its backend goes to another (traefik/traefik
// PR#3825).
func TestHandshakesAreRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), tunnelTo(echo)}, noEjection(), lb.WithRetry(lb.RetryPolicy{Attempts: 2}))
		for range 50 {
			e := r.tunnel()
			io.WriteString(e, "ping")
			e.want(t, "ping")
			e.Close()
		}
		synctest.Wait()
		if s := r.pool.Stats(); s.Failures != 0 || s.Retries != 25 {
			t.Errorf("failures = %d, retries = %d; want 0, 25", s.Failures, s.Retries)
		}
		r.wantIdle()
	})
}

// The limits of WithUpgrades end a tunnel, for both sides.
func TestLimitsEndATunnel(t *testing.T) {
	for name, tt := range map[string]struct {
		limits        lb.Upgrades
		talk          time.Duration // for which both sides talk, once a second
		atLeast, most time.Duration
	}{
		"idle from the start": {lb.Upgrades{IdleTimeout: 3 * time.Second}, 0, 3 * time.Second, 6 * time.Second},
		"idle after a talk":   {lb.Upgrades{IdleTimeout: 3 * time.Second}, 20 * time.Second, 23 * time.Second, 26 * time.Second},
		"in mid-talk":         {lb.Upgrades{MaxDuration: 10500 * time.Millisecond}, time.Minute, 10500 * time.Millisecond, 10500 * time.Millisecond},
		"whichever is first":  {lb.Upgrades{IdleTimeout: 3 * time.Second, MaxDuration: 5 * time.Second}, time.Minute, 5 * time.Second, 5 * time.Second},
	} {
		bubble(t, name, func(t *testing.T) {
			var backendLeft time.Time
			r := newRig(t, []lbtest.Behavior{tunnelTo(func(e *tunnelEnd) { echo(e); backendLeft = time.Now() })}, lb.WithUpgrades(tt.limits))
			e := r.tunnel()
			began := time.Now()
			go func() {
				for time.Since(began) < tt.talk {
					fmt.Fprint(e, ".")
					linger(time.Second)
				}
			}()
			io.Copy(io.Discard, e)
			if took := time.Since(began); took < tt.atLeast || took > tt.most {
				t.Errorf("ended after %v, want %v to %v", took, tt.atLeast, tt.most)
			}
			r.wantClosed()
			if !backendLeft.Equal(time.Now()) {
				t.Errorf("the backend saw the end at %v, the client at %v", backendLeft, time.Now())
			}
			advance(time.Minute) // until both have noticed
		})
	}
}

// The time-outs of the server are for requests: a tunnel outlives them.
func TestTunnelOutlivesTheServersTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{tunnelTo(echo)}, lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second}))
		synctest.Wait() // until the server has begun
		r.server.ReadTimeout, r.server.WriteTimeout, r.server.IdleTimeout = time.Second, time.Second, time.Second
		e := r.tunnel()
		for range 5 {
			linger(time.Hour)
			io.WriteString(e, "ping")
			e.want(t, "ping")
		}
		e.Close()
		r.wantClosed()
	})
}

// A tunnel ends with the context of its request, as any request does.
func TestTunnelEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{tunnelTo(echo)})
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			ctx, cancel := context.WithTimeout(req.Context(), time.Second)
			defer cancel()
			r.pool.ServeHTTP(w, req.WithContext(ctx))
		})
		e := r.tunnel()
		e.SetReadDeadline(time.Now().Add(time.Minute))
		e.wantEnd(t, time.Second)
		r.wantClosed()
	})
}

// A backend that switches before it has the request's body makes no tunnel, in which
// the rest of the body and the first frames would be one.
func TestBackendThatSwitchesDuringAnUpload(t *testing.T) {
	for name, body := range map[string]string{"length": "Content-Length: 100000\r\n\r\nsome", "chunked": "Transfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n"} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{tunnelTo(echo)}, noEjection())
			for range 20 {
				c, br := r.openWith(strings.TrimSuffix(handshake, "\r\n") + body)
				codes, _, _ := finalAnswer(t, br)
				if !slices.Equal(codes, []int{502}) {
					t.Errorf("codes = %v, want 502", codes)
				}
				c.Close()
			}
			synctest.Wait()
			r.wantIdle()
		})
	}
}
