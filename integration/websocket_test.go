package integration

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
)

// WebSockets of two libraries through a pool: each client with each server, behind
// each front.

func TestWebSocketsPass(t *testing.T) {
	t.Parallel()
	for _, f := range []struct {
		name  string
		start front
		crowd int
	}{
		{"plain", plain, 50},
		{"TLS", func(pool http.Handler) *httptest.Server { return httptest.NewTLSServer(pool) }, 50},
		{"time-outs", withTimeouts(5 * time.Second), 10},
	} {
		for _, p := range wsPairs(f.start) {
			p.crowd = f.crowd
			t.Run(fmt.Sprintf("%s/%s client, %s server", f.name, p.client.name, p.server.name), func(t *testing.T) {
				t.Parallel()
				for _, c := range wsCases {
					t.Run(c.name, func(t *testing.T) {
						t.Parallel()
						c.run(t, p)
					})
				}
			})
		}
	}
}

func plain(pool http.Handler) *httptest.Server { return httptest.NewServer(pool) }

// wsPairs returns each client with each server.
func wsPairs(f front) (pairs []wsPair) {
	for _, client := range libraries {
		for _, server := range libraries {
			pairs = append(pairs, wsPair{client: client, server: server, front: f})
		}
	}
	return pairs
}

var wsCases = []struct {
	name string
	run  func(t *testing.T, p wsPair)
}{
	{"the handshake arrives as it was sent", wsHandshake},
	{"messages come back as they were sent", wsEcho},
	{"long messages pass both ways at once", wsLong},
	{"a message in parts stays in parts", wsParts},
	{"the backend answers pings", wsPings},
	{"compression is between the two ends", wsDeflate},
	{"the client's closing code arrives", wsClientCloses},
	{"the backend's closing code arrives", wsBackendCloses},
	{"a client that leaves ends the handler", func(t *testing.T, p wsPair) { wsClientGone(t, p, false) }},
	{"a client that resets ends the handler", func(t *testing.T, p wsPair) { wsClientGone(t, p, true) }},
	{"a backend that leaves in mid-message is an error", func(t *testing.T, p wsPair) { wsBackendGone(t, p, false) }},
	{"a backend that resets in mid-message is an error", func(t *testing.T, p wsPair) { wsBackendGone(t, p, true) }},
	{"a refusal arrives", wsRefused},
	{"backends take turns", wsTurns},
	{"dead backends cost no handshake", wsDead},
	{"shutdown waits, and cuts what it has waited for in vain", wsShutdown},
	{"shutdown within its time cuts nothing", wsShutdownInTime},
	{"shutdown asks to leave", wsAskedToLeave},
}

func wsHandshake(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo, accept: wsOptions{protocols: []string{"v2.chat"}}})
	scheme, host, _ := strings.Cut(r.server.URL, "://")
	// Both servers compare the origin with the Host.
	c := r.dial(t, "/room%2F1?q=a+b", wsOptions{
		protocols: []string{"v1.chat", "v2.chat"},
		header:    http.Header{"Origin": {r.server.URL}, "Cookie": {"id=1"}, "X-Forwarded-For": {"1.2.3.4"}},
	})
	s := r.backend().session(t)
	if c.answer.StatusCode != http.StatusSwitchingProtocols || c.protocol() != "v2.chat" || s.protocol() != "v2.chat" {
		t.Errorf("status %d, protocol %q at the client, %q at the backend", c.answer.StatusCode, c.protocol(), s.protocol())
	}
	if s.request.RequestURI != "/room%2F1?q=a+b" || s.request.Host != host {
		t.Errorf("the backend was asked for %s of %s, want that of %s", s.request.RequestURI, s.request.Host, host)
	}
	for field, want := range map[string]string{
		"Origin": r.server.URL, "Cookie": "id=1",
		"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": scheme, "X-Forwarded-Host": host,
		"Upgrade": "websocket", "Connection": "Upgrade", "Sec-Websocket-Version": "13",
	} {
		if got := strings.Join(s.request.Header[field], "|"); got != want {
			t.Errorf("the backend was sent %s: %s, want %s", field, got, want)
		}
	}
	if err := c.echo(text, []byte("hello")); err != nil {
		t.Error(err)
	}
}

