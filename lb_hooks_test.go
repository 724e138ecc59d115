package lb_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// The hook sees each attempt's request as its own, after the header rules: a client
// cannot take away what the hook has set (golang/go#50580, traefik/traefik PR#11077).
func TestRewriteChangesEachAttemptAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []string
		r := newRig(t, []lbtest.Behavior{lbtest.AnswerStatus(503, ""), lbtest.Answer()}, lb.WithBalancer(lb.BalancerFunc(first)),
			lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}}),
			lb.WithRewrite(func(p *lb.ProxyRequest) {
				if lb.BackendFrom(p.Out.Context()) != p.Backend {
					t.Error("BackendFrom finds another backend")
				}
				seen = append(seen, p.Out.Header.Get("X-Auth"))
				p.Out.Header.Set("X-Auth", "of "+p.Backend.Name())
				p.Out.Header.Add("X-Count", "1")
				p.Out.Host = "rewritten.test"
				p.Out.Method, p.Out.Body, p.Out.ContentLength = "DELETE", nil, 7
				p.Out.URL.Scheme, p.Out.URL.Host = "https", "elsewhere.test"
			}))
		a := r.must("PUT", "1", strings.NewReader("body"), "Connection", "X-Auth, X-Forwarded-For, X-Real-Ip", "X-Auth", "forged", "X-Count", "0")
		r.wantStatus(a, 200)
		if strings.Join(seen, "|") != "|" {
			t.Errorf("the hook saw %q, want nothing of the client's, nor of the attempt before", seen)
		}
		for _, b := range r.backends {
			got := b.Received()[0]
			if got.Method != "PUT" || got.BodyBytes != 4 || got.Host != "rewritten.test" || got.Header.Get("X-Auth") != "of "+b.URL() ||
				strings.Join(got.Header["X-Count"], ",") != "0,1" || got.Header.Get("X-Forwarded-For") == "" {
				t.Errorf("%s received %+v", b.Name(), got)
			}
		}
	})
}

// A path that the hook leaves alone goes out byte for byte, one that it changes as it
// says.
func TestRewriteOfTheTarget(t *testing.T) {
	for _, c := range []struct {
		name, target, want string
		hook               func(*lb.ProxyRequest)
	}{
		{"untouched", "/a%2fb?x=%zz;y", "/a%2fb?x=%zz;y", func(*lb.ProxyRequest) {}},
		{"another query", "/a%2fb?x", "/a%2fb?y=1", func(p *lb.ProxyRequest) { p.Out.URL.RawQuery = "y=1" }},
		{"another path", "/a%2fb?x", "/c%20d?x", func(p *lb.ProxyRequest) { p.Out.URL.Path, p.Out.URL.RawPath = "/c d", "" }},
		{"no URL at all", "/a", "/", func(p *lb.ProxyRequest) { p.Out.URL = nil }},
		{"no header at all", "/a", "/a", func(p *lb.ProxyRequest) { p.Out.Header = nil }},
	} {
		bubble(t, c.name, func(t *testing.T) {
			r := newRig(t, answers(1), lb.WithRewrite(c.hook))
			client := r.dial()
			defer client.Close()
			io.WriteString(client, "GET "+c.target+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			io.Copy(io.Discard, client)
			if got := r.backends[0].Received(); len(got) != 1 || got[0].Target != c.want {
				t.Errorf("received %+v, want the target %s", got, c.want)
			}
		})
	}
}

// A hook that panics costs its own request, and no backend is blamed.
func TestHooksThatPanicAreContained(t *testing.T) {
	bubble(t, "WithRewrite", func(t *testing.T) {
		r := newRig(t, answers(3), lb.WithRewrite(func(*lb.ProxyRequest) { panic("rewrite") }))
		for range 10 {
			r.wantStatus(r.must("GET", "", nil), 500)
		}
		if s := r.pool.Stats(); s.Panics != 10 || s.Retries != 0 || r.count() != 0 {
			t.Errorf("panics = %d, retries = %d, arrivals = %d", s.Panics, s.Retries, r.count())
		}
		r.wantUnblamed()
		r.wantIdle()
	})
	bubble(t, "WithModifyResponse", func(t *testing.T) {
		r := newRig(t, answers(1), lb.WithModifyResponse(func(*http.Response) error { panic("modify") }))
		r.wantStatus(r.must("GET", "", nil), 502)
		if s := r.pool.Stats(); s.Panics != 1 || s.Failures != 1 {
			t.Errorf("panics = %d, failures = %d", s.Panics, s.Failures)
		}
		r.wantUnblamed()
		r.wantIdle()
	})
}

// The answer can be changed, or refused.
func TestModifyResponse(t *testing.T) {
	bubble(t, "changes it", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.AnswerStatus(200, "plain")}, lb.WithModifyResponse(func(resp *http.Response) error {
			if b := lb.BackendFrom(resp.Request.Context()); b == nil || resp.Request.Method != "POST" {
				t.Errorf("backend = %v, request = %v", b, resp.Request)
			}
			resp.StatusCode = 201
			resp.Header.Set("X-Changed", "1")
			old := resp.Body
			resp.Header.Del("Content-Length")
			resp.ContentLength = -1
			resp.Body = struct {
				io.Reader
				io.Closer
			}{io.MultiReader(strings.NewReader("not so "), old), old}
			return nil
		}))
		a := r.must("POST", "", strings.NewReader("x"))
		if a.status != 201 || string(a.body) != "not so plain" || a.header.Get("X-Changed") != "1" {
			t.Errorf("answer = %d %q %v", a.status, a.body, a.header)
		}
		synctest.Wait()
		r.wantIdle()
	})
	bubble(t, "refuses it", func(t *testing.T) {
		refused := errors.New("refused")
		var got error
		r := newRig(t, answers(2), lb.WithModifyResponse(func(resp *http.Response) error { return refused }),
			lb.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, err error) {
				got = err
				w.WriteHeader(lb.StatusOf(err))
			}))
		a := r.must("GET", "", nil)
		r.wantStatus(a, 502)
		if !errors.Is(got, refused) || r.count() != 1 || a.backend() != "" {
			t.Errorf("error = %v, arrivals = %d, header %v", got, r.count(), a.header)
		}
		r.wantUnblamed()
		r.wantIdle()
	})
}

