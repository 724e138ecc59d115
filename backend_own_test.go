package lb_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// A short body that cannot be recorded is sent as it is, in whatever pieces it comes.
func TestShortBodyThatIsNotRecorded(t *testing.T) {
	for name, policy := range map[string]lb.RetryPolicy{
		"nothing is":   {MaxReplayBytes: -1},
		"a part is":    {MaxReplayBytes: 4},
		"no room left": {MaxPoolReplayBytes: 1},
	} {
		for _, gap := range []time.Duration{0, 100 * time.Microsecond, time.Second} {
			bubble(t, fmt.Sprint(name, ", with a gap of ", gap), func(t *testing.T) {
				n := lbtest.NewNetwork()
				startProto(t, n, "a.test:80", "1", nil, nil)
				pool := newPool(t, lb.Targets("http://a.test"), lb.WithDialer(n.DialContext), lb.WithRetry(policy))
				defer pool.Close()
				pr, pw := io.Pipe()
				go func() {
					io.WriteString(pw, "hello")
					linger(gap)
					io.WriteString(pw, "world")
					pw.Close()
				}()
				r := newRequest("POST", "")
				r.Body, r.ContentLength = pr, 10
				resp, err := pool.RoundTrip(r)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if b, _ := io.ReadAll(resp.Body); string(b) != "HTTP/1.1 POST / helloworld" {
					t.Errorf("the backend got %q", b)
				}
				if s := pool.Stats(); s.Backends[0].Failures != 0 {
					t.Errorf("failures = %d", s.Backends[0].Failures)
				}
			})
		}
	}
}

// A backend whose connections grant no stream is not dialed again and again.
func TestHTTP2WithoutStreams(t *testing.T) {
	for name, first := range map[string][]byte{
		"none are granted":     frame2(4, 0, 0, []byte{0, 3, 0, 0, 0, 0}),
		"it goes away at once": append(frame2(4, 0, 0, nil), goAway2(0, 0)(0)...),
	} {
		bubble(t, name, func(t *testing.T) {
			n := lbtest.NewNetwork()
			ln, err := n.Listen("a.test:80")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			var conns atomic.Int64
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					conns.Add(1)
					go func() {
						defer c.Close()
						c.Write(first)
						io.Copy(io.Discard, c)
					}()
				}
			}()
			pool := newPool(t, lb.Targets("h2c://a.test"), lb.WithDialer(n.DialContext))
			defer pool.Close()
			_, err = pool.RoundTrip(newRequest("POST", "x"))
			if ae := asAttempt(t, err); ae.Blame != lb.BlameBackend || conns.Load() > lb.DefaultAttempts+lb.DefaultMaxFailedDials {
				t.Errorf("error = %v after %d connections", err, conns.Load())
			}
		})
	}
}

// A header that is too large for a backend over HTTP/2 is its sender's fault. The text that
// tells of it is net/http's: this shows when it changes.
func TestHeaderTooLargeForTheBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		for _, addr := range []string{"a.test:80", "b.test:80"} {
			startProto(t, n, addr, "2", nil, nil, func(s *http.Server) { s.MaxHeaderBytes = 10_000 })
		}
		pool := newPool(t, lb.Targets("h2c://a.test", "h2c://b.test"), lb.WithDialer(n.DialContext))
		defer pool.Close()
		for range 10 {
			r := newRequest("POST", "x")
			r.Header.Set("Large", text(50_000))
			_, err := pool.RoundTrip(r)
			if ae := asAttempt(t, err); ae.Blame != lb.BlameClient || lb.StatusOf(err) != 400 || ae.Attempt != 1 {
				t.Fatalf("error = %v, status %d", err, lb.StatusOf(err))
			}
		}
		for _, b := range pool.Stats().Backends {
			if b.Failures != 0 {
				t.Errorf("%s is blamed for %d failures", b.Name, b.Failures)
			}
		}
	})
}

