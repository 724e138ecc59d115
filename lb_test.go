package lb_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"runtime"
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
	want503 := func(r *rig) {
		t.Helper()
		got = nil
		a := r.must("GET", "", nil)
		r.wantStatus(a, 503)
		if !errors.Is(got, lb.ErrNoBackend) || a.header.Get("Retry-After") == "" {
			t.Errorf("error = %v, Retry-After = %q", got, a.header.Get("Retry-After"))
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
		want503(r)
		setState(t, r.pool, r.backends[0].URL(), lb.Active)
		r.wantStatus(r.must("GET", "", nil), 200)
		if err := r.pool.SetTargets([]lb.Target{{URL: r.backends[0].URL(), Weight: lb.NoWeight}}); err != nil {
			t.Fatal(err)
		}
		want503(r)
	})
	bubble(t, "the strategy wants none", func(t *testing.T) {
		r := newRig(t, answers(2), handler, lb.WithBalancer(lb.BalancerFunc(
			func(*http.Request, []*lb.Backend) *lb.Backend { return nil })))
		want503(r)
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
			r := newRig(t, answers(3), lb.WithBalancer(pick))
			r.must("GET", "", nil)
			setState(t, r.pool, r.backends[0].URL(), lb.Disabled)
			before := r.pool.Stats().BadPicks
			for range 20 {
				r.wantStatus(r.must("GET", "", nil), 200)
			}
			if n := r.pool.Stats().BadPicks - before; n != 20 {
				t.Errorf("bad picks = %d, want 20", n)
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
		`target 2: name "http://ok:80" is taken by target 1`, `"ftp": want http or https`, "userinfo", `"?x=1"`, `"#top"`,
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

// Which status and reason each kind of failure gives (caddyserver/caddy PR#3816):
// beside a second backend, alone, and when nobody can be reached.
func TestStatusAndReasonOfEachFailure(t *testing.T) {
	const blackhole = "blackhole"
	for _, tt := range []struct {
		name     string
		behavior lbtest.Behavior
		https    bool
		status   int // when it is the only backend
		stage    lb.Stage
		cause    lb.Cause
	}{
		{"refuses", lbtest.Refuse(), false, 503, lb.StageDial, lb.CauseRefused},
		{blackhole, lbtest.Answer(), false, 503, lb.StageDial, lb.CauseTimeout},
		{"speaks no TLS", lbtest.Answer(), true, 503, lb.StageTLS, lb.CauseTLS},
		{"hangs", lbtest.Hang(), false, 504, lb.StageResponse, lb.CauseTimeout},
		{"resets", lbtest.Reset(), false, 502, lb.StageResponse, lb.CauseReset},
		{"is no HTTP", lbtest.Raw("SSH-2.0-OpenSSH_9.2\r\n\r\n"), false, 502, lb.StageResponse, lb.CauseProtocol},
		{"breaks off in the status line", lbtest.Raw("HTTP/1.1 2"), false, 502, lb.StageResponse, lb.CauseReset},
	} {
		for _, beside := range []bool{false, true} {
			bubble(t, fmt.Sprintf("%s, beside one that answers %t", tt.name, beside), func(t *testing.T) {
				var got error
				opts := []lb.Option{noEjection(), lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second}),
					lb.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, err error) {
						got = err
						w.WriteHeader(lb.StatusOf(err))
					})}
				r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
				b := r.net.NewBackend(t, "bad")
				b.Set(tt.behavior)
				r.net.Blackhole(b.Addr(), tt.name == blackhole)
				scheme := "http://"
				if tt.https {
					scheme = "https://"
				}
				targets := lb.Targets(scheme + b.Addr())
				if beside {
					targets = append(targets, lb.Targets(r.net.NewBackend(t, "good").URL())...)
				}
				r.start(targets, opts...)
				for range 4 {
					a := r.must("GET", "", nil)
					if beside {
						r.wantStatus(a, 200)
						continue
					}
					r.wantStatus(a, tt.status)
					if ae := asAttempt(t, got); ae.Stage != tt.stage || ae.Cause != tt.cause || ae.Blame != lb.BlameBackend {
						t.Errorf("reason = %v, %v, %v; want %v, %v (%v)", ae.Stage, ae.Cause, ae.Blame, tt.stage, tt.cause, ae)
					}
				}
				r.wantIdle()
			})
		}
	}
}

