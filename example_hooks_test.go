package lb_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"

	"example.com/lb"
)

// serveEcho starts a server that answers with its path and one field of the request.
func serveEcho(field string) (url string, stop func()) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.URL.Path, r.Header.Get(field))
	}))
	return s.URL, s.Close
}

// A hook changes each request on its way out.
func ExampleWithRewrite() {
	url, stop := serveEcho("Authorization")
	defer stop()
	pool, err := lb.New([]lb.Target{{Name: "a", URL: url}}, lb.WithRewrite(func(p *lb.ProxyRequest) {
		p.Out.Header.Set("Authorization", "Bearer of-"+p.Backend.Name())
		u := p.Out.URL
		u.Path, u.RawPath = "/v2"+u.Path, "/v2"+u.EscapedPath() // both, or escapes would be lost
	}))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 200 /v2/ Bearer of-a
}

// A hook changes the answer, or refuses it.
func ExampleWithModifyResponse() {
	url, stop := serveEcho("")
	defer stop()
	pool, err := lb.New([]lb.Target{{Name: "a", URL: url}}, lb.WithModifyResponse(func(resp *http.Response) error {
		resp.Header.Set("Served-By", lb.BackendFrom(resp.Request.Context()).Name())
		return nil
	}))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	w := httptest.NewRecorder()
	pool.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", http.NoBody))
	fmt.Println(w.Code, w.Header().Get("Served-By"))
	// Output: 200 a
}

// Behind a proxy of one's own the client is whom that proxy names.
func ExampleWithTrustedProxies() {
	url, stop := serveEcho("X-Forwarded-For")
	defer stop()
	pool, err := lb.New(lb.Targets(url), lb.WithTrustedProxies(lb.TrustedProxies{Prefixes: []string{"10.0.0.0/8"}}))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	for _, peer := range []string{"10.1.2.3:4567", "192.0.2.7:4567"} {
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
		r.RemoteAddr = peer
		r.Header.Set("X-Forwarded-For", "203.0.113.9")
		w := httptest.NewRecorder()
		pool.ServeHTTP(w, r)
		body, _ := io.ReadAll(w.Body)
		fmt.Printf("%s: %s\n", peer, body)
	}
	// Output:
	// 10.1.2.3:4567: / 203.0.113.9, 10.1.2.3
	// 192.0.2.7:4567: / 192.0.2.7
}

// A strategy goes by the client, as the pool sees it.
func ExampleClientIP() {
	onlyLocal := func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
		if lb.ClientIP(r).IsLoopback() {
			return candidates[0]
		}
		return nil
	}
	r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
	r.RemoteAddr = "127.0.0.1:4567"
	fmt.Println(onlyLocal(r, []*lb.Backend{lb.NewBackend(lb.Target{Name: "a"})}))
	// Output: a
}

// A handler of this process stands in when the servers are down: as the last of the
// candidates for this strategy, which goes by their order.
func ExampleTarget_handler() {
	sorry := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		io.WriteString(w, "back in a minute")
	})
	pool, err := lb.New([]lb.Target{deadTarget("a"), {Name: "sorry", Handler: sorry}}, lb.WithBalancer(lb.BalancerFunc(pickFirst)))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 503 back in a minute
}

// A redirect to the backend's own address leads back through the pool, unless it is
// left as it is.
func ExampleWithOriginalLocation() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://"+r.Context().Value(http.LocalAddrContextKey).(net.Addr).String()+"/next", http.StatusFound)
	}))
	defer server.Close()
	for _, opts := range [][]lb.Option{nil, {lb.WithOriginalLocation()}} {
		pool, err := lb.New(lb.Targets(server.URL), opts...)
		if err != nil {
			panic(err)
		}
		w := httptest.NewRecorder()
		pool.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", http.NoBody))
		location := w.Header().Get("Location")
		fmt.Println(location == "/next", location == server.URL+"/next")
		pool.Close()
	}
	// Output:
	// true false
	// false true
}

// Each target may have its own authorities and server name.
func ExampleTarget_tls() {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "hello "+r.TLS.ServerName)
	}))
	defer server.Close()
	trust := x509.NewCertPool()
	trust.AddCert(server.Certificate())
	pool, err := lb.New([]lb.Target{{URL: server.URL, TLS: &tls.Config{RootCAs: trust, ServerName: "example.com"}}})
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 200 hello example.com
}

// The standard field for a request's way, and a name against loops.
func ExampleWithForwarded() {
	url, stop := serveEcho("Forwarded")
	defer stop()
	pool, err := lb.New(lb.Targets(url), lb.WithForwarded(), lb.WithVia("edge"))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	w := httptest.NewRecorder()
	pool.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://shop.test/", http.NoBody))
	fmt.Println(w.Body, w.Header().Get("Via"))
	// Output: / for=192.0.2.1;host=shop.test;proto=http 1.1 edge
}

// A server that speaks HTTP/2 without TLS, as those of gRPC inside of a cluster do.
func ExampleTarget_h2c() {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{Protocols: protocols, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Proto) })}
	go server.Serve(ln)
	defer server.Close()

	pool, err := lb.New(lb.Targets("h2c://" + ln.Addr().String()))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 200 HTTP/2.0
}
