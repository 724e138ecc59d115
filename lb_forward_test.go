package lb_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

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
		r.wantUnblamed()
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
		r.wantUnblamed()
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
		r.wantUnblamed()
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
			"X-Forwarded-For": "198.18.0.1", "X-Forwarded-Proto": "http", "X-Forwarded-Host": "front.test:80", "X-Other": "kept",
			"X-Forwarded-Port": "", "X-Forwarded-Prefix": "", "X-Real-Ip": "", "Forwarded": "",
		} {
			if s := strings.Join(got[name], " | "); s != want {
				t.Errorf("%s = %q, want %q", name, s, want)
			}
		}
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
		io.Copy(io.Discard, c)
		if h := r.backends[0].Received()[1].Header; h["X-Forwarded-Host"] != nil || h.Get("X-Forwarded-For") == "" {
			t.Errorf("HTTP/1.0 without Host goes out with %v", h)
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
			p := newPool(t, []lb.Target{{URL: "http://B.test:9000" + tt.prefix, Host: tt.host}}, over(network))
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