// What is the client's fault is told so.
func TestClientFaultsAreToldApart(t *testing.T) {
	bubble(t, "body over a limit in front of the pool is 413", func(t *testing.T) {
		r := newRig(t, answers(1))
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			req.Body = http.MaxBytesReader(w, req.Body, 1000)
			r.pool.ServeHTTP(w, req)
		})
		for _, body := range []io.Reader{strings.NewReader(text(5000)), streamOf(text(5000))} {
			r.wantStatus(r.must("POST", "", body), 413)
		}
		if s := r.pool.Stats(); s.Backends[0].Failures != 0 {
			t.Errorf("the backend is blamed for %d failures", s.Backends[0].Failures)
		}
	})
	bubble(t, "broken chunk is 400", func(t *testing.T) {
		r := newRig(t, answers(1))
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != 400 {
			t.Errorf("answer = %v, %v", resp, err)
		}
		if s := r.pool.Stats(); s.Backends[0].Failures != 0 {
			t.Errorf("the backend is blamed for %d failures", s.Backends[0].Failures)
		}
	})
	bubble(t, "a deadline of the caller is 504 and nobody's failure", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Hang()})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, "GET", "http://x/", nil)
		_, err := r.pool.RoundTrip(req)
		if ae := asAttempt(t, err); ae.Cause != lb.CauseDeadline || lb.StatusOf(err) != 504 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error = %v, status %d", err, lb.StatusOf(err))
		}
		if s := r.pool.Stats(); s.Backends[0].Failures != 0 {
			t.Errorf("the backend is blamed for %d failures", s.Backends[0].Failures)
		}
	})
	bubble(t, "CONNECT is 405", func(t *testing.T) {
		r := newRig(t, answers(1))
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != 405 || r.count() != 0 {
			t.Errorf("answer = %v, %v, arrivals = %d", resp, err, r.count())
		}
	})
}

// An answer that breaks off is seen as a cut by the client. A recover middleware
// sees the standard sentinel or nothing; without a server there is no panic
// (golang/go#28239).
func TestCutAnswerIsSeenAsACut(t *testing.T) {
	for name, behavior := range map[string]lbtest.Behavior{"length": lbtest.ResetMid(1000), "chunked": lbtest.ResetMidChunked(1000)} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{behavior}, noEjection())
			var recovered atomic.Value
			r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				defer func() {
					if v := recover(); v != nil {
						recovered.Store(v)
						panic(v)
					}
				}()
				r.pool.ServeHTTP(w, req)
			})
			a, err := r.do("GET", "1", nil)
			if err == nil && a.bodyErr == nil {
				t.Errorf("the client read %d bytes to a clean end", len(a.body))
			}
			if v := recovered.Load(); v != nil && v != http.ErrAbortHandler {
				t.Errorf("middleware recovered %v", v)
			}
			if n := r.arrivals("1"); n != 1 {
				t.Errorf("arrivals = %d: a request was repeated after the answer had begun", n)
			}
			if r.errorLog.Len() != 0 {
				t.Errorf("logged %q", r.errorLog)
			}
			rec := httptest.NewRecorder()
			r.pool.ServeHTTP(rec, httptest.NewRequest("GET", "/", nil))
			if rec.Code != 200 {
				t.Errorf("recorder got %d", rec.Code)
			}
			r.wantIdle()
		})
	}
}

// What a client says about itself and its way is replaced by what is known
// (golang/go PR#36678).
func TestForwardedFieldsAreRebuilt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, answers(1))
		r.must("GET", "", nil, "X-Forwarded-For", "1.2.3.4", "X-Forwarded-Proto", "https", "X-Forwarded-Host", "evil.test",
			"X-Forwarded-Port", "1", "X-Forwarded-Prefix", "/evil", "X-Real-Ip", "1.2.3.4", "Forwarded", "for=1.2.3.4", "X_Forwarded_For", "1.2.3.4", "X-Other", "kept")
		got := r.backends[0].Received()[0].Header
		for name, want := range map[string]string{
			"X-Forwarded-For": "10.0.0.1", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "front.test:80", "X-Other": "kept",
			"X-Forwarded-Port": "", "X-Forwarded-Prefix": "", "X-Real-Ip": "", "Forwarded": "",
		} {
			if s := strings.Join(got[name], " | "); s != want {
				t.Errorf("%s = %q, want %q", name, s, want)
			}
		}
		for name := range got {
			if strings.Contains(name, "_") {
				t.Errorf("%s was passed on", name)
			}
		}
	})
}

