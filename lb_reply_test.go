package lb_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// A server whose time-outs are for ordinary requests can stream for longer, if each
// write has a time of its own (hoophq/hoop PR#1577, infiniflow/ragflow#15840,
// inference-gateway/inference-gateway PR#427).
func TestClientWriteOutlastsTheServersTimeouts(t *testing.T) {
	start := func(t *testing.T, limit time.Duration, behavior lbtest.Behavior) *rig {
		r := newBackends(t, 1)
		r.backends[0].Set(behavior)
		pool := newPool(t, r.targets(), over(r.net), lb.WithTimeouts(lb.Timeouts{ClientWrite: limit}))
		r.pool = pool
		ln, err := r.net.Listen(frontAddr)
		if err != nil {
			t.Fatal(err)
		}
		r.server = &http.Server{Handler: pool, ReadTimeout: 300 * time.Millisecond, WriteTimeout: 300 * time.Millisecond}
		go r.server.Serve(ln)
		r.client = &http.Client{Transport: r.net.Transport()}
		t.Cleanup(func() {
			r.client.CloseIdleConnections()
			r.server.Close()
			pool.Close()
			advance(time.Second)
		})
		return r
	}
	bubble(t, "with it the answer is whole, and the next one too", func(t *testing.T) {
		r := start(t, time.Second, lbtest.Stream(20, 100*time.Millisecond))
		for range 2 {
			if a := r.must("GET", "", nil); a.status != 200 || len(a.body) != len("chunk 1\n")*9+len("chunk 10\n")*11 {
				t.Errorf("answer = %d %q", a.status, a.body)
			}
		}
		r.wantUnblamed()
	})
	bubble(t, "without it the server has its way", func(t *testing.T) {
		r := start(t, 0, lbtest.Stream(20, 100*time.Millisecond))
		if a, err := r.do("GET", "", nil); err == nil && a.bodyErr == nil {
			t.Errorf("the answer is whole: %q", a.body)
		}
	})
	for name, answer := range map[string]func(http.ResponseWriter){
		"small answers": func(w http.ResponseWriter) { io.WriteString(w, text(1500)) },
		"small streams": func(w http.ResponseWriter) { w.(http.Flusher).Flush(); io.WriteString(w, text(1500)) },
		"no body":       func(w http.ResponseWriter) { w.Header().Set("X", text(1500)); w.WriteHeader(204) },
	} {
		bubble(t, "a client that asks on and takes nothing is let go: "+name, func(t *testing.T) {
			r := start(t, time.Second, lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { answer(w) })))
			c := r.dial()
			defer c.Close()
			within(t, time.Second, func() {
				for err := error(nil); err == nil; {
					_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				}
			})
			r.after(time.Second)
			r.wantIdle()
		})
	}
	bubble(t, "a client that takes nothing is let go", func(t *testing.T) {
		r := start(t, time.Second, lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for range 1000 {
				if _, err := io.WriteString(w, text(10_000)); err != nil {
					return
				}
			}
		})))
		c := r.dial()
		defer c.Close()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		r.after(3 * time.Second)
		if s := r.pool.Stats(); s.InFlight != 0 || s.ClientClosed != 1 {
			t.Errorf("in flight = %d, client closed = %d", s.InFlight, s.ClientClosed)
		}
		r.wantUnblamed()
	})
}

// A client of gRPC gets a status that it understands.
func TestRepliesToGRPC(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Hang()}, noEjection(), lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second}))
		ask := func(contentType string) *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			req := httptest.NewRequest("POST", "/", nil)
			req.Header.Set("Content-Type", contentType)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // the limit for headers is not for gRPC
			defer cancel()
			r.pool.ServeHTTP(w, req.WithContext(ctx))
			return w
		}
		began := time.Now()
		if w := ask("application/grpc+proto"); time.Since(began) != time.Minute || w.Code != 200 || w.Header().Get("Grpc-Status") != "4" || w.Header().Get("Content-Type") != "application/grpc" {
			t.Errorf("a time-out is %d %v", w.Code, w.Header())
		}
		r.backends[0].Set(lbtest.Refuse())
		if w := ask("application/grpc"); w.Code != 200 || w.Header().Get("Grpc-Status") != "14" || w.Header().Get("Retry-After") == "" {
			t.Errorf("nobody there is %d %v", w.Code, w.Header())
		}
		for _, other := range []string{"application/grpc-web", "application/grpcx", "text/plain"} {
			if w := ask(other); w.Code != 503 || w.Header().Get("Grpc-Status") != "" {
				t.Errorf("%s: %d %v", other, w.Code, w.Header())
			}
		}
	})
}

// A redirect to the backend's own origin leads back through the pool: clients neither
// see nor can reach that address. All others are left as they are.
func TestLocationOfTheBackendIsTheClients(t *testing.T) {
	for _, c := range []struct{ prefix, location, want string }{
		{"", "http://{addr}/next?x=1#y", "/next?x=1#y"},
		{"", "/next", "/next"},
		{"", "next", "next"},
		{"", "http://elsewhere.test/next", "http://elsewhere.test/next"},
		{"", "https://{addr}/next", "https://{addr}/next"},
		{"", "//{addr}/next", "/next"},
		{"", "HTTP://{addr}?x", "/?x"},
		{"", "http://{addr}//elsewhere.test", "/.//elsewhere.test"}, // or the path would be a host
		{"", "http://me:secret@{addr}/next", "/next"},
		{"/base", "http://{addr}/base/next", "/next"},
		{"/base", "http://{addr}/base", "/"},
		{"/base", "http://{addr}/basement", "/basement"},
		{"/base", "/base/next", "/next"},
		{"/base", "/other", "/other"},
	} {
		bubble(t, c.prefix+" "+c.location, func(t *testing.T) {
			r := newBackends(t, 1)
			addr := r.backends[0].Addr()
			fill := func(s string) string { return strings.ReplaceAll(s, "{addr}", addr) }
			r.backends[0].Set(lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Location", fill(c.location))
				w.Header().Set("Content-Location", fill(c.location))
				w.WriteHeader(302)
			})))
			r.start([]lb.Target{{URL: r.backends[0].URL() + c.prefix}})
			wantLocation(t, r, fill(c.want))
			// A pool around this one does not know whose address to look for.
			outer := newPool(t, []lb.Target{{Name: "inner", Handler: r.pool}})
			r.server.Handler = outer
			wantLocation(t, r, fill(c.want))
		})
	}
}

func wantLocation(t *testing.T, r *rig, want string) {
	t.Helper()
	_, br := r.openWith("GET / HTTP/1.1\r\nHost: " + frontAddr + "\r\n\r\n")
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"Location", "Content-Location"} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
}

func TestOriginalLocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		location := r.backends[0].URL() + "/next"
		r.backends[0].Set(lbtest.Handle(http.RedirectHandler(location, http.StatusFound)))
		r.startPool(lb.WithOriginalLocation())
		r.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		if got := r.must("GET", "", nil).header.Get("Location"); got != location {
			t.Errorf("Location = %q, want %q", got, location)
		}
	})
}
