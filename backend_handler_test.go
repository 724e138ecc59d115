package lb_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// handlerRig starts a pool whose only target is h.
func handlerRig(t *testing.T, h http.Handler, opts ...lb.Option) *rig {
	t.Helper()
	r := newBackends(t, 0)
	r.start([]lb.Target{{Name: "local", Handler: h}}, opts...)
	return r
}

// A handler in this process serves as a server would, for both faces of the pool.
func TestHandlerTargetServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil || r.RequestURI != "/a%2fb?q=%zz" && r.RequestURI != "/plain" || r.URL.Host != "" || r.Header.Get("User-Agent") == "" {
				t.Errorf("request = %+v, %v", r, err)
			}
			w.Header().Set("X-For", r.Header.Get("X-Forwarded-For"))
			w.WriteHeader(201)
			fmt.Fprintf(w, "%s %s %s", r.Method, r.Host, body)
		})
		r := handlerRig(t, h)
		req, _ := http.NewRequest("PUT", "http://"+frontAddr+"/a%2fb?q=%zz", strings.NewReader("body"))
		req.URL.Opaque = "/a%2fb"
		resp, err := r.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 201 || string(body) != "PUT "+frontAddr+" body" || resp.Header.Get("X-For") != "198.18.0.1" {
			t.Errorf("answer = %d %q %v", resp.StatusCode, body, resp.Header)
		}
		req, _ = http.NewRequest("GET", "http://x.test/plain", nil)
		req.Header.Set("User-Agent", "mine")
		resp, err = r.pool.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ = io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(body) != "GET x.test " {
			t.Errorf("RoundTrip gave %q", body)
		}
		synctest.Wait()
		r.wantUnblamed()
		r.wantIdle()
	})
}

// Flushes, 1xx answers and trailers come through, and the answer streams.
func TestHandlerTargetStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := handlerRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", "</x>")
			w.WriteHeader(103)
			w.Header().Del("Link")
			w.Header().Set("Trailer", "X-Sum")
			http.NewResponseController(w).Flush()
			for i := range 3 {
				linger(time.Second)
				fmt.Fprint(w, i)
			}
			w.Header().Set("X-Sum", "012")
			w.Header().Set(http.TrailerPrefix+"X-Late", "yes")
		}))
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		began := time.Now()
		var got strings.Builder
		buf := make([]byte, 4096)
		for {
			n, err := c.Read(buf)
			fmt.Fprintf(&got, "%v: %s", time.Since(began), buf[:n])
			if err != nil {
				break
			}
		}
		for _, want := range []string{"0s: HTTP/1.1 103 Early Hints\r\nLink: </x>", "HTTP/1.1 200 OK", "1s: 1\r\n0", "2s: 1\r\n1", "3s: ", "X-Sum: 012", "X-Late: yes"} {
			if !strings.Contains(got.String(), want) {
				t.Errorf("the client read %q, which lacks %q", got.String(), want)
			}
		}
	})
}

// A panic is a failure of the backend, in mid-answer a cut; a handler that ignores its
// context is left behind and counted.
func TestHandlerTargetMisbehaves(t *testing.T) {
	bubble(t, "panics before its answer", func(t *testing.T) {
		r := newBackends(t, 1)
		targets := append([]lb.Target{{Name: "local", Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") })}}, r.targets()...)
		r.start(targets, lb.WithBalancer(lb.BalancerFunc(first)), noEjection())
		r.wantStatus(r.must("GET", "", nil), 200)
		if s := r.pool.Stats(); s.Panics != 1 || s.Backends[0].Failures != 1 || s.Backends[1].Requests != 1 {
			t.Errorf("stats = %+v", s)
		}
		r.wantIdle()
	})
	bubble(t, "panics in its answer", func(t *testing.T) {
		r := handlerRig(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "some")
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}))
		if a, err := r.do("GET", "", nil); err == nil && a.bodyErr == nil {
			t.Errorf("the client read %q to a clean end", a.body)
		}
		synctest.Wait()
		if s := r.pool.Stats(); s.Cut != 1 || s.Panics != 0 || s.Backends[0].Failures != 1 {
			t.Errorf("stats = %+v", s)
		}
		r.wantIdle()
	})
	bubble(t, "goes on for ever", func(t *testing.T) {
		release := make(chan struct{})
		r := handlerRig(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
		c := r.dial()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		r.after(time.Second)
		c.Close()
		r.after(5 * time.Second)
		if s := r.pool.Stats(); s.Abandoned != 1 || s.ClientClosed != 1 || s.InFlight != 0 {
			t.Errorf("abandoned = %d, client closed = %d, in flight = %d", s.Abandoned, s.ClientClosed, s.InFlight)
		}
		close(release)
	})
	bubble(t, "wants to take the connection over", func(t *testing.T) {
		r := handlerRig(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if _, _, err := http.NewResponseController(w).Hijack(); err == nil {
				t.Error("it could")
			}
			http.Error(w, "no", 400)
		}))
		r.wantStatus(r.must("GET", "", nil), 400)
	})
}

// The client that leaves ends the handler's context, also in mid-answer.
func TestHandlerTargetHearsOfTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Int64
		r := handlerRig(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
			ended.Add(1)
		}))
		c := r.dial()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		r.after(time.Second)
		c.Close()
		synctest.Wait()
		if ended.Load() != 1 || r.pool.Stats().Abandoned != 0 {
			t.Errorf("ended = %d, abandoned = %d", ended.Load(), r.pool.Stats().Abandoned)
		}
		r.wantIdle()
	})
}

