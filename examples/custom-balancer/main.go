// Command custom-balancer shows a strategy of one's own: requests whose field
// Tenant names a backend's metadata go there, all others to the least busy. The
// test beside it tries the strategy on the conformance suite of lbtest.
//
//	$ go run ./examples/custom-balancer
//	tenant "acme" is served by b b b b
//	tenant "" is served by a b a b
//
// The order in the second line may differ. Other servers are an error.
package main

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"

	"example.com/lb"
)

// byTenant prefers backends of the request's tenant.
type byTenant struct{ others lb.Balancer }

func (t byTenant) Pick(r *http.Request, candidates []*lb.Backend) *lb.Backend {
	for _, b := range candidates {
		if tenant, ok := b.Metadata("tenant"); ok && tenant == r.Header.Get("Tenant") {
			return b
		}
	}
	return t.others.Pick(r, candidates)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run() error {
	targets := []lb.Target{{Name: "a"}, {Name: "b", Metadata: map[string]string{"tenant": "acme"}}}
	for i, t := range targets {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Served-By", t.Name)
		})}
		go server.Serve(l) // returns when it is closed
		defer server.Close()
		targets[i].URL = "http://" + l.Addr().String()
	}
	pool, err := lb.New(targets, lb.WithBalancer(byTenant{lb.LeastConnections()}))
	if err != nil {
		return err
	}
	defer pool.Close()
	for _, tenant := range []string{"acme", ""} {
		names := map[string]bool{}
		fmt.Printf("tenant %q is served by", tenant)
		for range 4 {
			resp, err := pool.RoundTrip(&http.Request{URL: &url.URL{Path: "/"}, Header: http.Header{"Tenant": {tenant}}})
			if err != nil {
				return err
			}
			resp.Body.Close()
			name := resp.Header.Get("Served-By")
			names[name] = true
			fmt.Print(" ", name)
		}
		fmt.Println()
		if !names["b"] || names["a"] == (tenant == "acme") { // b serves all, a all but acme
			return fmt.Errorf("tenant %q was served by %v", tenant, names)
		}
	}
	return nil
}
