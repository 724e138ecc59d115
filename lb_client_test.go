package lb_test

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"example.com/lb"
)

// Whom a request is from, by its peer, what it says, and who is trusted (golang/go
// PR#36678, golang/go#50465, golang/vulndb#3299).
func TestClientIP(t *testing.T) {
	prefixes := lb.TrustedProxies{Prefixes: []string{"10.0.0.0/8", "2001:db8::/32", "192.0.2.1"}}
	for _, c := range []struct {
		name     string
		trust    lb.TrustedProxies
		peer     string
		says     []string // lines of X-Forwarded-For
		client   string
		believed bool
	}{
		{"nobody is trusted", lb.TrustedProxies{}, "10.0.0.1:80", []string{"1.2.3.4"}, "10.0.0.1", false},
		{"a peer that is not trusted", prefixes, "1.1.1.1:80", []string{"1.2.3.4"}, "1.1.1.1", false},
		{"a trusted peer", prefixes, "10.0.0.1:80", []string{"1.2.3.4"}, "1.2.3.4", true},
		{"that says nothing", prefixes, "10.0.0.1:80", nil, "10.0.0.1", true},
		{"a chain of trusted proxies", prefixes, "10.0.0.1:80", []string{"1.2.3.4, 10.9.9.9", "192.0.2.1"}, "1.2.3.4", true},
		{"what stands before the client is its own invention", prefixes, "10.0.0.1:80", []string{"6.6.6.6, 10.6.6.6, 1.2.3.4, 10.9.9.9"}, "1.2.3.4", true},
		{"all trusted: the first", prefixes, "10.0.0.1:80", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3", true},
		{"an entry that is no address ends the search", prefixes, "10.0.0.1:80", []string{"1.2.3.4, unknown, 10.0.0.2"}, "10.0.0.2", true},
		{"an empty line too", prefixes, "10.0.0.1:80", []string{"1.2.3.4", ""}, "10.0.0.1", true},
		{"with ports and brackets", prefixes, "[2001:db8::1]:80", []string{"[2001:db9::5]:1234"}, "2001:db9::5", true},
		{"IPv4 in IPv6 is IPv4", prefixes, "[::ffff:10.0.0.1]:80", []string{"::ffff:1.2.3.4"}, "1.2.3.4", true},
		{"one hop", lb.TrustedProxies{Hops: 1}, "172.16.0.1:80", []string{"6.6.6.6, 1.2.3.4"}, "1.2.3.4", true},
		{"two hops", lb.TrustedProxies{Hops: 2}, "172.16.0.1:80", []string{"6.6.6.6, 1.2.3.4", "5.5.5.5"}, "1.2.3.4", true},
		{"fewer than the hops", lb.TrustedProxies{Hops: 2}, "172.16.0.1:80", []string{"1.2.3.4"}, "172.16.0.1", false},
		{"no address within the hops", lb.TrustedProxies{Hops: 2}, "172.16.0.1:80", []string{"1.2.3.4, x"}, "172.16.0.1", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got netip.Addr
			var header http.Header
			rt := roundTripperFunc(func(r *http.Request) (*http.Response, error) {
				header = r.Header
				return &http.Response{StatusCode: 200, Body: http.NoBody, Request: r}, nil
			})
			strategy := lb.BalancerFunc(func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
				got = lb.ClientIP(r)
				return candidates[0]
			})
			pool := newPool(t, lb.Targets("http://a.test"), lb.WithTrustedProxies(c.trust), lb.WithTransport(rt), lb.WithBalancer(strategy))
			r := httptest.NewRequest("GET", "http://client.test/", nil)
			r.RemoteAddr = c.peer
			r.Header["X-Forwarded-For"] = c.says
			r.Header.Set("X-Forwarded-Proto", "https")
			r.Header.Set("X-Forwarded-Host", "shop.test")
			for _, name := range []string{"X-Real-Ip", "X_Forwarded_For", "X_forwarded_host", "X-Forwarded-Port", "Forwarded"} {
				r.Header[name] = []string{"127.0.0.1"}
			}
			pool.ServeHTTP(httptest.NewRecorder(), r)
			if got.String() != c.client {
				t.Errorf("client = %v, want %s", got, c.client)
			}
			for name := range header {
				switch name {
				case "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "User-Agent":
				default:
					t.Errorf("the backend is told %s", name)
				}
			}
			host, _, _ := strings.Cut(c.peer, "]")
			host = strings.TrimPrefix(host, "[")
			if !strings.Contains(c.peer, "]") {
				host, _, _ = strings.Cut(c.peer, ":")
			}
			wantFor, wantProto, wantHost := host, "http", "client.test"
			if c.believed {
				wantProto, wantHost = "https", "shop.test"
				if len(c.says) > 0 {
					wantFor = strings.Join(c.says, ", ") + ", " + host
				}
			}
			if header.Get("X-Forwarded-For") != wantFor || header.Get("X-Forwarded-Proto") != wantProto || header.Get("X-Forwarded-Host") != wantHost {
				t.Errorf("the backend is told %v, want for %q, %q, %q", header, wantFor, wantProto, wantHost)
			}
		})
	}
}