// A pool can be the target of another: its upgrades pass, and that it could not reach
// anybody is known to be harmless.
func TestPoolAsTarget(t *testing.T) {
	inner := func(t *testing.T, r *rig, opts ...lb.Option) *lb.Pool {
		pool, err := lb.New(r.targets(), append([]lb.Option{over(r.net)}, opts...)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { pool.Close() })
		return pool
	}
	bubble(t, "upgrades", func(t *testing.T) {
		r := newBackends(t, 1)
		r.backends[0].Set(lbtest.Handle(http.HandlerFunc(echoUpgrade)))
		r.start([]lb.Target{{Name: "inner", Handler: inner(t, r)}}, upgradesTo("echo"))
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nping")
		buf := make([]byte, 4096)
		var got string
		for !strings.HasSuffix(got, "ping") {
			n, err := c.Read(buf)
			if got += string(buf[:n]); err != nil {
				break
			}
		}
		if !strings.HasPrefix(got, "HTTP/1.1 101") || !strings.HasSuffix(got, "ping") {
			t.Errorf("the client read %q", got)
		}
	})
	bubble(t, "a POST goes elsewhere if nobody could be reached", func(t *testing.T) {
		r := newBackends(t, 1)
		r.backends[0].Set(lbtest.Refuse())
		other := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			w.Write(body)
		})
		r.start([]lb.Target{{Name: "inner", Handler: inner(t, r)}, {Name: "local", Handler: other}}, lb.WithBalancer(lb.BalancerFunc(first)))
		a := r.must("POST", "", strings.NewReader("body"))
		if a.status != 200 || string(a.body) != "body" {
			t.Errorf("answer = %d %q", a.status, a.body)
		}
	})
	bubble(t, "the target of the request goes through both byte for byte", func(t *testing.T) {
		r := newBackends(t, 1)
		r.start([]lb.Target{{Name: "inner", Handler: inner(t, r)}})
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "GET /a%2fb?x=%zz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		io.Copy(io.Discard, c)
		if got := r.backends[0].Received(); len(got) != 1 || got[0].Target != "/a%2fb?x=%zz" {
			t.Errorf("received %+v", got)
		}
	})
}

// Handler targets are probed in this process, and changed in place.
func TestHandlerTargetInASet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		says := func(text string, probe int) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == probePath {
					w.WriteHeader(probe)
					return
				}
				io.WriteString(w, text)
			})
		}
		r := handlerRig(t, says("one", 503), lb.WithHealthCheck(everySecond()))
		r.after(time.Second)
		r.wantStates("unhealthy")
		b := r.pool.Backends()[0]
		if err := r.pool.SetTargets([]lb.Target{{Name: "local", Handler: says("two", 200)}}); err != nil {
			t.Fatal(err)
		}
		r.after(3 * time.Second)
		r.wantStates("healthy")
		if a := r.must("GET", "", nil); string(a.body) != "two" || r.pool.Backends()[0] != b || b.URL() != "" {
			t.Errorf("answer = %q, backend kept: %t, URL %q", a.body, r.pool.Backends()[0] == b, b.URL())
		}
	})
}

func TestHandlerTargetBadInput(t *testing.T) {
	h := http.NotFoundHandler()
	_, err := lb.New([]lb.Target{
		{Handler: h}, {Name: "b", Handler: h, URL: "http://b"}, {Name: "c", Handler: (*http.ServeMux)(nil)},
		{Name: "d", Handler: h, HealthURL: "http://d/"}, {Name: "e", Handler: h, Host: lb.HostFromURL},
	})
	if err == nil {
		t.Fatal("New accepts it all")
	}
	for _, want := range []string{
		"target 1: a Handler without Name", `target 2: URL "http://b" beside a Handler`, "target 3: handler is a nil *http.ServeMux",
		`target 4: health URL "http://d/" beside a Handler`, "target 5: HostFromURL beside a Handler",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("New = %v\nwant in it: %s", err, want)
		}
	}
	pool := newPool(t, []lb.Target{{Name: "a", Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "here") })}})
	defer pool.Close()
	w := httptest.NewRecorder()
	pool.ServeHTTP(w, httptest.NewRequest("HEAD", "/", nil))
	if w.Code != 200 || w.Body.Len() != 0 {
		t.Errorf("HEAD = %d %q", w.Code, w.Body)
	}
}

// A handler that answers with trailers alone has returned while they are looked at.
func TestTrailersOfAHandlerWithoutBody(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "Grpc-Status, Grpc-Message")
		w.WriteHeader(200)
		w.Header().Set("Grpc-Status", "5")
		w.Header().Set("Grpc-Message", "x")
		w.Header().Set(http.TrailerPrefix+"Unannounced", "y")
	})
	pool := newPool(t, []lb.Target{{Name: "h", Handler: h}})
	for range 500 {
		w := httptest.NewRecorder()
		pool.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		if got := w.Result().Trailer; got.Get("Grpc-Status") != "5" || got.Get("Grpc-Message") != "x" || got.Get("Unannounced") != "y" {
			t.Fatalf("trailers = %v", got)
		}
	}
}

// The trace of the attempt is not the handler's: a hint that another server gives to it
// is nothing for the client.
func TestHandlerDoesNotHaveTheAttemptsTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{hinting()})
		side := r.pool
		outer := newPool(t, []lb.Target{{Name: "h", Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			ask, _ := http.NewRequestWithContext(req.Context(), "GET", r.backends[0].URL(), nil)
			if resp, err := r.client.Do(ask); err == nil {
				resp.Body.Close()
			}
			w.WriteHeader(204)
		})}})
		r.server.Handler = outer
		_, br := r.openWith("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		if codes, _, _ := finalAnswer(t, br); !slices.Equal(codes, []int{204}) {
			t.Errorf("the client got %v, want 204 alone", codes)
		}
		side.Close()
	})
}
