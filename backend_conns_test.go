package lb_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
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
				linger(time.Millisecond)
			}
		})
		for range 20 {
			wg.Go(func() {
				for ctx.Err() == nil {
					if a, err := r.do("GET", "", nil); err != nil || a.status != 200 {
						t.Errorf("answer = %d, %v", a.status, err)
						return
					}
					linger(1700 * time.Microsecond)
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

// A unix socket is a target like others, over connections of our own and over a transport.
func TestUnixSockets(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "app.sock")
	ln, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s", r.Method, r.Host, r.RequestURI)
	})}
	go server.Serve(ln)
	defer server.Close()
	for name, opts := range map[string][]lb.Option{"own": nil, "transport": {lb.WithTransport(&http.Transport{})}} {
		t.Run(name, func(t *testing.T) {
			pool := newPool(t, []lb.Target{{URL: "unix://" + socket}, {Name: "named", URL: "unix://" + socket, Host: lb.HostFromURL}}, append(opts, lb.WithHealthCheck(lb.HealthCheck{Path: "/"}))...)
			if err := pool.Ready(t.Context()); err != nil {
				t.Fatal(err)
			}
			seen := map[string]bool{}
			for range 2 {
				w := httptest.NewRecorder()
				r := httptest.NewRequest("GET", "/a%2fb?q", nil)
				r.Host = "client.test"
				pool.ServeHTTP(w, r)
				seen[w.Body.String()] = true
			}
			if !seen["GET client.test /a%2fb?q"] || !seen["GET localhost /a%2fb?q"] {
				t.Errorf("the backend saw %v", seen)
			}
			if got := pool.Backends()[0].URL(); got != "unix://"+socket {
				t.Errorf("URL = %q", got)
			}
		})
	}
	_, err = lb.New([]lb.Target{{URL: "unix:///s", Transport: roundTripperFunc(noRoundTrip)}, {URL: "h2c://a.test", Transport: &http.Transport{}}, {URL: "unix://"}, {URL: "unix://host/s"}})
	for _, want := range []string{`"unix:///s" over a lb_test.roundTripperFunc`, `"h2c://a.test" over a *http.Transport`, `"unix://": want the path of a socket`, `"unix://host/s": want the path of a socket`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New = %v\nwant in it: %s", err, want)
		}
	}
}

// Connections that reach their age are given up under whatever load, so that a name whose
// addresses change is followed (golang/go#23427, golang/go#43905, traefik/traefik#5675).
func TestConnectionsAgeUnderLoad(t *testing.T) {
	for _, protocols := range []string{"1", "2"} {
		bubble(t, "HTTP/"+protocols, func(t *testing.T) {
			n := lbtest.NewNetwork()
			servers := map[string]*protoServer{}
			for _, addr := range []string{"a.test:80", "b.test:80", "c.test:80"} {
				servers[addr] = startProto(t, n, addr, protocols, nil, func(http.ResponseWriter, *http.Request) { linger(50 * time.Millisecond) })
			}
			var now atomic.Pointer[[]string] // the addresses of the name
			var dials atomic.Int64
			resolve := func(addrs ...string) { now.Store(&addrs) }
			pool := newPool(t, lb.Targets(map[string]string{"1": "http", "2": "h2c"}[protocols]+"://db.test"), lb.WithConnections(lb.Connections{MaxAge: time.Second}),
				lb.WithDialer(func(ctx context.Context, network, _ string) (net.Conn, error) {
					addrs := *now.Load()
					return n.DialContext(ctx, network, addrs[int(dials.Add(1))%len(addrs)])
				}))
			defer pool.Close()
			stop := make(chan struct{})
			var wg sync.WaitGroup
			asked := func(addr string, d time.Duration) int64 {
				before := servers[addr].asked.Load()
				linger(d)
				return servers[addr].asked.Load() - before
			}
			resolve("a.test:80")
			for range 8 {
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
							post(t, pool, "")
						}
					}
				})
			}
			linger(3 * time.Second)
			resolve("b.test:80")
			linger(time.Second + 60*time.Millisecond)
			if got := asked("a.test:80", 2*time.Second); got != 0 {
				t.Errorf("a still got %d requests", got)
			}
			resolve("b.test:80", "c.test:80")
			linger(2 * time.Second)
			if got, all := asked("c.test:80", 4*time.Second), int64(8*80); got < all/5 || got > all*4/5 {
				t.Errorf("c got %d of about %d requests, want about half", got, all)
			}
			close(stop)
			wg.Wait()
			if s := pool.Stats().Backends[0]; s.Connections.ClosedIdle == 0 || s.Failures != 0 {
				t.Errorf("connections = %+v, failures = %d", *s.Connections, s.Failures)
			}
		})
	}
}

// A backend that goes down keeps no idle connections, of either protocol: what comes back
// may be another process.
func TestIdleConnectionsEndWithHealth(t *testing.T) {
	for _, scheme := range []string{"http", "h2c"} {
		bubble(t, scheme, func(t *testing.T) {
			n := lbtest.NewNetwork()
			var ill atomic.Bool
			startProto(t, n, "a.test:80", map[string]string{"http": "1", "h2c": "2"}[scheme], nil, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == probePath && ill.Load() {
					w.WriteHeader(500)
				}
			})
			pool := newPool(t, lb.Targets(scheme+"://a.test"), lb.WithDialer(n.DialContext), lb.WithHealthCheck(everySecond()))
			defer pool.Close()
			post(t, pool, "")
			if got := pool.Stats().Backends[0].Connections.Open; got != 1 {
				t.Fatalf("%d connections are open, want 1", got)
			}
			ill.Store(true)
			advance(10 * time.Second)
			if s := pool.Stats().Backends[0]; s.State != "unhealthy" || s.Connections.Open != 0 {
				t.Errorf("%s, with %d connections open; want unhealthy without", s.State, s.Connections.Open)
			}
		})
	}
}
