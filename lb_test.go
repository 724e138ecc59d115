package lb_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Without a backend to be had there is a 503 and a typed error, and the process
// lives on (labstack/echo#2976).
func TestNoBackendGives503(t *testing.T) {
	if _, err := lb.New(nil); err == nil {
		t.Error("New accepts an empty list")
	}
	var got error
	handler := lb.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, err error) {
		got = err
		w.WriteHeader(lb.StatusOf(err))
	})
	want503 := func(r *rig, why string) {
		t.Helper()
		got = nil
		a := r.must("GET", "", nil)
		r.wantStatus(a, 503)
		if !errors.Is(got, lb.ErrNoBackend) || a.header.Get("Retry-After") == "" {
			t.Errorf("error = %v, Retry-After = %q", got, a.header.Get("Retry-After"))
		}
		if got == nil || !strings.HasSuffix(got.Error(), why) {
			t.Errorf("error = %v, want it to end in %q", got, why)
		}
	}
	bubble(t, "the only one is taken out under traffic", func(t *testing.T) {
		r := newRig(t, answers(1), handler)
		r.wantStatus(r.must("GET", "", nil), 200)
		if err := r.pool.SetTargets(nil); err == nil {
			t.Error("SetTargets accepts an empty list")
		}
		r.wantStatus(r.must("GET", "", nil), 200)
		setState(t, r.pool, r.backends[0].URL(), lb.Disabled)
		want503(r, "of 1 targets 1 disabled")
		setState(t, r.pool, r.backends[0].URL(), lb.Active)
		r.wantStatus(r.must("GET", "", nil), 200)
		if err := r.pool.SetTargets([]lb.Target{{URL: r.backends[0].URL(), Weight: lb.NoWeight}}); err != nil {
			t.Fatal(err)
		}
		want503(r, "of 1 targets 1 without weight")
	})
	bubble(t, "the strategy wants none", func(t *testing.T) {
		r := newRig(t, answers(2), handler, lb.WithBalancer(lb.BalancerFunc(
			func(*http.Request, []*lb.Backend) *lb.Backend { return nil })))
		want503(r, "the strategy lb.BalancerFunc wanted none of 2 candidates")
	})
}

// A strategy that breaks its contract costs no request.
func TestBadPicksAreReplaced(t *testing.T) {
	foreign := lb.NewBackend(lb.Target{Name: "foreign"})
	for name, pick := range map[string]lb.BalancerFunc{
		"foreign": func(*http.Request, []*lb.Backend) *lb.Backend { return foreign },
		"panic":   func(*http.Request, []*lb.Backend) *lb.Backend { panic("strategy") },
		"not one of the candidates": func() lb.BalancerFunc {
			var once sync.Once
			var kept *lb.Backend
			return func(_ *http.Request, c []*lb.Backend) *lb.Backend {
				once.Do(func() { kept = c[0] })
				return kept
			}
		}(),
	} {
		bubble(t, name, func(t *testing.T) {
			var logged bytes.Buffer
			r := newRig(t, answers(3), lb.WithBalancer(pick), lb.WithLogger(slog.New(slog.NewTextHandler(&logged, nil))))
			r.must("GET", "", nil)
			setState(t, r.pool, r.backends[0].URL(), lb.Disabled)
			before := r.pool.Stats().BadPicks
			for range 20 {
				r.wantStatus(r.must("GET", "", nil), 200)
			}
			if n := r.pool.Stats().BadPicks - before; n != 20 {
				t.Errorf("bad picks = %d, want 20", n)
			}
			if n := strings.Count(logged.String(), "level=ERROR"); n < 1 || n > 6 {
				t.Errorf("%d of more than 20 bad picks are logged, want a few:\n%s", n, &logged)
			}
			r.wantIdle()
		})
	}
}

