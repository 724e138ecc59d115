package memnet

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func listen(t *testing.T, n *Network, addr string) net.Listener {
	t.Helper()
	l, err := n.Listen(addr)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func dial(n *Network, ctx context.Context, addr string) error {
	c, err := n.DialContext(ctx, "tcp", addr)
	if err == nil {
		c.Close()
	}
	return err
}

func TestListenRefusesAnAddressInUse(t *testing.T) {
	for _, tt := range []struct {
		name, first, second string
		inUse               bool
	}{
		{"the same address", "10.0.0.2:80", "10.0.0.2:80", true},
		{"another port", "10.0.0.2:80", "10.0.0.2:81", false},
		{"another host", "10.0.0.2:80", "10.0.0.3:80", false},
		{"the same name in capitals", "a.test:80", "A.TEST:80", true},
		{"two names", "a.test:80", "b.test:80", false},
		{"one host after all hosts", ":80", "10.0.0.2:80", true},
		{"all hosts after one", "10.0.0.2:80", "[::]:80", true},
		{"all hosts on another port", "10.0.0.2:80", ":81", false},
		{"free ports", "10.0.0.2:0", "10.0.0.2:0", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := New()
			l := listen(t, n, tt.first)
			_, err := n.Listen(tt.second)
			if tt.inUse {
				checkOpError(t, "second Listen", err, syscall.EADDRINUSE)
			} else if err != nil {
				t.Fatal(err)
			}
			l.Close()
			listen(t, n, tt.first)
			checkOpError(t, "second Close", l.Close(), net.ErrClosed)
			_, err = l.Accept()
			checkOpError(t, "Accept after Close", err, net.ErrClosed)
		})
	}
}

func TestDialReachesTheListener(t *testing.T) {
	for _, tt := range []struct{ name, listen, dial string }{
		{"by name", "a.test:80", "A.test:80"},
		{"on every host by name", ":80", "a.test:80"},
		{"on every host by address", "0.0.0.0:80", "[2001:db8::1]:80"},
		{"without a host", "127.0.0.1:80", ":80"},
		{"by localhost", "127.0.0.1:80", "localhost:80"},
		{"by a mapped address", "10.0.0.2:80", "[::ffff:10.0.0.2]:80"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := New()
			listen(t, n, tt.listen)
			if err := dial(n, context.Background(), tt.dial); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("by the address of the listener", func(t *testing.T) {
		n := New()
		l := listen(t, n, "a.test:0")
		client, accepted := dialAccept(t, n, l)
		if client.RemoteAddr().String() != l.Addr().String() || !strings.HasPrefix(l.Addr().String(), "198.1") {
			t.Errorf("remote %v, listener %v", client.RemoteAddr(), l.Addr())
		}
		if accepted.RemoteAddr().String() != client.LocalAddr().String() {
			t.Errorf("accepted from %v, dialled from %v", accepted.RemoteAddr(), client.LocalAddr())
		}
	})
}

func TestEveryDialHasItsOwnPort(t *testing.T) {
	n := New()
	l := listen(t, n, "127.0.0.1:80")
	seen := make(map[string]bool)
	for range 1000 {
		client, _ := dialAccept(t, n, l)
		if addr := client.LocalAddr().(*net.TCPAddr); seen[addr.String()] || !addr.IP.IsLoopback() {
			t.Fatalf("client address %v comes twice or is not local", addr)
		}
		seen[client.LocalAddr().String()] = true
	}
}

func TestDialErrors(t *testing.T) {
	n := New()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	checkOpError(t, "dial", dial(n, context.Background(), "10.0.0.2:80"), syscall.ECONNREFUSED)
	checkOpError(t, "dial with an ended context", dial(n, ended, "10.0.0.2:80"), context.Canceled)
	for _, addr := range []string{"no port", "host:http", "host:70000"} {
		if err := dial(n, context.Background(), addr); err == nil {
			t.Errorf("dial(%q) = nil", addr)
		}
		if _, err := n.Listen(addr); err == nil {
			t.Errorf("Listen(%q) = nil", addr)
		}
	}
	_, err := n.DialContext(context.Background(), "udp", "10.0.0.2:80")
	checkOpError(t, "dial udp", err, net.UnknownNetworkError("udp"))
}

func TestBlackholeHoldsDialsUntilTheirContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New()
		listen(t, n, "a.test:80")
		n.Blackhole("a.test:80", true)
		n.Blackhole("a.test:80", true) // once more changes nothing
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		err := dial(n, ctx, "a.test:80")
		checkOpError(t, "dial", err, context.DeadlineExceeded)
		if e, ok := errors.AsType[net.Error](err); !ok || !e.Timeout() {
			t.Errorf("Timeout() of %v is false", err)
		}
		if got := time.Since(start); got != 5*time.Second {
			t.Errorf("dial failed after %v, want 5s", got)
		}

		waiting := make(chan error)
		go func() { waiting <- dial(n, t.Context(), "a.test:80") }()
		synctest.Wait()
		n.Blackhole("a.test:80", false)
		n.Blackhole("a.test:80", false)
		if err := <-waiting; err != nil {
			t.Errorf("dial after the hole was lifted = %v", err)
		}
		n.Blackhole(":81", true)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		checkOpError(t, "dial", dial(n, ctx, "a.test:81"), context.DeadlineExceeded)
	})
}

func TestFullBacklogHoldsDials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New()
		l := listen(t, n, "a.test:80")
		var queued []net.Conn
		for range acceptBacklog {
			c, err := n.DialContext(t.Context(), "tcp", "a.test:80")
			if err != nil {
				t.Fatal(err)
			}
			queued = append(queued, c)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		checkOpError(t, "dial", dial(n, ctx, "a.test:80"), context.DeadlineExceeded)

		results := make(chan error)
		for range 2 {
			go func() { results <- dial(n, t.Context(), "a.test:80") }()
		}
		synctest.Wait()
		l.Accept()
		if err := <-results; err != nil {
			t.Errorf("dial after Accept made room = %v", err)
		}
		l.Close()
		checkOpError(t, "dial still waiting at Close", <-results, syscall.ECONNREFUSED)
		checkOpError(t, "Read of a connection never accepted", readErr(queued[1]), syscall.ECONNRESET)
	})
}

// TestHTTPRunsInVirtualTime runs the unchanged server and client of net/http.
func TestHTTPRunsInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New()
		l := listen(t, n, "a.test:80")
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(3 * time.Second)
			w.WriteHeader(http.StatusTeapot)
			io.Copy(w, r.Body)
		})}
		served := make(chan error)
		go func() { served <- server.Serve(l) }()
		transport := &http.Transport{DialContext: n.DialContext, ResponseHeaderTimeout: time.Minute}
		client := &http.Client{Transport: transport}
		start := time.Now()
		for range 3 {
			body := strings.Repeat("0123456789", 50_000)
			resp, err := client.Post("http://a.test/", "text/plain", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if string(got) != body || err != nil || resp.StatusCode != http.StatusTeapot {
				t.Errorf("status %d, %d bytes, %v", resp.StatusCode, len(got), err)
			}
		}
		if got := time.Since(start); got != 9*time.Second {
			t.Errorf("three requests took %v, want 9s", got)
		}
		transport.CloseIdleConnections()
		if err := server.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != http.ErrServerClosed {
			t.Errorf("Serve = %v", err)
		}
	})
}