// The bytes of an answer pass as they are: nobody asks for compression that the
// client did not ask for, or takes it away (knative/pkg PR#2007).
func TestCompressionIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		packed := "\x1f\x8b\x08 pretend that this is gzip"
		r := newRig(t, []lbtest.Behavior{lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Accept-Encoding") != "" {
				t.Errorf("Accept-Encoding = %q", r.Header.Get("Accept-Encoding"))
			}
			w.Header().Set("Content-Encoding", "gzip")
			io.WriteString(w, packed)
		}))})
		a := r.must("GET", "", nil)
		if string(a.body) != packed || a.header.Get("Content-Encoding") != "gzip" || a.header.Get("Content-Length") != fmt.Sprint(len(packed)) {
			t.Errorf("answer = %q with %v", a.body, a.header)
		}
	})
}

// Path prefix, Host and query go out as the target says and the client wrote.
func TestTargetShapesTheRequest(t *testing.T) {
	for _, tt := range []struct{ prefix, host, path, wantTarget, wantHost string }{
		{"", "", "/x?a=1;b=%zz", "/x?a=1;b=%zz", "client.test"},
		{"/api/", "", "/x", "/api/x", "client.test"},
		{"/a%2Fb", "", "/c%2Fd?q", "/a%2Fb/c%2Fd?q", "client.test"},
		{"/api", lb.HostFromURL, "", "/api/", "b.test:9000"},
		{"", "other.test", "/", "/", "other.test"},
	} {
		bubble(t, tt.prefix+tt.path+tt.host, func(t *testing.T) {
			network := lbtest.NewNetwork()
			ln, err := network.Listen("b.test:9000")
			if err != nil {
				t.Fatal(err)
			}
			var target, host string
			s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { target, host = r.RequestURI, r.Host })}
			go s.Serve(ln)
			defer s.Close()
			p := newPool(t, []lb.Target{{URL: "http://B.test:9000" + tt.prefix, Host: tt.host}}, lb.WithTransport(network.Transport()))
			path := tt.path
			if path == "" {
				path = "/"
			}
			p.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "http://client.test"+path, nil))
			if target != tt.wantTarget || host != tt.wantHost {
				t.Errorf("ServeHTTP: target = %q, host = %q; want %q, %q", target, host, tt.wantTarget, tt.wantHost)
			}
			p.CloseIdleConnections()
		})
	}
}

// A request that straddles an update finds a backend (nginx/nginx#1656).
func TestUpdatesUnderTrafficLoseNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, answers(2))
		sets := [][]lb.Target{lb.Targets(r.backends[0].URL()), lb.Targets(r.backends[1].URL())}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := r.pool.SetTargets(sets[i%2]); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Millisecond)
			}
		})
		for range 20 {
			wg.Go(func() {
				for ctx.Err() == nil {
					if a, err := r.do("GET", "", nil); err != nil || a.status != 200 {
						t.Errorf("answer = %d, %v", a.status, err)
						return
					}
					time.Sleep(1700 * time.Microsecond)
				}
			})
		}
		wg.Wait()
		if r.backends[0].Count() == 0 || r.backends[1].Count() == 0 {
			t.Errorf("arrivals = %d and %d", r.backends[0].Count(), r.backends[1].Count())
		}
		r.wantIdle()
	})
}

// A backend that leaves takes its connections along, those of requests that are
// still under way when they end (tailscale/tailscale PR#6804).
func TestRemovedBackendsKeepNoConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Answer(), lbtest.Delay(time.Second)})
		stay, leave := r.backends[0], r.backends[1]
		for range 100 {
			if err := r.pool.SetTargets(lb.Targets(stay.URL(), leave.URL())); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					if a, err := r.do("GET", "", nil); err != nil || a.status != 200 {
						t.Errorf("answer = %d, %v", a.status, err)
					}
				})
			}
			synctest.Wait() // some are under way on the one that leaves
			if err := r.pool.SetTargets(lb.Targets(stay.URL())); err != nil {
				t.Fatal(err)
			}
			wg.Wait()
		}
		synctest.Wait()
		if leave.Count() == 0 || leave.OpenConns() != 0 {
			t.Errorf("the backend that left got %d requests and has %d connections open, want some and 0", leave.Count(), leave.OpenConns())
		}
		r.wantIdle()
	})
}

