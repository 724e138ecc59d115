package h1_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/textproto"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
	"example.com/lb/internal/memnet"
)

const (
	addr      = "a.test:80"
	ok        = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	noContent = "HTTP/1.1 204 No Content\r\n\r\n"
)

// rig is a client, which is a pool of h1 or an http.Transport, and a server on an
// in-memory network. In a bubble it also finds leaks: the bubble does not end while a
// goroutine of it lives.
type rig struct {
	t         *testing.T
	network   *memnet.Network
	pool      *h1.Pool
	transport *http.Transport // in place of pool, if not nil

	mu    sync.Mutex // guards the following
	peers []*peer
	held  map[io.Closer]bool // connections that the pool has told of
}

// peer is the server's end of a connection.
type peer struct {
	*memnet.Conn
	br     *bufio.Reader
	number int // of the connection, from 1
}

// hear reads a request with its body; nil when there is none.
func (p *peer) hear() *http.Request {
	req, err := http.ReadRequest(p.br)
	if err != nil {
		return nil
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil
	}
	req.Body = io.NopCloser(strings.NewReader(string(body)))
	return req
}

// say writes s; a client that has left does not hear it.
func (p *peer) say(s string) { _, _ = io.WriteString(p, s) }

// always answers each request with answer.
func always(answer string) func(*peer) {
	return func(p *peer) {
		for p.hear() != nil {
			p.say(answer)
		}
	}
}

// mute hears a request and does not answer.
func mute(p *peer) { p.hear(); p.hear() }

// once answers the first request with answer and closes.
func once(answer string) func(*peer) {
	return func(p *peer) {
		if p.hear() != nil {
			p.say(answer)
			p.Close()
		}
	}
}

// TestMain keeps quiet what net/http's transport logs of servers that say too much.
func TestMain(m *testing.M) {
	log.SetOutput(io.Discard)
	os.Exit(m.Run())
}

// newRig starts a server that serves each connection with serve on a goroutine of its
// own, and a pool with cfg, in which only what differs need be said.
func newRig(t *testing.T, cfg h1.Config, serve func(*peer)) *rig {
	t.Helper()
	r := &rig{t: t, network: memnet.New(), held: make(map[io.Closer]bool)}
	ln, err := r.network.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			p := &peer{nc.(*memnet.Conn), bufio.NewReader(nc), len(r.peers) + 1}
			r.peers = append(r.peers, p)
			r.mu.Unlock()
			go serve(p)
		}
	}()
	r.pool = h1.New(r.settings(cfg))
	t.Cleanup(func() {
		r.pool.Retire()
		if r.transport != nil {
			r.transport.CloseIdleConnections()
		}
		synctest.Wait()
		r.checkNothingLeft()
		ln.Close()
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, p := range r.peers {
			p.Close()
		}
	})
	return r
}

func (r *rig) settings(cfg h1.Config) h1.Config {
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
			nc, err := r.network.DialContext(ctx, "tcp", addr)
			if err != nil {
				return nil, err
			}
			return count(nc), nil
		}
	}
	cfg.Go = func(f func()) bool { go f(); return true }
	cfg.Opened = func(c io.Closer) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.held[c] = true
		return true
	}
	cfg.Closed = func(c io.Closer) {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.held, c)
	}
	if cfg.MaxIdle == 0 {
		cfg.MaxIdle = 100
	}
	if cfg.MaxHeaderBytes == 0 {
		cfg.MaxHeaderBytes = 1 << 20
	}
	if cfg.ContinueTimeout == 0 {
		cfg.ContinueTimeout = time.Second
	}
	return cfg
}

// checkNothingLeft holds the counts to what the pool has told: a test that has closed
// what it got leaves no connection.
func (r *rig) checkNothingLeft() {
	r.t.Helper()
	r.mu.Lock()
	held := len(r.held)
	r.mu.Unlock()
	s := r.pool.Stats()
	sum := int64(0)
	for _, n := range s.Closed {
		sum += n
	}
	if s.Open != 0 || s.Idle != 0 || held != 0 || s.Opened != sum {
		r.t.Errorf("at the end: stats %+v, %d connections held, want none", s, held)
	}
}