// A backend that has chosen HTTP/1.1 once may choose HTTP/2 later.
func TestBackendThatChangesItsProtocol(t *testing.T) {
	certificates, trust := exampleCertificate()
	for name, wait := range map[string]time.Duration{"at once": 0, "later": 10 * time.Minute} {
		bubble(t, name, func(t *testing.T) {
			n := lbtest.NewNetwork()
			var only atomic.Pointer[[]string]
			only.Store(&[]string{"http/1.1"})
			startProto(t, n, "a.test:443", "1 2", certificates, nil, func(s *http.Server) {
				base := s.TLSConfig
				s.TLSConfig = &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
					c := base.Clone()
					c.NextProtos = *only.Load()
					if !slices.Contains(hello.SupportedProtos, c.NextProtos[0]) {
						return nil, errors.New("not for you")
					}
					return c, nil
				}}
			})
			pool := newPool(t, []lb.Target{{URL: "https://a.test", TLS: &tls.Config{RootCAs: trust, ServerName: "example.com"}}},
				lb.WithDialer(n.DialContext), lb.WithPassiveHealth(lb.PassiveHealth{Failures: -1}))
			defer pool.Close()
			if got := post(t, pool, "x"); got != "HTTP/1.1 POST / x" {
				t.Errorf("at first: %q", got)
			}
			only.Store(&[]string{"h2"})
			pool.CloseIdleConnections()
			advance(wait)
			if got := post(t, pool, "x"); got != "HTTP/2.0 POST / x" {
				t.Errorf("then: %q", got)
			}
		})
	}
}

// Callbacks of a tls.Config and hooks of a client trace may panic, on whatever goroutine
// they are called.
func TestPanicsOnTheWayAreContained(t *testing.T) {
	certificates, trust := exampleCertificate()
	bubble(t, "a callback of TLS", func(t *testing.T) {
		n := lbtest.NewNetwork()
		startProto(t, n, "a.test:443", "1 2", certificates, nil)
		config := &tls.Config{RootCAs: trust, ServerName: "example.com", VerifyConnection: func(tls.ConnectionState) error { panic("no") }}
		pool := newPool(t, []lb.Target{{URL: "https://a.test", TLS: config}}, lb.WithDialer(n.DialContext))
		defer pool.Close()
		_, err := pool.RoundTrip(newRequest("POST", "x"))
		if ae := asAttempt(t, err); ae.Stage != lb.StageTLS || pool.Stats().Panics == 0 {
			t.Errorf("error = %v, panics = %d", err, pool.Stats().Panics)
		}
	})
	trace := &httptrace.ClientTrace{
		GetConn: func(string) { panic("1") }, GotConn: func(httptrace.GotConnInfo) { panic("2") }, PutIdleConn: func(error) { panic("3") },
		WroteHeaders: func() { panic("4") }, WroteHeaderField: func(string, []string) { panic("5") }, WroteRequest: func(httptrace.WroteRequestInfo) { panic("6") },
		GotFirstResponseByte: func() { panic("7") },
	}
	for _, protocol := range []string{"1", "2"} {
		bubble(t, "hooks of a trace, HTTP/"+protocol, func(t *testing.T) {
			n := lbtest.NewNetwork()
			startProto(t, n, "a.test:80", protocol, nil, nil)
			pool := newPool(t, lb.Targets(map[string]string{"1": "http", "2": "h2c"}[protocol]+"://a.test"), lb.WithDialer(n.DialContext))
			defer pool.Close()
			for range 5 {
				r := newRequest("POST", text(100_000))
				resp, err := pool.RoundTrip(r.WithContext(httptrace.WithClientTrace(t.Context(), trace)))
				if err != nil {
					t.Fatal(err)
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			synctest.Wait()
			if s := pool.Stats(); s.Panics == 0 || s.InFlight != 0 || s.Backends[0].Connections.Open != 1 {
				t.Errorf("panics = %d, in flight = %d, connections %+v", s.Panics, s.InFlight, *s.Backends[0].Connections)
			}
		})
	}
}

// Close ends handshakes, and does not wait for dialers that do not heed their context;
// nor do requests.
func TestCloseEndsWhatIsBeingOpened(t *testing.T) {
	for _, scheme := range []string{"https", "http", "h2c"} {
		bubble(t, scheme+" with a silent backend", func(t *testing.T) {
			n := lbtest.NewNetwork()
			ln, err := n.Listen("a.test:" + map[string]string{"https": "443", "http": "80", "h2c": "80"}[scheme])
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					defer c.Close()
				}
			}()
			pool := newPool(t, lb.Targets(scheme+"://a.test"), lb.WithDialer(n.DialContext), lb.WithTimeouts(lb.Timeouts{TLSHandshake: -1, ResponseHeader: -1}))
			ended := make(chan error, 1)
			go func() { _, err := pool.RoundTrip(newRequest("POST", "x")); ended <- err }()
			advance(time.Second)
			within(t, 0, func() {
				pool.Close()
				if err := <-ended; !errors.Is(err, lb.ErrClosed) {
					t.Errorf("error = %v", err)
				}
			})
		})
		bubble(t, scheme+" with a dialer that goes on", func(t *testing.T) {
			release := make(chan struct{})
			var late atomic.Int64
			pool := newPool(t, lb.Targets(scheme+"://a.test"), lb.WithRetry(lb.RetryPolicy{Attempts: 1}), lb.WithDialer(func(context.Context, string, string) (net.Conn, error) {
				<-release
				a, b := net.Pipe()
				b.Close()
				return lateConn{a, &late}, nil
			}))
			defer pool.Close()
			within(t, lb.DefaultDialTimeout, func() {
				_, err := pool.RoundTrip(newRequest("POST", "x"))
				if lb.StatusOf(err) != 503 {
					t.Errorf("error = %v", err)
				}
			})
			within(t, time.Second, func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				pool.RoundTrip(newRequest("POST", "x").WithContext(ctx))
			})
			close(release)
			synctest.Wait()
			if late.Load() < 2 {
				t.Errorf("%d connections that came too late were closed", late.Load())
			}
		})
	}
}