// noted tells of its Close.
type noted struct {
	io.Reader
	closed func()
}

func (n noted) Close() error { n.closed(); return nil }

// The body that a hook has put in the answer's place is closed, whatever becomes of it.
func TestBodyOfTheHookIsClosed(t *testing.T) {
	for name, failure := range map[string]error{"passed on": nil, "refused": errors.New("no")} {
		bubble(t, name, func(t *testing.T) {
			closed := 0
			r := newRig(t, answers(1), lb.WithModifyResponse(func(resp *http.Response) error {
				old := resp.Body
				resp.Body = noted{strings.NewReader("mine"), func() { closed++; old.Close() }}
				resp.ContentLength = 4
				resp.Header.Set("Content-Length", "4")
				return failure
			}))
			a := r.must("GET", "", nil)
			if (string(a.body) == "mine") != (failure == nil) || closed != 1 {
				t.Errorf("body = %q, closed %d times", a.body, closed)
			}
			r.wantIdle()
		})
	}
	bubble(t, "none", func(t *testing.T) {
		r := newRig(t, answers(1), lb.WithModifyResponse(func(resp *http.Response) error {
			resp.Body = nil
			resp.Header.Set("Content-Length", "0")
			return nil
		}))
		if a := r.must("GET", "", nil); a.status != 200 || len(a.body) != 0 {
			t.Errorf("answer = %d %q", a.status, a.body)
		}
		r.wantIdle()
	})
}

// A request that the hook has made one that cannot be sent is the hook's fault, and so is
// an answer with a status that is none.
func TestHooksThatGoWrong(t *testing.T) {
	for name, hook := range map[string]func(*http.Request){
		"a value with a line end": func(r *http.Request) { r.Header.Set("X-User", "jos\n") },
		"a name that is none":     func(r *http.Request) { r.Header["X User"] = []string{"jos"} },
		"a host with a space":     func(r *http.Request) { r.Host = "a b" },
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, answers(1), lb.WithRewrite(func(p *lb.ProxyRequest) { hook(p.Out) }))
			r.wantStatus(r.must("GET", "", nil), 500)
			if n := r.backends[0].Count(); n != 0 {
				t.Errorf("%d requests arrived", n)
			}
			r.wantIdle()
			r.wantUnblamed()
		})
	}
	for _, status := range []int{0, 7, 100, 103, 150, 1000} {
		bubble(t, fmt.Sprint("status ", status), func(t *testing.T) {
			r := newRig(t, answers(1), lb.WithModifyResponse(func(resp *http.Response) error {
				resp.StatusCode = status
				return nil
			}))
			r.wantStatus(r.must("GET", "", nil), 502)
			r.wantIdle()
			r.wantUnblamed()
		})
	}
}

// All hooks know the client.
func TestHooksKnowTheClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := map[string]string{}
		note := func(where string, r *http.Request) { seen[where] = lb.ClientIP(r).String() }
		r := newRig(t, answers(1), lb.WithTrustedProxies(lb.TrustedProxies{Hops: 1}),
			lb.WithRewrite(func(p *lb.ProxyRequest) { note("In", p.In); note("Out", p.Out) }),
			lb.WithModifyResponse(func(resp *http.Response) error { note("Response.Request", resp.Request); return errors.New("no") }),
			lb.WithErrorHandler(func(w http.ResponseWriter, r *http.Request, _ error) { note("error handler", r); w.WriteHeader(502) }))
		r.must("GET", "", nil, "X-Forwarded-For", "203.0.113.9")
		for _, where := range []string{"In", "Out", "Response.Request", "error handler"} {
			if seen[where] != "203.0.113.9" {
				t.Errorf("%s: the client is %q, want 203.0.113.9", where, seen[where])
			}
		}
	})
}