func wsEcho(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo})
	c := r.dial(t, "/", wsOptions{})
	for _, n := range []int{0, 1, 125, 126, 65535, 65536} {
		if err := c.echo(text, bytes.Repeat([]byte("x"), n)); err != nil {
			t.Errorf("text: %v", err)
		}
		if err := c.echo(binaryData, noise(int64(n), n)); err != nil {
			t.Errorf("binary: %v", err)
		}
	}
	if err := c.echo(text, []byte("größer als €, 世界 🌍")); err != nil {
		t.Error(err)
	}
}

// noise is n bytes of seeded chance.
func noise(seed int64, n int) []byte {
	data := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)}).Read(data) // never fails
	return data
}

func wsLong(t *testing.T, p wsPair) {
	up, down := noise(1, 1<<20), noise(2, 1<<20)
	both := func(s socket, next func() wsMessage, sent, want []byte) error {
		wrote := make(chan error, 1)
		go func() { wrote <- s.write(binaryData, sent) }()
		m := next()
		if m.err == nil && sha256.Sum256(m.data) != sha256.Sum256(want) {
			m.err = fmt.Errorf("the message of %d bytes is not as it was sent", len(m.data))
		}
		return errors.Join(m.err, <-wrote)
	}
	r := p.rig(t, wsSetup{serve: func(s *session) error { return both(s, s.read, down, up) }})
	c := r.dial(t, "/", wsOptions{})
	next := func() wsMessage {
		m, err := c.receive()
		m.err = err
		return m
	}
	if err := both(c, next, up, down); err != nil {
		t.Errorf("at the client: %v", err)
	}
	if err := r.backend().end(t); err != nil {
		t.Errorf("at the backend: %v", err)
	}
}

// A ping goes out between the parts and arrives before the next part is sent: nothing
// waits for the end of the message.
func wsParts(t *testing.T, p wsPair) {
	var atBackend, atClient seen
	between := func(s socket, peer *seen) func() error {
		n := 0
		return func() error {
			n++
			s.ping("between")
			return peer.await(n)
		}
	}
	parts := [][]byte{bytes.Repeat([]byte("a"), 1500), bytes.Repeat([]byte("b"), 2500), bytes.Repeat([]byte("c"), 1500)}
	send := func(s socket, peer *seen) error {
		return errors.Join(s.begin(text, between(s, peer), parts...), s.end())
	}
	r := p.rig(t, wsSetup{
		accept: wsOptions{onPing: func(payload string) bool { atBackend.add(payload); return true }},
		serve: func(s *session) error {
			if m := s.read(); m.err != nil || !bytes.Equal(m.data, slices.Concat(parts...)) {
				return fmt.Errorf("%d bytes have come: %w", len(m.data), m.err)
			}
			sent := make(chan error, 1)
			go func() { sent <- send(s, &atClient) }()
			m := s.read() // until the client leaves
			return errors.Join(<-sent, noClose(m.err))
		},
	})
	c := r.dial(t, "/", wsOptions{onPing: func(payload string) bool { atClient.add(payload); return true }})
	if err := send(c, &atBackend); err != nil {
		t.Fatal(err)
	}
	if m, err := c.receive(); err != nil || !bytes.Equal(m.data, slices.Concat(parts...)) {
		t.Fatalf("%d bytes have come: %v", len(m.data), err)
	}
	s := r.backend().session(t)
	in, out := s.raw.frames()
	wantParts(t, "to the backend", in, len(parts))
	wantParts(t, "from the backend", out, len(parts))
	c.leave()
	if err := r.backend().end(t); err != nil {
		t.Error(err)
	}
}