// Everything that is wrong is reported at once, each fault with its value, and
// SetTargets then changes nothing.
func TestBadInputIsReportedAtOnce(t *testing.T) {
	targets := []lb.Target{
		{URL: "http://ok:80"},
		{URL: "http://ok:80/"},
		{URL: "ftp://files"},
		{URL: "http://user:secret@host"},
		{URL: "http://host?x=1#top"},
		{URL: "http://:8080"},
		{URL: "http://host:99999"},
		{URL: "http://ho st"},
		{URL: "://"},
		{},
		{URL: "http://a", Weight: -2},
		{URL: "http://b", Weight: 70000},
		{URL: "http://c", Host: "bad host/"},
		{URL: "http://d", Name: "two\nlines"},
	}
	_, err := lb.New(targets, nil, lb.WithBalancer(nil), lb.WithBalancer(lb.BalancerFunc(nil)), lb.WithTransport((*http.Transport)(nil)),
		lb.WithErrorHandler(nil), lb.WithLogger(nil),
		lb.WithRetry(lb.RetryPolicy{Attempts: -1, Statuses: []int{200}, MaxDelay: -1, MaxPoolReplayBytes: -1}),
		lb.WithPassiveHealth(lb.PassiveHealth{Ejection: -1, MaxEjection: -5}))
	if err == nil {
		t.Fatal("New accepts it all")
	}
	for _, want := range []string{
		`target 2: URL "http://ok:80/" is that of target 1`, `"ftp": want http, https, h2c or unix`, `target 5: URL "http://host?x=1#top": a fragment`, "userinfo", `"?x=1"`, `"#top"`,
		`"http://:8080": no host`, `port "99999"`, `"http://ho st"`, `"://"`, "target 10: URL is empty", "weight -2", "weight 70000", `host "bad host/"`, `"two\nlines"`,
		"option 1 of 8 is nil", "WithBalancer: ", "WithTransport: ", "WithErrorHandler: ", "WithLogger: ",
		"Attempts is -1", "Statuses has 200", "MaxDelay is -1ns", "MaxPoolReplayBytes is -1", "Ejection is -1ns", "MaxEjection is -5ns",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q", want)
		}
	}
	if strings.Contains(err.Error(), "secret") {
		t.Error("the error shows a password")
	}
	if !strings.HasPrefix(err.Error(), "lb: ") {
		t.Errorf("the error begins with %.10q", err)
	}
	if t.Failed() {
		t.Log(err)
	}
	p := newPool(t, []lb.Target{{Name: "a", URL: "http://a"}})
	if err := p.SetTargets([]lb.Target{{Name: "b", URL: "http://b"}, {Name: "b", URL: "http://c"}}); err == nil {
		t.Error("SetTargets accepts a name twice")
	}
	if b := p.Backends(); len(b) != 1 || b[0].Name() != "a" {
		t.Errorf("a refused SetTargets left %v", b)
	}
	if err := p.SetState("nobody", lb.Active); err == nil || !strings.Contains(err.Error(), `"nobody"`) {
		t.Errorf("SetState of an unknown name = %v", err)
	}
	if err := p.SetState("a", lb.State(9)); err == nil {
		t.Error("SetState accepts an unknown state")
	}
}

