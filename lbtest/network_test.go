package lbtest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/lbtest"
)

// rig is what a test needs of a network.
type rig struct {
	backend func(tb testing.TB, name string) *lbtest.Backend
	client  *http.Client
	dialer  func(ctx context.Context, network, addr string) (net.Conn, error)
	pause   func()        // lets others run
	delay   time.Duration // short in real time, long in virtual time
	virtual bool
}

// onBothNetworks runs a test on the loopback interface and in a bubble.
func onBothNetworks(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Run("loopback", func(t *testing.T) {
		transport := &http.Transport{DisableCompression: true}
		t.Cleanup(transport.CloseIdleConnections)
		test(t, &rig{
			backend: lbtest.NewBackend,
			client:  &http.Client{Transport: transport, Timeout: 30 * time.Second},
			dialer:  new(net.Dialer).DialContext,
			pause:   runtime.Gosched,
			delay:   20 * time.Millisecond,
		})
	})
	t.Run("in memory", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := lbtest.NewNetwork()
			test(t, &rig{
				backend: n.NewBackend,
				client:  &http.Client{Transport: n.Transport()},
				dialer:  n.DialContext,
				pause:   func() { time.Sleep(time.Millisecond) },
				delay:   time.Hour,
				virtual: true,
			})
		})
	})
}

// until waits for cond, at most ten seconds.
func (r *rig) until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for start := time.Now(); !cond(); r.pause() {
		if time.Since(start) > 10*time.Second {
			t.Fatalf("after ten seconds not yet: %s", what)
		}
	}
}

// dial connects to b.
func (r *rig) dial(t *testing.T, b *lbtest.Backend) net.Conn {
	t.Helper()
	c, err := r.dialer(t.Context(), "tcp", b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// send makes a request and returns the status (0 without a response) and as
// much of the body as came.
func (r *rig) send(req *http.Request) (status int, body string, err error) {
	resp, err := r.client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

func newRequest(t *testing.T, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// put makes a request whose body hides its type, so that the transport cannot
// send it twice.
func put(t *testing.T, b *lbtest.Backend, body string) *http.Request {
	t.Helper()
	return newRequest(t, "PUT", b.URL(), io.MultiReader(strings.NewReader(body)))
}

// hasErrno also knows the numbers that the Windows kernel uses.
func hasErrno(err error, want syscall.Errno) bool {
	windows := map[syscall.Errno]syscall.Errno{syscall.ECONNRESET: 10054, syscall.ECONNREFUSED: 10061}
	got, _ := errors.AsType[syscall.Errno](err)
	return got == want || got == windows[want]
}

func TestNetworkListensAndRefuses(t *testing.T) {
	n := lbtest.NewNetwork()
	if _, err := n.DialContext(t.Context(), "tcp", "a.test:80"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial without a listener = %v, want connection refused", err)
	}
	l, err := n.Listen("a.test:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := n.Listen("a.test:80"); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("second Listen = %v, want address in use", err)
	}
	c, err := n.DialContext(t.Context(), "tcp", "a.test:80")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestTransportShowsTheRequestAsSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		b := n.NewBackend(t, "a")
		resp, err := n.Transport().RoundTrip(newRequest(t, "GET", b.URL(), nil))
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		if got := b.Received()[0].Header; got.Get("Accept-Encoding") != "" || resp.ProtoMajor != 1 {
			t.Errorf("headers %v over %s, want no compression and HTTP/1.1", got, resp.Proto)
		}
	})
}

func TestBlackholeTimesOutInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		b := n.NewBackend(t, "a")
		n.Blackhole(b.Addr(), true)
		client := &http.Client{Transport: n.Transport(), Timeout: time.Hour}
		start := time.Now()
		_, err := client.Get(b.URL())
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Hour {
			t.Errorf("Get = %v after %v, want a timeout after 1h", err, time.Since(start))
		}
		n.Blackhole(b.Addr(), false)
		resp, err := client.Get(b.URL())
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if b.Count() != 1 {
			t.Errorf("Count() = %d, want 1", b.Count())
		}
	})
}

func TestBackendsOfANetworkKeepTheirHost(t *testing.T) {
	n := lbtest.NewNetwork()
	for _, name := range []string{"a", "a", "with space", "a/b:c", "10.1.2.3", "::1", ""} {
		b := n.NewBackend(t, name)
		c, err := n.DialContext(t.Context(), "tcp", b.Addr())
		if err != nil {
			t.Errorf("dial %q at %s = %v", name, b.Addr(), err)
			continue
		}
		c.Close()
	}
}

// A network in memory needs no free ports, and in a synctest bubble no time.
func ExampleNetwork() {
	n := lbtest.NewNetwork()
	l, err := n.Listen("a.test:80")
	if err != nil {
		fmt.Println(err)
		return
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello from %s", r.Host)
	})}
	go server.Serve(l)
	defer server.Close()

	client := &http.Client{Transport: n.Transport()}
	resp, err := client.Get("http://a.test/")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)

	_, err = client.Get("http://b.test/")
	fmt.Println(errors.Is(err, syscall.ECONNREFUSED))
	// Output:
	// hello from a.test <nil>
	// true
}
