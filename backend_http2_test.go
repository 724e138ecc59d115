package lb_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// protoServer answers with the protocol that it was spoken to in.
type protoServer struct {
	addr  string
	conns atomic.Int64 // that were accepted
	asked atomic.Int64
}

// startProto starts a server at addr that speaks protocols, over TLS with certificates.
func startProto(t *testing.T, n *lbtest.Network, addr string, protocols string, certificates []tls.Certificate, h http.HandlerFunc, limits ...func(*http.Server)) *protoServer {
	t.Helper()
	ln, err := n.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	p := &protoServer{addr: addr}
	speaks := new(http.Protocols)
	speaks.SetHTTP1(strings.Contains(protocols, "1"))
	speaks.SetHTTP2(strings.Contains(protocols, "2") && certificates != nil)
	speaks.SetUnencryptedHTTP2(strings.Contains(protocols, "2") && certificates == nil)
	s := &http.Server{Protocols: speaks, TLSConfig: &tls.Config{Certificates: certificates}, ErrorLog: silentLog()}
	s.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			p.conns.Add(1)
		}
	}
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.asked.Add(1)
		if h != nil {
			h(w, r)
			return
		}
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %s", r.Proto, r.Method, r.RequestURI, body)
	})
	for _, limit := range limits {
		limit(s)
	}
	if certificates == nil {
		go s.Serve(ln)
	} else {
		go s.ServeTLS(ln, "", "")
	}
	t.Cleanup(func() {
		s.Close()
		advance(time.Second)
	})
	return p
}

// Each backend is spoken to in its own protocol, by requests and by probes
// (TykTechnologies/tyk#3426, caddyserver/caddy#3218).
func TestProtocolsOfBackends(t *testing.T) {
	certificates, trust := exampleCertificate()
	bubble(t, "mixed in one pool", func(t *testing.T) {
		n := lbtest.NewNetwork()
		var mu sync.Mutex
		probed := map[string]string{}
		answer := func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, probePath) {
				mu.Lock()
				probed[r.Host] = r.Proto
				mu.Unlock()
				return
			}
			body, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, "%s %s %s %s", r.Proto, r.Method, r.RequestURI, body)
		}
		startProto(t, n, "one.test:80", "1", nil, answer)
		startProto(t, n, "two.test:80", "2", nil, answer)
		startProto(t, n, "tls1.test:443", "1", certificates, answer)
		startProto(t, n, "tls2.test:443", "1 2", certificates, answer)
		startProto(t, n, "tls12.test:443", "1 2", certificates, answer)
		config := &tls.Config{RootCAs: trust, ServerName: "example.com"}
		first := config.Clone()
		first.NextProtos = []string{"http/1.1"}
		pool := newPool(t, []lb.Target{
			{URL: "http://one.test/base", Host: lb.HostFromURL}, {URL: "h2c://two.test/base", Host: lb.HostFromURL},
			{URL: "https://tls1.test/base", Host: lb.HostFromURL, TLS: config}, {URL: "https://tls2.test/base", Host: lb.HostFromURL, TLS: config},
			{URL: "https://tls12.test/base", Host: lb.HostFromURL, TLS: first},
		}, lb.WithDialer(n.DialContext), lb.WithHealthCheck(everySecond()))
		defer pool.Close()
		advance(3 * time.Second)
		want := []string{"HTTP/1.1", "HTTP/2.0", "HTTP/1.1", "HTTP/2.0", "HTTP/1.1"}
		for i, b := range pool.Backends() {
			host := strings.Split(b.URL(), "/")[2]
			if got := probed[host]; got != want[i] || b.Status().Health != lb.HealthHealthy {
				t.Errorf("%s is probed in %q and %s, want %q", host, got, b.Status(), want[i])
			}
		}
		for range 2 {
			seen := map[string]int{}
			for range 5 {
				w := serve(pool, "/a%2fb?q=1;2")
				seen[w.Body.String()]++
			}
			if seen["HTTP/1.1 GET /base/a%2fb?q=1;2 "] != 3 || seen["HTTP/2.0 GET /base/a%2fb?q=1;2 "] != 2 {
				t.Errorf("the backends saw %v", seen)
			}
		}
	})
	bubble(t, "TLS with HTTP/1.1 alone costs one handshake more", func(t *testing.T) {
		n := lbtest.NewNetwork()
		s := startProto(t, n, "a.test:443", "1", certificates, nil)
		pool := newPool(t, []lb.Target{{URL: "https://a.test", TLS: &tls.Config{RootCAs: trust, ServerName: "example.com"}}}, lb.WithDialer(n.DialContext))
		defer pool.Close()
		for range 10 {
			if got := post(t, pool, "body"); got != "HTTP/1.1 POST / body" {
				t.Errorf("answer = %q", got)
			}
		}
		if c := s.conns.Load(); c != 2 {
			t.Errorf("%d connections, want 2", c)
		}
	})
	bubble(t, "h2c to a server that speaks HTTP/1.1", func(t *testing.T) {
		n := lbtest.NewNetwork()
		startProto(t, n, "a.test:80", "1", nil, nil)
		pool := newPool(t, lb.Targets("h2c://a.test"), lb.WithDialer(n.DialContext))
		defer pool.Close()
		_, err := pool.RoundTrip(newRequest("POST", "x"))
		if ae := asAttempt(t, err); !errors.Is(err, lb.ErrNoBackend) || ae.Stage != lb.StageTLS || !strings.Contains(err.Error(), "does not speak HTTP/2") {
			t.Errorf("error = %v", err)
		}
	})
	bubble(t, "an upgrade goes over HTTP/1.1, and over h2c nowhere", func(t *testing.T) {
		n := lbtest.NewNetwork()
		startProto(t, n, "a.test:443", "1 2", certificates, echoUpgrade)
		startProto(t, n, "a.test:80", "2", nil, echoUpgrade)
		for target, want := range map[string]int{"https://a.test": 101, "h2c://a.test": 400} {
			r := &rig{t: t, net: n, own: true, errorLog: new(bytes.Buffer)}
			var config *tls.Config
			if want == 101 {
				config = &tls.Config{RootCAs: trust, ServerName: "example.com"}
			}
			r.start([]lb.Target{{URL: target, TLS: config}}, upgradesTo("echo"))
			_, br := r.openWith("GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			if codes, _, _ := finalAnswer(t, br); codes[len(codes)-1] != want {
				t.Errorf("%s answers %v, want %d", target, codes, want)
			}
			r.pool.Close()
			r.server.Close()
		}
	})
}