// dialed is how many connections the server has accepted.
func (r *rig) dialed() int {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.peers)
}

// peer returns the server's end of the connection of that number, from 1.
func (r *rig) peer(number int) *peer {
	r.t.Helper()
	if n := r.dialed(); n < number {
		r.t.Fatalf("the server has %d connections, want %d", n, number)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.peers[number-1]
}

// send sends req over the pool or the transport.
func (r *rig) send(req *http.Request) (*http.Response, error) {
	if r.transport != nil {
		return r.transport.RoundTrip(req)
	}
	return r.pool.RoundTrip(req.Context(), new(h1.Exchange), outgoing(req), silent{}, req)
}

// get sends a GET.
func (r *rig) get() (*http.Response, error) { return r.send(request(r.t, "GET", nil)) }

// swap sends req and returns the answer read to its end.
func (r *rig) swap(req *http.Request) (*http.Response, string, error) {
	resp, err := r.send(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp, string(body), err
}

// must is a GET that has to be answered with ok.
func (r *rig) must() {
	r.t.Helper()
	if _, body, err := r.swap(request(r.t, "GET", nil)); body != "ok" || err != nil {
		r.t.Fatalf("GET = %q, %v, want ok", body, err)
	}
}

// wantClosed checks how many connections were closed for what reason.
func (r *rig) wantClosed(why h1.Reason, want int64) {
	r.t.Helper()
	synctest.Wait()
	if s := r.pool.Stats(); s.Closed[why] != want {
		r.t.Errorf("Stats() = %+v, want %d closed for reason %d", s, want, why)
	}
}

func request(t *testing.T, method string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://a.test/x?y", body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// outgoing makes of req what h1 sends for it, by the rules of net/http.
func outgoing(req *http.Request) *h1.Request {
	out := &h1.Request{
		Method: req.Method, Target: req.URL.EscapedPath(), Query: req.URL.RawQuery, Host: req.Host,
		Header: req.Header, Body: req.Body, Length: req.ContentLength, Trailer: req.Trailer, Close: req.Close,
	}
	switch {
	case req.Body == http.NoBody:
		out.Body = nil
	case req.Body != nil && req.ContentLength == 0:
		out.Length = -1
	}
	return out
}

// unknown is a body whose length nobody can tell.
func unknown(s string) io.Reader { return struct{ io.Reader }{strings.NewReader(s)} }

// silent hears nothing.
type silent struct{}

func (silent) Informational(int, textproto.MIMEHeader) error { return nil }

// both runs f in two bubbles, over a pool of h1 and over an http.Transport, which shows
// that they agree.
func both(t *testing.T, name string, cfg h1.Config, serve func(*peer), f func(t *testing.T, r *rig)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Run("h1", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, newRig(t, cfg, serve)) })
		})
		t.Run("net/http", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, newReference(t, cfg, serve)) })
		})
	})
}

// newReference is newRig with an http.Transport as its client.
func newReference(t *testing.T, cfg h1.Config, serve func(*peer)) *rig {
	t.Helper()
	r := newRig(t, cfg, serve)
	cfg = r.settings(cfg)
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	r.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return cfg.Dial(ctx, func(nc net.Conn) net.Conn { return nc })
		},
		Protocols:              protocols,
		DisableCompression:     true,
		MaxIdleConnsPerHost:    cfg.MaxIdle,
		ResponseHeaderTimeout:  cfg.HeaderTimeout,
		ExpectContinueTimeout:  cfg.ContinueTimeout,
		MaxResponseHeaderBytes: cfg.MaxHeaderBytes,
	}
	return r
}

// bubble runs f in a bubble over a pool of h1.
func bubble(t *testing.T, name string, cfg h1.Config, serve func(*peer), f func(t *testing.T, r *rig)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { f(t, newRig(t, cfg, serve)) })
	})
}

// repeated returns n header fields.
func repeated(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "X-%d: y\r\n", i)
	}
	return b.String()
}

// linger lets virtual time pass. Outside of a bubble it panics: nobody waits in real time.
func linger(d time.Duration) {
	if time.Since(time.Unix(946684800, 0)) > 365*24*time.Hour { // when bubbles begin, and what they may take
		panic("linger: not in a bubble")
	}
	time.Sleep(d)
}