func newPool(t *testing.T, targets []lb.Target, opts ...lb.Option) *lb.Pool {
	t.Helper()
	p, err := lb.New(targets, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// Whatever happens to requests, what was counted up comes down, and the shares
// are even afterwards (kubeai-project/kubeai#447).
func TestCountersComeDownOnEveryPath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		upgrade := lbtest.Handle(http.HandlerFunc(echoUpgrade))
		isUpgrade := func(r *http.Request) bool { return r.Header.Get("Upgrade") != "" }
		kinds := []lbtest.Behavior{lbtest.Answer(), lbtest.Reset(), lbtest.ResetMid(100), lbtest.ResetMidChunked(100),
			lbtest.Hang(), lbtest.Early(500, 100), lbtest.Stream(3, time.Millisecond)}
		r := newRig(t, answers(3), noEjection(), lb.WithBalancer(&panicky{Balancer: lb.LeastConnections()}),
			lb.WithTimeouts(lb.Timeouts{ResponseHeader: 50 * time.Millisecond}))
		var wg sync.WaitGroup
		for round := range 50 {
			for i, b := range r.backends {
				b.Set(lbtest.When(isUpgrade, upgrade, kinds[(round+i*3)%len(kinds)]))
			}
			for i := range 40 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+i*3)*time.Millisecond)
					defer cancel()
					method := [...]string{"GET", "POST", "PUT"}[i%3]
					req, _ := http.NewRequestWithContext(ctx, method, "http://"+frontAddr, streamOf(text(i*1000)))
					if i%10 == 9 {
						req.Header.Set("Connection", "Upgrade")
						req.Header.Set("Upgrade", "echo")
					}
					if resp, err := r.client.Do(req); err == nil {
						io.CopyN(io.Discard, resp.Body, int64(i*10))
						resp.Body.Close()
					}
				})
			}
			linger(20 * time.Millisecond)
		}
		wg.Wait()
		linger(time.Second)
		r.wantIdle()
		for _, b := range r.backends {
			b.Set(lbtest.Answer())
			b.Forget()
		}
		for range 600 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
		for _, b := range r.backends {
			if n := b.Count(); n < 170 || n > 230 {
				t.Errorf("%s got %d of 600, want 200", b.Name(), n)
			}
		}
	})
}

// panicky panics on every seventh pick.
type panicky struct {
	lb.Balancer
	n atomic.Int64
}

func (p *panicky) Pick(r *http.Request, c []*lb.Backend) *lb.Backend {
	if p.n.Add(1)%7 == 0 && r.Method != "GET" {
		panic("strategy")
	}
	return p.Balancer.Pick(r, c)
}

func echoUpgrade(w http.ResponseWriter, r *http.Request) {
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	io.Copy(c, rw)
}

// The core serves as the transport of a client and of somebody else's proxy, with
// the same balancing, retries and counts (dotnet/yarp PR#455).
func TestPoolAsRoundTripper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Answer(), lbtest.Refuse(), lbtest.Answer()})
		client := &http.Client{Transport: r.pool}
		proxy := &httputil.ReverseProxy{Rewrite: func(*httputil.ProxyRequest) {}, Transport: r.pool}
		for range 30 {
			body := &closing{Reader: strings.NewReader("hello")}
			req, _ := http.NewRequest("POST", "http://service/path", body)
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 200 || resp.Request != req || req.URL.Host != "service" || !body.closed.Load() {
				t.Errorf("status = %d, request kept = %t, host = %s, body closed = %t", resp.StatusCode, resp.Request == req, req.URL.Host, body.closed.Load())
			}
			rec := httptest.NewRecorder()
			proxy.ServeHTTP(rec, httptest.NewRequest("GET", "http://service/", nil))
			if rec.Code != 200 {
				t.Errorf("through a ReverseProxy: %d", rec.Code)
			}
		}
		s := r.pool.Stats()
		if s.Requests != 60 || s.Backends[1].Failures != 3 || s.Retries != 3 {
			t.Errorf("requests = %d, failures = %d, retries = %d; want 60, 3, 3", s.Requests, s.Backends[1].Failures, s.Retries)
		}
		if got := r.backends[0].Received()[0]; got.Host != "service" || got.Header.Get("X-Forwarded-For") != "" {
			t.Errorf("backend got %+v", got)
		}
		body := &closing{Reader: strings.NewReader("hello")}
		if _, err := r.pool.RoundTrip(&http.Request{Body: body}); err == nil || !body.closed.Load() {
			t.Errorf("a request without URL gives %v, body closed = %t", err, body.closed.Load())
		}
		r.backends[0].Set(lbtest.Reset())
		r.backends[2].Set(lbtest.Reset())
		body = &closing{Reader: strings.NewReader("hello")}
		req, _ := http.NewRequest("POST", "http://service/path", body)
		if _, err := client.Do(req); err == nil || asAttempt(t, err).Stage == 0 || !body.closed.Load() {
			t.Errorf("error = %v, body closed = %t", err, body.closed.Load())
		}
		r.wantIdle()
	})
}

type closing struct {
	io.Reader
	closed atomic.Bool
}