// post sends a POST through pool and returns what the answer says.
func post(t *testing.T, pool *lb.Pool, body string) string {
	t.Helper()
	resp, err := pool.RoundTrip(newRequest("POST", body))
	if err != nil {
		t.Error(err)
		return ""
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

func newRequest(method, body string) *http.Request {
	r, _ := http.NewRequest(method, "http://x/", streamOf(body))
	return r
}

// More requests than a connection has streams for get further connections, and no more
// of them than that takes.
func TestStreamsOverSeveralConnections(t *testing.T) {
	for _, tt := range []struct{ streams, requests, atMost int }{{10, 95, 10}, {250, 300, 2}, {1, 5, 5}} {
		bubble(t, fmt.Sprint(tt), func(t *testing.T) {
			n := lbtest.NewNetwork()
			release := make(chan struct{})
			s := startProto(t, n, "a.test:80", "2", nil, func(http.ResponseWriter, *http.Request) { <-release },
				func(s *http.Server) { s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: tt.streams} })
			pool := newPool(t, lb.Targets("h2c://a.test"), lb.WithDialer(n.DialContext))
			defer pool.Close()
			var wg sync.WaitGroup
			for range tt.requests {
				wg.Go(func() { post(t, pool, "") })
			}
			synctest.Wait()
			if got := s.asked.Load(); got != int64(tt.requests) {
				t.Errorf("%d of %d requests are under way", got, tt.requests)
			}
			if c := int(s.conns.Load()); c > tt.atMost {
				t.Errorf("%d connections, want at most %d", c, tt.atMost)
			}
			close(release)
			wg.Wait()
			advance(2 * lb.DefaultIdleConnTimeout)
			if c := pool.Stats().InFlight; c != 0 {
				t.Errorf("in flight = %d", c)
			}
		})
	}
}

// Requests that share a client's connection are spread one by one
// (dotnet/AspNetCore.Docs#28919).
func TestStreamsOfOneClientAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		var servers []*protoServer
		for i := range 3 {
			servers = append(servers, startProto(t, n, fmt.Sprintf("s%d.test:80", i), "2", nil, func(w http.ResponseWriter, _ *http.Request) { linger(time.Second) }))
		}
		r := &rig{t: t, net: n, own: true, errorLog: new(bytes.Buffer)}
		r.start(lb.Targets("h2c://s0.test", "h2c://s1.test", "h2c://s2.test"))
		r.speakHTTP2()
		var wg sync.WaitGroup
		for range 300 {
			wg.Go(func() { r.wantStatus(r.must("GET", "", nil), 200) })
		}
		wg.Wait()
		for _, s := range servers {
			if got := s.asked.Load(); got < 90 || got > 110 {
				t.Errorf("%s got %d of 300 requests, want a third", s.addr, got)
			}
		}
	})
}

