package h1_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"example.com/lb/internal/h1"
)

// socketPool returns a pool over real sockets to a server whose connections serve
// serves, with TLS if secure.
func socketPool(t *testing.T, secure bool, cfg h1.Config, serve func(net.Conn, *bufio.Reader)) *h1.Pool {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	clientTLS, serverTLS := tlsConfigs(t)
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				if secure {
					nc = tls.Server(&corked{Conn: nc}, serverTLS)
				}
				defer nc.Close()
				serve(nc, bufio.NewReader(nc))
			}()
		}
	}()
	cfg.Dial = func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
		nc, err := new(net.Dialer).DialContext(ctx, "tcp", ln.Addr().String())
		if err != nil {
			return nil, err
		}
		if nc = count(nc); !secure {
			return nc, nil
		}
		tc := tls.Client(nc, clientTLS)
		return tc, tc.HandshakeContext(ctx)
	}
	cfg.Go = func(f func()) bool { go f(); return true }
	cfg.Opened = func(io.Closer) bool { return true }
	cfg.Closed = func(io.Closer) {}
	cfg.MaxHeaderBytes = 1 << 20
	if cfg.MaxIdle == 0 {
		cfg.MaxIdle = 10
	}
	pool := h1.New(cfg)
	t.Cleanup(func() {
		pool.Retire()
		ln.Close()
		if s := pool.Stats(); s.Open != 0 {
			t.Errorf("at the end: %+v, want no connection", s)
		}
	})
	return pool
}

// corked is a connection that can hold back what is written, to send it in one piece.
type corked struct {
	net.Conn
	on   bool
	held []byte
}

func (c *corked) Write(p []byte) (int, error) {
	if c.on {
		c.held = append(c.held, p...)
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *corked) uncork() {
	c.on = false
	c.Conn.Write(c.held)
	c.held = nil
}

// Records of TLS that come together with an answer, and are not of it, answer nobody:
// they do not stand in the socket any more when that is looked at.
func TestRecordsBehindAnAnswerAnswerNobody(t *testing.T) {
	pool := socketPool(t, true, h1.Config{}, func(nc net.Conn, br *bufio.Reader) {
		for {
			if _, err := http.ReadRequest(br); err != nil {
				return
			}
			cork := nc.(*tls.Conn).NetConn().(*corked)
			cork.on = true
			io.WriteString(nc, ok)
			io.WriteString(nc, evil)
			cork.uncork()
		}
	})
	for range 20 {
		if body, _ := ask(t, pool); body != "ok" {
			t.Fatalf("the answer is %q, want ok", body)
		}
	}
}

// tlsConfigs returns those of a client and a server that trust one another.
func tlsConfigs(t *testing.T) (client, server *tls.Config) {
	t.Helper()
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	client = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	client.ServerName = "example.com"
	return client, &tls.Config{Certificates: s.TLS.Certificates}
}

// ask sends a GET and returns what is answered, and whether its connection was used
// before.
func ask(t *testing.T, pool *h1.Pool) (body string, reused bool) {
	t.Helper()
	var x h1.Exchange
	req := request(t, "GET", nil)
	resp, err := pool.RoundTrip(t.Context(), &x, outgoing(req), silent{}, req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b), x.Reused()
}

const evil = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"

// TestASocketIsLookedAtBeforeItIsUsedAgain does to an idle connection what servers do.
func TestASocketIsLookedAtBeforeItIsUsedAgain(t *testing.T) {
	for _, c := range []struct {
		name string
		then func(net.Conn) // done by the server when it has answered
		want bool           // the connection carries the next request too
	}{
		{name: "nothing", then: func(net.Conn) {}, want: true},
		{name: "the server closes", then: func(nc net.Conn) { nc.Close() }},
		{name: "the server resets", then: func(nc net.Conn) { nc.(*net.TCPConn).SetLinger(0); nc.Close() }},
		{name: "the server closes its half", then: func(nc net.Conn) { nc.(*net.TCPConn).CloseWrite() }},
		{name: "the server says something that nobody has asked for", then: func(nc net.Conn) { io.WriteString(nc, evil) }},
	} {
		for _, tidied := range []bool{false, true} {
			t.Run(c.name+map[bool]string{true: ", and the pool tidies"}[tidied], func(t *testing.T) {
				t.Parallel()
				idle, done := make(chan bool), make(chan bool)
				pool := socketPool(t, false, h1.Config{}, func(nc net.Conn, br *bufio.Reader) {
					for {
						if _, err := http.ReadRequest(br); err != nil {
							return
						}
						io.WriteString(nc, ok)
						if <-idle {
							c.then(nc)
							done <- true
						}
					}
				})
				ask(t, pool)
				idle <- true
				<-done
				if tidied && !c.want {
					waitFor(t, func() bool { return pool.Stats().Open == 0 })
				}
				close(idle)
				body, reused := ask(t, pool)
				if body != "ok" || reused != c.want {
					t.Errorf("the next answer is %q over a connection used before: %v, want ok, %v", body, reused, c.want)
				}
				if s := pool.Stats(); (s.Closed[h1.ReasonLeft] == 1) == c.want {
					t.Errorf("Stats() = %+v", s)
				}
			})
		}
	}
}

// waitFor waits for what another goroutine, or the kernel, is about to do.
func waitFor(t *testing.T, happened func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !happened(); {
		if time.Now().After(end) {
			t.Fatal("it does not happen")
		}
		<-time.After(time.Millisecond)
	}
}

// TestSocketsAreUsedAgain holds that the look finds nothing where there is nothing: the
// tickets of TLS 1.3, for one, have come with the handshake.
func TestSocketsAreUsedAgain(t *testing.T) {
	for _, secure := range []bool{false, true} {
		pool := socketPool(t, secure, h1.Config{}, func(nc net.Conn, br *bufio.Reader) {
			for {
				if _, err := http.ReadRequest(br); err != nil {
					return
				}
				io.WriteString(nc, ok)
			}
		})
		for i := range 20 {
			if body, reused := ask(t, pool); body != "ok" || reused != (i > 0) {
				t.Fatalf("TLS %v: answer %d is %q over a connection used before: %v", secure, i, body, reused)
			}
		}
	}
}