// noClose returns err if it tells of a frame that nobody has sent.
func noClose(err error) error {
	if code, _ := wsClosed(err); code != -1 {
		return err
	}
	return nil
}

// wantParts fails the test unless list has a message of at least n frames with as many
// pings between them.
func wantParts(t *testing.T, where string, list []wsFrame, n int) {
	t.Helper()
	frames, pings, whole := 0, 0, false
	for _, f := range list {
		switch {
		case f.opcode == opText && frames == 0, f.opcode == opContinuation && frames > 0 && !whole:
			frames++
			whole = f.last
		case f.opcode == opPing && frames > 0 && !whole:
			pings++
		}
	}
	if frames < n || pings < n || !whole {
		t.Errorf("%s: %d frames with %d pings between them, whole: %v; want %d: %+v", where, frames, pings, whole, n, list)
	}
}

// Of two pings either end answers only the second, and so no other pong may come.
func wsPings(t *testing.T, p wsPair) {
	var atBackend, atClient, toBackend, toClient seen // pings at, pongs to
	mute := func(pings *seen) func(string) bool {
		return func(payload string) bool { return pings.add(payload) > 1 }
	}
	r := p.rig(t, wsSetup{
		accept: wsOptions{onPing: mute(&atBackend), onPong: func(payload string) { toBackend.add(payload) }},
		serve:  echo,
	})
	c := r.dial(t, "/", wsOptions{onPing: mute(&atClient), onPong: func(payload string) { toClient.add(payload) }})
	s := r.backend().session(t)
	for _, way := range []struct {
		name         string
		from         socket
		pings, pongs *seen
	}{{"from the client", c, &atBackend, &toClient}, {"from the backend", s, &atClient, &toBackend}} {
		var sent []string
		for i := range 2 {
			sent = append(sent, way.from.ping(fmt.Sprintf("payload %d", i)))
			if err := way.pings.await(i + 1); err != nil {
				t.Fatal(err)
			}
		}
		if err := way.pongs.await(1); err != nil {
			t.Fatal(err)
		}
		if err := c.echo(text, []byte("behind all pongs")); err != nil {
			t.Fatal(err)
		}
		if pings := way.pings.all(); !slices.Equal(pings, sent) {
			t.Errorf("%s: pings %q arrived as %q", way.name, sent, pings)
		}
		if pongs := way.pongs.all(); !slices.Equal(pongs, sent[1:]) {
			t.Errorf("%s: pongs %q, want %q", way.name, pongs, sent[1:])
		}
	}
}

func wsDeflate(t *testing.T, p wsPair) {
	r := p.rig(t, wsSetup{serve: echo, accept: wsOptions{deflate: true}})
	c := r.dial(t, "/", wsOptions{deflate: true})
	s := r.backend().session(t)
	const extensions = "Sec-Websocket-Extensions"
	for where, h := range map[string]http.Header{"the backend": s.request.Header, "the client": c.answer.Header} {
		if !strings.Contains(h.Get(extensions), "permessage-deflate") {
			t.Errorf("%s was sent %s: %q", where, extensions, h[extensions])
		}
	}
	long := bytes.Repeat([]byte("the quick brown fox "), 2000)
	for range 3 { // the later ones with a context to refer to, if the libraries keep it
		if err := c.echo(text, long); err != nil {
			t.Fatal(err)
		}
	}
	in, out := s.raw.frames()
	for way, list := range map[string][]wsFrame{"to the backend": in, "from the backend": out} {
		messages, sum := 0, 0
		for _, f := range list {
			if f.opcode == opText && f.compressed {
				messages++
			}
			sum += f.length
		}
		if messages != 3 || sum > len(long) {
			t.Errorf("%s: %d compressed messages, %d bytes in all frames", way, messages, sum)
		}
	}

	plain := r.dial(t, "/", wsOptions{})
	if got := plain.answer.Header[extensions]; got != nil {
		t.Errorf("nobody has asked for %q", got)
	}
	if err := plain.echo(text, long); err != nil {
		t.Error(err)
	}
}