func (c *closing) Close() error { c.closed.Store(true); return nil }

// A tunnel of RoundTrip is the caller's until it is closed, and in flight as long.
func TestUpgradeThroughRoundTrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Handle(http.HandlerFunc(echoUpgrade))})
		req, _ := http.NewRequest("GET", "http://x/", nil)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "echo")
		resp, err := r.pool.RoundTrip(req)
		if err != nil || resp.StatusCode != 101 {
			t.Fatalf("answer = %v, %v", resp, err)
		}
		tunnel := resp.Body.(interface {
			io.ReadWriteCloser
			CloseWrite() error
		})
		io.WriteString(tunnel, "ping")
		if n := r.pool.Stats().InFlight; n != 1 {
			t.Errorf("in flight = %d with an open tunnel", n)
		}
		if err := tunnel.CloseWrite(); err != nil {
			t.Error(err)
		}
		if b, err := io.ReadAll(tunnel); string(b) != "ping" || err != nil {
			t.Errorf("echo = %q, %v", b, err)
		}
		if n := r.pool.Stats().InFlight; n != 1 {
			t.Errorf("in flight = %d before the tunnel is closed", n)
		}
		tunnel.Close()
		r.wantIdle()
	})
}

// Shutdown lets requests end and refuses new ones.
func TestShutdownWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Stream(10, 100*time.Millisecond)})
		var wg sync.WaitGroup
		wg.Go(func() {
			if a := r.must("GET", "", nil); a.status != 200 {
				t.Errorf("status = %d", a.status)
			}
		})
		linger(150 * time.Millisecond)
		wg.Go(func() {
			if err := r.pool.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		a := r.must("GET", "", nil)
		r.wantStatus(a, 503)
		if a.header.Get("Retry-After") == "" {
			t.Error("503 without Retry-After")
		}
		wg.Wait()
		r.wantIdle()
	})
}

// Shutdown cuts what has not ended when its time is up, which is no backend's fault.
func TestShutdownCutsWhenItsTimeIsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Stream(1000, 100*time.Millisecond)})
		resp, err := r.client.Get("http://" + frontAddr)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		within(t, 1100*time.Millisecond, func() {
			if err := r.pool.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Shutdown = %v", err)
			}
		})
		if _, err := io.ReadAll(resp.Body); err == nil {
			t.Error("the stream ended as if it were whole")
		}
		synctest.Wait()
		if n := r.pool.Stats().Backends[0].Failures; n != 0 {
			t.Errorf("the backend is blamed for %d failures", n)
		}
		r.wantIdle()
	})
}

// Close ends whatever waits, and the pool then refuses everything.
func TestCloseEndsWhateverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Hang(), lbtest.Answer()}, lb.WithBalancer(lb.BalancerFunc(first)))
		r.net.Blackhole(r.backends[1].Addr(), true)
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() { r.wantStatus(r.must("GET", "", nil), 503) })
		}
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nstalled")
		synctest.Wait()
		within(t, 10*time.Millisecond, func() {
			r.pool.Close()
			r.pool.Close()
			wg.Wait()
		})
		if err := r.pool.SetTargets(lb.Targets("http://x")); !errors.Is(err, lb.ErrClosed) {
			t.Errorf("SetTargets after Close = %v", err)
		}
		req, _ := http.NewRequest("GET", "http://x/", nil)
		if _, err := r.pool.RoundTrip(req); !errors.Is(err, lb.ErrClosed) || lb.StatusOf(err) != 503 {
			t.Errorf("RoundTrip after Close = %v", err)
		}
		if err := r.pool.SetState(r.backends[0].URL(), lb.Active); !errors.Is(err, lb.ErrClosed) {
			t.Errorf("SetState after Close = %v", err)
		}
		if err := r.pool.Shutdown(t.Context()); err != nil {
			t.Errorf("Shutdown after Close = %v", err)
		}
		synctest.Wait()
		r.wantIdle()
	})
}

func serve(h http.Handler, path string) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest("GET", path, nil))
	return rec
}