// A connection that is silently dead fails over, and is replaced (golang/go#30702,
// golang/go#36026).
func TestDeadHTTP2Connection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		frozen := new(freezer)
		a := startProto(t, n, "a.test:80", "2", nil, nil)
		startProto(t, n, "b.test:80", "1", nil, nil)
		pool := newPool(t, lb.Targets("h2c://a.test", "http://b.test"), lb.WithDialer(frozen.dialer(n, "a.test:80")), noEjection(),
			lb.WithBalancer(lb.BalancerFunc(first)), lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second}))
		defer pool.Close()
		get := func() string { return serve(pool, "/").Body.String() }
		if got := get(); got != "HTTP/2.0 GET / " {
			t.Fatalf("answer = %q", got)
		}
		frozen.on.Store(true)
		within(t, time.Second+100*time.Millisecond, func() {
			if got := get(); got != "HTTP/1.1 GET / " {
				t.Errorf("with a dead connection: %q", got)
			}
		})
		frozen.on.Store(false) // for connections to come
		within(t, 0, func() {
			if got := get(); got != "HTTP/2.0 GET / " { // over another, at once
				t.Errorf("after that: %q", got)
			}
		})
		advance(time.Minute) // pings find the first one dead
		if got, conns := get(), a.conns.Load(); got != "HTTP/2.0 GET / " || conns > 3 {
			t.Errorf("a minute later: %q, %d connections", got, conns)
		}
		frozen.release()
	})
}

// freezer makes connections over which nothing moves any more while it is on, for ever.
type freezer struct {
	on    atomic.Bool
	mu    sync.Mutex // guards the following
	conns []*frozenConn
}

func (f *freezer) dialer(n *lbtest.Network, addr string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, to string) (net.Conn, error) {
		nc, err := n.DialContext(ctx, network, to)
		if err != nil || to != addr {
			return nc, err
		}
		c := &frozenConn{Conn: nc, f: f, done: make(chan struct{})}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.conns = append(f.conns, c)
		return c, nil
	}
}

func (f *freezer) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
}

type frozenConn struct {
	net.Conn
	f      *freezer
	frozen atomic.Bool
	once   sync.Once
	done   chan struct{}
}

func (c *frozenConn) Write(p []byte) (int, error) {
	if c.f.on.Load() {
		c.frozen.Store(true)
	}
	if c.frozen.Load() {
		return len(p), nil // into the void
	}
	return c.Conn.Write(p)
}

func (c *frozenConn) Close() error {
	c.once.Do(func() { close(c.done) })
	return c.Conn.Close()
}

// rawHTTP2 is a server that answers each HEADERS frame with frames, and nothing else.
func rawHTTP2(t *testing.T, n *lbtest.Network, addr string, answer func(stream uint32) []byte) *atomic.Int64 {
	t.Helper()
	ln, err := n.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	var heads atomic.Int64
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				preface := make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
				if _, err := io.ReadFull(c, preface); err != nil {
					return
				}
				c.Write(frame2(4, 0, 0, nil)) // SETTINGS
				for {
					var head [9]byte
					if _, err := io.ReadFull(c, head[:]); err != nil {
						return
					}
					length := int64(head[0])<<16 | int64(head[1])<<8 | int64(head[2])
					if _, err := io.CopyN(io.Discard, c, length); err != nil {
						return
					}
					if head[3] == 1 { // HEADERS
						heads.Add(1)
						c.Write(answer(binary.BigEndian.Uint32(head[5:]) & 0x7fffffff))
					}
				}
			}()
		}
	}()
	t.Cleanup(func() { ln.Close() })
	return &heads
}

// frame2 is a frame of RFC 9113.
func frame2(kind, flags byte, stream uint32, payload []byte) []byte {
	b := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}

func reset2(code uint32) func(uint32) []byte {
	return func(stream uint32) []byte { return frame2(3, 0, stream, binary.BigEndian.AppendUint32(nil, code)) }
}

func goAway2(last, code uint32) func(uint32) []byte {
	return func(uint32) []byte {
		return frame2(7, 0, 0, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, last), code))
	}
}