// Five hundred clients at once need about as many connections, not one each per
// request (caddyserver/caddy#938).
func TestIdleConnectionsAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const clients = 100
		r := newRig(t, []lbtest.Behavior{lbtest.Delay(10 * time.Millisecond)})
		r.client.Transport.(*http.Transport).MaxIdleConnsPerHost = clients
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				for range 20 {
					r.wantStatus(r.must("GET", "", nil), 200)
				}
			})
		}
		wg.Wait()
		if n := r.backends[0].TotalConns(); n > clients*12/10 {
			t.Errorf("%d requests of %d clients took %d connections", r.count(), clients, n)
		}
	})
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
			time.Sleep(20 * time.Millisecond)
		}
		wg.Wait()
		time.Sleep(time.Second)
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
		r.backends[0].Set(lbtest.Reset())
		r.backends[2].Set(lbtest.Reset())
		body := &closing{Reader: strings.NewReader("hello")}
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

// Early hints of the first attempt are passed on as they come, those of a
// discarded one that came later are not.
func TestInformationalAnswersOfTheFirstAttemptOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hint := func(name string, code int) lbtest.Behavior {
			return lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Link", name)
				w.WriteHeader(103)
				w.WriteHeader(code)
			}))
		}
		r := newRig(t, []lbtest.Behavior{hint("a", 503), hint("b", 503), hint("c", 200)},
			lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}}), lb.WithBalancer(lb.BalancerFunc(first)))
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		all, err := io.ReadAll(c)
		s := string(all)
		if err != nil || strings.Count(s, "103 Early Hints") != 1 || !strings.Contains(s, "Link: a\r\n") || strings.Contains(s, "Link: b") || !strings.Contains(s, "200 OK") {
			t.Errorf("client saw %q, %v", s, err)
		}
	})
}

// Shutdown lets requests end and refuses new ones; Close cuts; both leave nothing.
func TestShutdownAndClose(t *testing.T) {
	bubble(t, "shutdown waits", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Stream(10, 100*time.Millisecond)})
		var wg sync.WaitGroup
		wg.Go(func() {
			if a := r.must("GET", "", nil); a.status != 200 {
				t.Errorf("status = %d", a.status)
			}
		})
		time.Sleep(150 * time.Millisecond)
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
	bubble(t, "shutdown cuts when its time is up", func(t *testing.T) {
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
	bubble(t, "close ends whatever waits", func(t *testing.T) {
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
		synctest.Wait()
		r.wantIdle()
	})
}

// Two pools with different certificates do not disturb each other or net/http's
// default (vulcand/oxy#199).
func TestPoolsShareNothing(t *testing.T) {
	before := fmt.Sprintf("%p %v", http.DefaultTransport.(*http.Transport).TLSClientConfig, http.DefaultTransport.(*http.Transport).MaxIdleConns)
	server := func(name string) *httptest.Server {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, name) }))
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.StartTLS()
		t.Cleanup(s.Close)
		return s
	}
	a, b := server("one"), server("two")
	one := newPool(t, lb.Targets(a.URL), lb.WithTransport(a.Client().Transport))
	two := newPool(t, lb.Targets(b.URL), lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if got := serve(one, "/"); got.Code != 200 || got.Body.String() != "one" {
					t.Errorf("first pool answers %d %q", got.Code, got.Body)
				}
				if got := serve(two, "/"); got.Code != 503 {
					t.Errorf("second pool, which does not know the certificate, answers %d", got.Code)
				}
			}
		})
	}
	wg.Wait()
	if after := fmt.Sprintf("%p %v", http.DefaultTransport.(*http.Transport).TLSClientConfig, http.DefaultTransport.(*http.Transport).MaxIdleConns); after != before {
		t.Errorf("http.DefaultTransport changed from %s to %s", before, after)
	}
}

// Close leaves no goroutine behind, with real connections too.
func TestCloseLeavesNoGoroutine(t *testing.T) {
	b := lbtest.NewBackend(t, "a")
	for range 3 { // the first round warms net/http up
		before := runtime.NumGoroutine()
		p := newPool(t, lb.Targets(b.URL()))
		for range 50 {
			serve(p, "/")
		}
		p.Close()
		deadline := time.Now().Add(10 * time.Second)
		for runtime.NumGoroutine() > before+2 {
			if time.Now().After(deadline) {
				t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
			}
			runtime.Gosched()
		}
	}
}

func serve(h http.Handler, path string) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest("GET", path, nil))
	return rec
}
