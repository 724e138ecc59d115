package integration

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"

	"example.com/lb"
)

// A WebSocket that was closed as it should be has not lost its client.
func TestWebSocketsThatAreClosedAreNotClientsThatLeft(t *testing.T) {
	for _, p := range wsPairs(plain) {
		t.Run(p.client.name+" client, "+p.server.name+" server", func(t *testing.T) {
			r := p.rig(t, wsSetup{serve: echo})
			c := r.dial(t, "/", wsOptions{})
			if err := c.shut(1000, ""); err != nil {
				t.Error(err)
			}
			_ = c.ended(t)
			c.leave()
			r.waitIdle(t)
			if err := r.pool.Shutdown(t.Context()); err != nil { // all is counted when it returns
				t.Error(err)
			}
			if s := r.pool.Stats(); s.ClientClosed != 0 || s.Cut != 0 || s.Failures != 0 {
				t.Errorf("client closed %d, cut %d, failures %d", s.ClientClosed, s.Cut, s.Failures)
			}
		})
	}
}

// Who resets in mid-message is seen to reset: an orderly end is the end of the message
// to coder's library.
func TestResetsPassThroughTunnels(t *testing.T) {
	half := func(s socket) error { return s.begin(binaryData, func() error { return nil }, noise(1, 10_000)) }
	for name, f := range map[string]front{"plain": plain, "TLS": func(pool http.Handler) *httptest.Server { return httptest.NewTLSServer(pool) }} {
		for _, p := range wsPairs(f) {
			t.Run(name+"/"+p.client.name+" client, "+p.server.name+" server", func(t *testing.T) {
				r := p.rig(t, wsSetup{serve: func(s *session) error {
					if err := half(s); err != nil {
						return err
					}
					kill(s.raw.Conn, true)
					return nil
				}})
				c := r.dial(t, "/", wsOptions{})
				if m, err := c.receive(); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("the client has got %d bytes and %v", len(m.data), err)
				}
				r = p.rig(t, wsSetup{serve: func(s *session) error { return s.read().err }})
				c = r.dial(t, "/", wsOptions{})
				if err := half(c); err != nil {
					t.Fatal(err)
				}
				kill(c.raw, true)
				if err := r.backend().end(t); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("the backend has got %v", err)
				}
			})
		}
	}
}

type ownTransport struct{ *http.Transport }

// Shutdown ends WebSockets over a RoundTripper of the user's as well.
func TestShutdownEndsWebSocketsOverAnyTransport(t *testing.T) {
	for _, lib := range libraries {
		b := startWSBackend(t, lib, wsSetup{serve: echo})
		pool, err := lb.New(lb.Targets(b.server.URL), lb.WithTransport(ownTransport{&http.Transport{}}), lb.WithUpgrades(lb.Upgrades{CloseSpread: -1}))
		if err != nil {
			t.Fatal(err)
		}
		r := &wsRig{wsPair: wsPair{client: lib}, pool: pool, server: httptest.NewServer(pool), backends: []*wsBackend{b}}
		t.Cleanup(r.server.Close)
		c := r.dial(t, "/", wsOptions{})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := pool.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Shutdown = %v", err)
		}
		_ = c.ended(t)
		r.end(t)
	}
}

// What an answer's reader has read over a RoundTripper of the user's is counted.
func TestBytesOverAnyTransportAreCounted(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 1000)) }))
	defer s.Close()
	pool, err := lb.New(lb.Targets(s.URL), lb.WithTransport(ownTransport{&http.Transport{}}), lb.WithUpgrades(lb.Upgrades{CloseSpread: -1}))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	resp, err := (&http.Client{Transport: pool}).Get("http://pool.example/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	if n := pool.Stats().Backends[0].ReceivedBytes; n != 1000 {
		t.Errorf("received %d bytes, want 1000", n)
	}
}