type lateConn struct {
	net.Conn
	closed *atomic.Int64
}

func (c lateConn) Close() error {
	c.closed.Add(1)
	return c.Conn.Close()
}

// untimed is a connection without deadlines, as those of some tunnels are.
type untimed struct{ net.Conn }

func (untimed) SetDeadline(time.Time) error      { return errors.ErrUnsupported }
func (untimed) SetReadDeadline(time.Time) error  { return errors.ErrUnsupported }
func (untimed) SetWriteDeadline(time.Time) error { return errors.ErrUnsupported }

// A connection without deadlines carries one request, within the limits that there are.
func TestConnectionsWithoutDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		slow := false
		startProto(t, n, "a.test:80", "1", nil, func(w http.ResponseWriter, r *http.Request) {
			if slow {
				linger(time.Minute)
			}
			io.Copy(w, r.Body)
		})
		pool := newPool(t, lb.Targets("http://a.test"), lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second}), lb.WithRetry(lb.RetryPolicy{Attempts: 1}),
			lb.WithDialer(func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := n.DialContext(ctx, network, addr)
				return untimed{c}, err
			}))
		defer pool.Close()
		for range 3 {
			r := newRequest("POST", "body")
			r.Header.Set("Expect", "100-continue")
			resp, err := pool.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			if b, _ := io.ReadAll(resp.Body); string(b) != "body" {
				t.Errorf("answer = %q", b)
			}
			resp.Body.Close()
		}
		synctest.Wait()
		if s := pool.Stats().Backends[0].Connections; s.Open != 0 || s.ClosedByBackend != 0 || s.ClosedOther != 3 {
			t.Errorf("connections %+v, want 3 that ended as planned", *s)
		}
		slow = true
		within(t, time.Second, func() {
			_, err := pool.RoundTrip(newRequest("GET", ""))
			if ae := asAttempt(t, err); ae.Cause != lb.CauseTimeout {
				t.Errorf("error = %v", err)
			}
		})
		advance(time.Minute) // the handler
	})
}

// Informational answers over HTTP/2 have an end, too.
func TestFloodOfHintsOverHTTP2(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		startProto(t, n, "a.test:80", "2", nil, func(w http.ResponseWriter, r *http.Request) {
			for range 200_000 {
				if r.Context().Err() != nil {
					return
				}
				w.WriteHeader(103)
			}
		})
		pool := newPool(t, lb.Targets("h2c://a.test"), lb.WithDialer(n.DialContext), lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
		defer pool.Close()
		_, err := pool.RoundTrip(newRequest("POST", "x"))
		if ae := asAttempt(t, err); ae.Cause != lb.CauseProtocol {
			t.Errorf("error = %v, cause %v", err, ae.Cause)
		}
	})
}

// A connection over HTTP/2 that is in use now and then is not idle.
func TestHTTP2ConnectionInUseIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		s := startProto(t, n, "a.test:80", "2", nil, nil)
		pool := newPool(t, lb.Targets("h2c://a.test"), lb.WithDialer(n.DialContext), lb.WithConnections(lb.Connections{IdleTimeout: 2 * time.Second}))
		defer pool.Close()
		for range 100 {
			post(t, pool, "x")
			linger(100 * time.Millisecond)
		}
		if got := s.conns.Load(); got != 1 {
			t.Errorf("%d connections, want 1", got)
		}
		advance(5 * time.Second)
		if c := pool.Stats().Backends[0].Connections; c.Open != 0 || c.ClosedIdle != 1 {
			t.Errorf("connections %+v, want one that was idle for too long", *c)
		}
	})
}

