package lb_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"example.com/lb"
)

// serveProbed starts a server called name whose probe, /healthz, passes while ok
// holds.
func serveProbed(name string, ok *atomic.Bool) (lb.Target, func()) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" && !ok.Load() {
			http.Error(w, "overloaded", http.StatusServiceUnavailable)
			return
		}
		io.WriteString(w, name)
	}))
	return lb.Target{Name: name, URL: s.URL}, s.Close
}

// A server that fails its probe gets no requests, although it lives.
func ExampleWithHealthCheck() {
	var well, ill atomic.Bool
	well.Store(true)
	a, stopA := serveProbed("a", &ill)
	defer stopA()
	b, stopB := serveProbed("b", &well)
	defer stopB()
	pool, err := lb.New([]lb.Target{a, b},
		lb.WithHealthCheck(lb.HealthCheck{Path: "/healthz"}),
	)
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	pool.Ready(context.Background()) // until each was probed once

	fmt.Println(askPool(pool), askPool(pool))
	for _, b := range pool.Backends() {
		fmt.Println(b, b.Status(), "-", b.Status().Reason)
	}
	// Output:
	// 200 b 200 b
	// a unhealthy - probe failed: GET /healthz: status 503, want 200 to 299
	// b healthy - probe passed
}

// A probe can ask for more than a status, and elsewhere.
func ExampleHealthCheck() {
	check := lb.HealthCheck{
		Path:      "/status?full=1",
		Host:      "shop.example.com",
		Header:    http.Header{"Authorization": {"Bearer secret"}},
		Statuses:  []int{200, 204},
		BodyMatch: regexp.MustCompile(`"state": *"(up|ready)"`),
		Port:      9090, // the servers' admin port
		Interval:  10 * time.Second,
		Fall:      2,
	}
	targets := lb.Targets("http://10.0.0.1:8080", "http://10.0.0.2:8080")
	targets[1].HealthURL = "http://10.0.0.3:8080/health/10.0.0.2" // this one is asked about elsewhere
	pool, err := lb.New(targets, lb.WithHealthCheck(check))
	if err != nil {
		panic(err)
	}
	pool.Close()
	// Output:
}

// A Checker decides for itself what well means: this one asks the server how full it
// is.
func ExampleWithChecker() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "85\n") // percent of what it can take; below zero before it ends
	}))
	defer server.Close()

	byLoad := func(ctx context.Context, t lb.ProbeTarget) (lb.Verdict, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/load", http.NoBody)
		if err != nil {
			return 0, err
		}
		resp, err := t.RoundTrip(r)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		var load int
		if _, err := fmt.Fscan(resp.Body, &load); err != nil {
			return 0, err
		}
		switch {
		case load < 0:
			return lb.VerdictDrain, nil // it is about to end
		case load > 80:
			return lb.VerdictDegraded, nil // only if the others cannot
		}
		return lb.VerdictHealthy, nil
	}
	pool, err := lb.New([]lb.Target{{Name: "a", URL: server.URL}}, lb.WithChecker(lb.CheckerFunc(byLoad)))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	pool.Ready(context.Background())
	fmt.Println(pool.Backends()[0].Status())
	// Output: degraded
}

// Dial opens a connection for a protocol that is not HTTP.
func ExampleProbeTarget_Dial() {
	server := httptest.NewServer(nil) // stands for a server that greets
	defer server.Close()

	ping := func(ctx context.Context, t lb.ProbeTarget) (lb.Verdict, error) {
		c, err := t.Dial(ctx)
		if err != nil {
			return 0, err
		}
		defer c.Close()
		fmt.Fprint(c, "PING\r\n\r\n")
		greeting, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			return 0, err
		}
		if !strings.HasPrefix(greeting, "+PONG") {
			return 0, errors.New("no pong")
		}
		return lb.VerdictHealthy, nil
	}
	pool, err := lb.New(lb.Targets(server.URL), lb.WithChecker(lb.CheckerFunc(ping)))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	pool.Ready(context.Background())
	fmt.Println(pool.Backends()[0].Status().Reason)
	// Output: probe failed: no pong
}

// A pool that fails closed answers 503 at once when no server is usable: a fails its
// probe, and b is taken out.
func ExampleWithFailClosed() {
	var well, ill atomic.Bool
	well.Store(true)
	a, stopA := serveProbed("a", &ill)
	defer stopA()
	b, stopB := serveProbed("b", &well)
	defer stopB()
	pool, err := lb.New([]lb.Target{a, b}, lb.WithHealthCheck(lb.HealthCheck{Path: "/healthz"}), lb.WithFailClosed())
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	pool.Ready(context.Background())
	fmt.Println(askPool(pool))
	pool.SetState("b", lb.Draining)
	fmt.Print(askPool(pool))
	// Output:
	// 200 b
	// 503 Service Unavailable
}

// A Checker is tested with a ProbeTarget that belongs to no pool.
func ExampleNewProbeTarget() {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	target, err := lb.NewProbeTarget(lb.Target{Name: "a", URL: server.URL}, nil)
	if err != nil {
		panic(err)
	}
	check := func(ctx context.Context, t lb.ProbeTarget) (lb.Verdict, error) {
		c, err := t.Dial(ctx)
		if err != nil {
			return 0, err
		}
		return lb.VerdictHealthy, c.Close()
	}
	fmt.Println(check(context.Background(), target))
	// Output: healthy <nil>
}

// Ready waits for the first verdicts, ReadyHandler tells of them to whatever stands in
// front of the program.
func ExamplePool_Ready() {
	var ok atomic.Bool
	ok.Store(true)
	a, stop := serveProbed("a", &ok)
	defer stop()
	pool, err := lb.New([]lb.Target{a}, lb.WithHealthCheck(lb.HealthCheck{Path: "/healthz"}))
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	fmt.Println(pool.Ready(ctx))
	fmt.Print(askPool(pool.ReadyHandler()))
	pool.Close()
	fmt.Println(pool.Ready(ctx))
	fmt.Print(askPool(pool.ReadyHandler()))
	// Output:
	// <nil>
	// 200 ready
	// lb: pool is closed
	// 503 not ready: pool is closed
}