func TestTrustedProxiesBadInput(t *testing.T) {
	_, err := lb.New(manyTargets(1), lb.WithTrustedProxies(lb.TrustedProxies{Prefixes: []string{"10.0.0.0/33", "proxy.test", "fe80::1%eth0", "::ffff:10.0.0.1", "10.0.0.1"}, Hops: -1}))
	if err == nil {
		t.Fatal("New accepts it")
	}
	for _, want := range []string{`"10.0.0.0/33"`, `"proxy.test": want an address or a prefix`, `"fe80::1%eth0"`, `"::ffff:10.0.0.1"`, "Hops is -1"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("New = %v\nwant in it: %s", err, want)
		}
	}
	if _, err := lb.New(manyTargets(1), lb.WithTrustedProxies(lb.TrustedProxies{Prefixes: []string{"10.0.0.1"}, Hops: 1})); err == nil || !strings.Contains(err.Error(), "both") {
		t.Errorf("New = %v, want an error about both", err)
	}
}

// One client address is used by all: IPHash goes by the client behind a trusted proxy.
func TestIPHashGoesByTheClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 3)
		r.startPool(lb.WithBalancer(lb.IPHash()), lb.WithTrustedProxies(lb.TrustedProxies{Prefixes: []string{"198.18.0.0/15"}}))
		served := map[string]bool{}
		for range 5 {
			served[r.must("GET", "", nil, "X-Forwarded-For", "1.2.3.4").backend()] = true
		}
		if len(served) != 1 {
			t.Errorf("one client was served by %v", served)
		}
		for i := range 30 {
			served[r.must("GET", "", nil, "X-Forwarded-For", netip.AddrFrom4([4]byte{9, 9, byte(i), 1}).String()).backend()] = true
		}
		if len(served) != 3 {
			t.Errorf("31 clients were served by %v alone", served)
		}
	})
}

// Forwarded and Via are written if asked for, after what is believed of those before.
func TestForwardedAndVia(t *testing.T) {
	for _, c := range []struct {
		name, peer, host string
		fields           []string
		opts             []lb.Option
		forwarded, via   string
	}{
		{"by default neither", "1.2.3.4:5", "x.test", []string{"Forwarded", "for=6.6.6.6", "Via", "1.0 before"}, nil, "", "1.0 before"},
		{"an IPv4 peer", "1.2.3.4:5", "x.test", nil, []lb.Option{lb.WithForwarded()}, "for=1.2.3.4;host=x.test;proto=http", ""},
		{"an IPv6 peer and a port", "[2001:db8::1]:5", "x.test:80", nil, []lb.Option{lb.WithForwarded()}, `for="[2001:db8::1]";host="x.test:80";proto=http`, ""},
		{"a unix socket", "@", "x.test", nil, []lb.Option{lb.WithForwarded()}, "for=unknown;host=x.test;proto=http", ""},
		{"what a client says of it goes", "1.2.3.4:5", "x.test", []string{"Forwarded", "for=6.6.6.6"}, []lb.Option{lb.WithForwarded()}, "for=1.2.3.4;host=x.test;proto=http", ""},
		{"what a trusted proxy says of it stays", "10.0.0.1:5", "x.test", []string{"Forwarded", "for=6.6.6.6"},
			[]lb.Option{lb.WithForwarded(), lb.WithTrustedProxies(lb.TrustedProxies{Prefixes: []string{"10.0.0.0/8"}})}, "for=6.6.6.6, for=10.0.0.1;host=x.test;proto=http", ""},
		{"Via", "1.2.3.4:5", "x.test", []string{"Via", "1.0 before"}, []lb.Option{lb.WithVia("edge")}, "", "1.0 before, 1.1 edge"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var header http.Header
			rt := roundTripperFunc(func(r *http.Request) (*http.Response, error) {
				header = r.Header
				return &http.Response{StatusCode: 200, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
			})
			pool := newPool(t, lb.Targets("http://a.test"), append(c.opts, lb.WithTransport(rt))...)
			defer pool.Close()
			r := httptest.NewRequest("GET", "http://"+c.host+"/", nil)
			r.RemoteAddr = c.peer
			for i := 0; i < len(c.fields); i += 2 {
				r.Header.Set(c.fields[i], c.fields[i+1])
			}
			w := httptest.NewRecorder()
			pool.ServeHTTP(w, r)
			if header.Get("Forwarded") != c.forwarded || header.Get("Via") != c.via {
				t.Errorf("Forwarded = %q, Via = %q, want %q and %q", header.Get("Forwarded"), header.Get("Via"), c.forwarded, c.via)
			}
			if got, want := w.Header().Get("Via"), map[bool]string{true: "1.1 edge"}[strings.HasSuffix(c.via, "edge")]; got != want {
				t.Errorf("Via of the answer = %q, want %q", got, want)
			}
		})
	}
	for _, name := range []string{"", "a b", "a,b", "a\r\nb"} {
		if _, err := lb.New(manyTargets(1), lb.WithVia(name)); err == nil {
			t.Errorf("WithVia(%q) is accepted", name)
		}
	}
}

// A middleware may have put the client's address into RemoteAddr, without a port.
func TestRemoteAddrWithoutAPort(t *testing.T) {
	for remote, want := range map[string]string{"192.0.2.7": "192.0.2.7", "2001:db8::1": "2001:db8::1", "@": "", "": ""} {
		var header http.Header
		pool := newPool(t, lb.Targets("http://a.test"), lb.WithTransport(roundTripperFunc(func(r *http.Request) (*http.Response, error) {
			header = r.Header
			return &http.Response{StatusCode: 200, Body: http.NoBody, Request: r}, nil
		})))
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = remote
		pool.ServeHTTP(httptest.NewRecorder(), r)
		if got := header.Get("X-Forwarded-For"); got != want {
			t.Errorf("RemoteAddr %q: X-Forwarded-For = %q, want %q", remote, got, want)
		}
	}
}
