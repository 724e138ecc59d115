package lb_test

import (
	"bytes"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// What a middleware has made of the path is what goes out, in every form of the request
// target: another backend path than the one that was looked at would be a way around it.
func TestPathThatAMiddlewareSeesGoesOut(t *testing.T) {
	set := func(path, raw string) func(http.Handler) http.Handler {
		return func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				r.URL.Path, r.URL.RawPath = path, raw
				h.ServeHTTP(w, r)
			})
		}
	}
	strip := func(h http.Handler) http.Handler { return http.StripPrefix("/api", h) }
	stripSlash := func(h http.Handler) http.Handler { return http.StripPrefix("/api/", h) }
	for _, tt := range []struct {
		name   string
		wrap   func(http.Handler) http.Handler
		target string
		want   string
	}{
		{"StripPrefix", strip, "/api/x?q", "/base/x?q"},
		{"StripPrefix with escapes", strip, "/api/a%2fb", "/base/a%2fb"},
		{"StripPrefix with bytes that net/http escapes", strip, `/api/a"b`, `/base/a"b`},
		{"StripPrefix of the absolute form", strip, "http://other.test/api/x", "/base/x"},
		{"another path", set("/y z", ""), "/x", "/base/y%20z"},
		{"another path for one with escapes", set("/y", ""), "/a%2fb", "/base/y"},
		{"escapes taken away", set("/a/b", ""), "/a%2fb", "/base/a/b"},
		{"raw path that is none", set("/y", "/z?a b"), "/x", "/base/y"},
		{"a middleware that leaves no slash in front", stripSlash, "/api/users", "/base/users"},
		{"and escapes", stripSlash, "/api/a%2fb", "/base/a%2fb"},
		{"and an escaped slash in front", stripSlash, "/api/%2fb", "/base/%2fb"},
	} {
		for _, base := range []string{"/base", ""} {
			bubble(t, tt.name+" "+base, func(t *testing.T) {
				r, w := newWireRig(t, base, always(okReply))
				r.server.Handler = tt.wrap(r.pool)
				r.say("GET " + tt.target + " HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n")
				want := "/" + strings.TrimPrefix(strings.TrimPrefix(tt.want, "/base"), "/")
				if base != "" {
					want = tt.want
				}
				if got := w.only(t); got.line != "GET "+want+" HTTP/1.1" {
					t.Errorf("the backend reads %q, want %q", got.line, want)
				}
			})
		}
	}
}

// A proxy on the way and a RoundTripper of the user's are given the whole URL.
func TestURLOfARequestIsWhole(t *testing.T) {
	for target, want := range map[string]string{"/x?q": "http://wire.test/base/x?q", "/a%2fb": "http://wire.test/base/a%2fb", `/a"b`: "http://wire.test/base/a%22b"} {
		bubble(t, "proxy "+target, func(t *testing.T) {
			r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
			w := startWire(t, r.net, "proxy.test:80", always(okReply))
			template := r.net.Transport()
			template.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy.test"})
			r.start([]lb.Target{{URL: "http://wire.test/base", Host: lb.HostFromURL}}, lb.WithTransport(template))
			r.say("GET " + target + " HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n")
			if got := w.only(t); got.line != "GET "+want+" HTTP/1.1" {
				t.Errorf("the proxy reads %q, want %q", got.line, want)
			}
		})
		bubble(t, "RoundTripper "+target, func(t *testing.T) {
			var got string
			r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
			r.start(lb.Targets("http://wire.test/base"), lb.WithTransport(roundTripperFunc(func(req *http.Request) (*http.Response, error) {
				got = req.URL.String()
				return &http.Response{StatusCode: 200, Header: http.Header{}, Body: http.NoBody}, nil
			})))
			r.say("GET " + target + " HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n")
			if got != want {
				t.Errorf("the RoundTripper gets %q, want %q", got, want)
			}
		})
	}
}

// A target that has no path is refused, and so is an asterisk that is not that of OPTIONS.
func TestTargetsWithoutAPathAreRefused(t *testing.T) {
	for _, line := range []string{"GET * HTTP/1.1", "GET foo:x://y/admin HTTP/1.1", "GET evil.test:443 HTTP/1.1", "GET a:b?c HTTP/1.1", "PRI * HTTP/2.0"} {
		bubble(t, line, func(t *testing.T) {
			r, w := newWireRig(t, "/base", always(okReply))
			if a, _ := r.say(line + "\r\nHost: front.test\r\nConnection: close\r\n\r\n"); !strings.HasPrefix(a, "HTTP/1.1 400 Bad Request\r\n") {
				t.Errorf("answer = %q", a)
			}
			if got := w.heard(); len(got) != 0 {
				t.Errorf("the backend got %v", got)
			}
		})
	}
}

// An international name is sent in punycode.
func TestInternationalNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := newWireRig(t, "", always(okReply))
		req, _ := http.NewRequest("GET", "http://bücher.test/", nil)
		resp, err := r.pool.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := w.only(t).values("Host"); len(got) != 1 || got[0] != "xn--bcher-kva.test" {
			t.Errorf("Host = %q", got)
		}
	})
}