// A probe ends with its time, whatever a Checker makes of it.
func TestProbesEndWithTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		startProto(t, n, "a.test:80", "1", nil, func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		var mu sync.Mutex
		var took []time.Duration
		pool := newPool(t, lb.Targets("http://a.test"), lb.WithDialer(n.DialContext), lb.WithHealthCheck(lb.HealthCheck{Interval: time.Minute, Timeout: 200 * time.Millisecond}),
			lb.WithChecker(lb.CheckerFunc(func(_ context.Context, target lb.ProbeTarget) (lb.Verdict, error) {
				began := time.Now()
				client := http.Client{Transport: target}
				_, err := client.Get("/") // in no context
				mu.Lock()
				defer mu.Unlock()
				took = append(took, time.Since(began))
				return lb.VerdictUnhealthy, err
			})))
		defer pool.Close()
		advance(time.Second)
		mu.Lock()
		defer mu.Unlock()
		if len(took) != 1 || took[0] != 200*time.Millisecond {
			t.Errorf("probes took %v, want one of 200ms", took)
		}
	})
}

// A probe of a backend that has chosen HTTP/1.1 over TLS opens one connection, but the
// first, which has found that out.
func TestProbesOverTLSOpenOneConnection(t *testing.T) {
	certificates, trust := exampleCertificate()
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		s := startProto(t, n, "a.test:443", "1", certificates, nil)
		pool := newPool(t, []lb.Target{{URL: "https://a.test", TLS: &tls.Config{RootCAs: trust, ServerName: "example.com"}}},
			lb.WithDialer(n.DialContext), lb.WithHealthCheck(everySecond()))
		defer pool.Close()
		advance(20 * time.Second)
		if conns, probes := s.conns.Load(), s.asked.Load(); probes < 10 || conns != probes+1 {
			t.Errorf("%d connections for %d probes, want one more", conns, probes)
		}
		if post(t, pool, "x"); s.conns.Load() != s.asked.Load()+1 {
			t.Errorf("a request after that opened %d connections", s.conns.Load()-s.asked.Load()+1)
		}
	})
}

// Close does not wait to say goodbye over TLS to peers that do not listen any more.
func TestCloseDoesNotSayGoodbye(t *testing.T) {
	certificates, trust := exampleCertificate()
	for _, protocol := range []string{"http/1.1", "h2"} {
		bubble(t, protocol, func(t *testing.T) {
			stop := make(chan struct{})
			dial := func(context.Context, string, string) (net.Conn, error) {
				ours, theirs := net.Pipe() // whose writes wait for a reader
				server := &deafConn{Conn: theirs, stop: stop}
				s := &http.Server{TLSConfig: &tls.Config{Certificates: certificates}, ErrorLog: silentLog(), Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					http.NewResponseController(w).Flush()
					<-stop
				})}
				go s.ServeTLS(&oneListener{conn: server}, "", "")
				t.Cleanup(func() { s.Close(); theirs.Close() })
				return ours, nil
			}
			config := &tls.Config{RootCAs: trust, ServerName: "example.com", NextProtos: []string{protocol}}
			pool := newPool(t, []lb.Target{{URL: "https://a.test", TLS: config}}, lb.WithDialer(dial))
			for range 3 {
				resp, err := pool.RoundTrip(newRequest("GET", ""))
				if err != nil || resp.StatusCode != 200 {
					t.Fatal(resp, err)
				}
				defer resp.Body.Close()
			}
			close(stop)
			within(t, 0, func() { pool.Close() })
		})
	}
}

// deafConn is a server's end that reads nothing any more once stop is closed.
type deafConn struct {
	net.Conn
	stop chan struct{}
}

func (c *deafConn) Read(p []byte) (int, error) {
	select {
	case <-c.stop:
		return 0, io.EOF
	default:
		return c.Conn.Read(p)
	}
}

// oneListener accepts one connection.
type oneListener struct {
	once sync.Once
	conn net.Conn
}

func (l *oneListener) Accept() (c net.Conn, err error) {
	err = net.ErrClosed
	l.once.Do(func() { c, err = l.conn, nil })
	return c, err
}

func (l *oneListener) Close() error   { return nil }
func (l *oneListener) Addr() net.Addr { return l.conn.LocalAddr() }