// A request goes elsewhere, whatever its method, if the backend says that it has not
// looked at it, and only then: refused streams and those behind the last that a GOAWAY
// names. The text that tells of the latter is net/http's: this shows when it changes.
func TestProofOverHTTP2(t *testing.T) {
	for name, tt := range map[string]struct {
		answer func(uint32) []byte
		again  bool
	}{
		"REFUSED_STREAM": {reset2(7), true},
		"GOAWAY":         {goAway2(0, 0), true},
		"GOAWAY that names the stream": {func(s uint32) []byte {
			return append(goAway2(s, 0)(s), reset2(2)(s)...)
		}, false},
		"PROTOCOL_ERROR":    {reset2(1), false},
		"INTERNAL_ERROR":    {reset2(2), false},
		"CANCEL":            {reset2(8), false},
		"ENHANCE_YOUR_CALM": {reset2(11), false},
	} {
		for _, method := range []string{"POST", "GET"} {
			bubble(t, name+" "+method, func(t *testing.T) {
				n := lbtest.NewNetwork()
				refusing := rawHTTP2(t, n, "a.test:80", tt.answer)
				other := startProto(t, n, "b.test:80", "1", nil, nil)
				pool := newPool(t, lb.Targets("h2c://a.test", "http://b.test"), lb.WithDialer(n.DialContext), noEjection(), lb.WithBalancer(lb.BalancerFunc(first)))
				defer pool.Close()
				for i := range 5 {
					resp, err := pool.RoundTrip(newRequest(method, "body"))
					if again := tt.again || method == "GET"; again != (err == nil) {
						t.Errorf("request %d: error = %v, want to go elsewhere: %t", i, err, again)
					}
					if err == nil {
						if b, _ := io.ReadAll(resp.Body); string(b) != "HTTP/1.1 "+method+" / body" {
							t.Errorf("answer = %q", b)
						}
						resp.Body.Close()
					}
				}
				if got := refusing.Load(); got != 5 {
					t.Errorf("the first backend got %d requests, want 5: nothing is sent twice", got)
				}
				if got := other.asked.Load(); (got == 5) != (tt.again || method == "GET") {
					t.Errorf("the other backend got %d requests", got)
				}
			})
		}
	}
}

// HTTP/2 over a transport would send requests twice by itself: it is refused, with the
// way that there is.
func TestTransportForHTTP2IsRefused(t *testing.T) {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	_, err := lb.New(lb.Targets("http://a.test"), lb.WithTransport(&http.Transport{Protocols: protocols}))
	if err == nil || !strings.Contains(err.Error(), "{UnencryptedHTTP2}") || !strings.Contains(err.Error(), "h2c targets") {
		t.Errorf("New = %v", err)
	}
}

// A backend that ends a call at the client's own deadline, in whatever way, is not to
// blame, and the client is told that it was too late.
func TestBackendThatKeepsTheDeadlineOfGRPC(t *testing.T) {
	for timeout, late := range map[string]bool{"50m": true, "50000u": true, "50000000n": true, "51m": false, "1S": false, "": false, "0": false, "m": false, "-1m": false, "5x": false} {
		bubble(t, timeout, func(t *testing.T) {
			n := lbtest.NewNetwork()
			rawHTTP2(t, n, "a.test:80", func(stream uint32) []byte {
				linger(50 * time.Millisecond)
				return reset2(8)(stream)
			})
			pool := newPool(t, lb.Targets("h2c://a.test"), lb.WithDialer(n.DialContext))
			defer pool.Close()
			for range 5 {
				w := httptest.NewRecorder()
				r := httptest.NewRequest("POST", "/", strings.NewReader("x"))
				r.Header.Set("Content-Type", "application/grpc")
				r.Header.Set("Grpc-Timeout", timeout)
				pool.ServeHTTP(w, r)
				if got := w.Header().Get("Grpc-Status"); (got == "4") != late {
					t.Errorf("grpc-status = %s, want 4: %t", got, late)
				}
			}
			if got := pool.Stats().Backends[0].Failures; (got == 0) != late {
				t.Errorf("the backend is blamed for %d failures", got)
			}
		})
	}
}

// A certificate of ours is shown to a backend that asks for one, over either version.
func TestClientCertificates(t *testing.T) {
	certificates, trust := exampleCertificate()
	for _, protocols := range []string{"1", "1 2"} {
		bubble(t, protocols, func(t *testing.T) {
			n := lbtest.NewNetwork()
			startProto(t, n, "a.test:443", protocols, certificates, func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, r.TLS.PeerCertificates[0].DNSNames[0], " ", r.TLS.ServerName)
			}, func(s *http.Server) { s.TLSConfig.ClientAuth = tls.RequireAnyClientCert })
			with := &tls.Config{RootCAs: trust, ServerName: "example.com", Certificates: certificates}
			pool := newPool(t, []lb.Target{{URL: "https://a.test", TLS: with}}, lb.WithDialer(n.DialContext), lb.WithHealthCheck(lb.HealthCheck{Path: "/"}))
			defer pool.Close()
			advance(time.Second)
			if got := post(t, pool, "x"); got != "example.com example.com" || pool.Backends()[0].Status().Health != lb.HealthHealthy {
				t.Errorf("the backend saw %q, and is %s", got, pool.Backends()[0].Status())
			}
		})
	}
}
