package lb_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"example.com/lb"
)

// serveNames starts servers that answer with their names, as targets of these names.
func serveNames(names ...string) (targets []lb.Target, stop func()) {
	var servers []*httptest.Server
	for _, name := range names {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, name)
		}))
		servers = append(servers, s)
		targets = append(targets, lb.Target{Name: name, URL: s.URL})
	}
	return targets, func() {
		for _, s := range servers {
			s.Close()
		}
	}
}

// deadTarget returns a target that refuses connections.
func deadTarget(name string) lb.Target {
	targets, stop := serveNames(name)
	stop()
	return targets[0]
}

// askPool returns what h answers to a GET.
func askPool(h http.Handler) string {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", http.NoBody))
	return fmt.Sprint(w.Code, " ", w.Body)
}

// pickFirst picks the first candidate: the order of the targets is that of failover.
func pickFirst(_ *http.Request, candidates []*lb.Backend) *lb.Backend { return candidates[0] }

// A Pool is an http.Handler: it goes wherever one can go.
func Example() {
	targets, stop := serveNames("a", "b")
	defer stop()

	pool, err := lb.New(targets)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()
	front := httptest.NewServer(pool)
	defer front.Close()

	answers := make(map[string]int)
	for range 10 {
		resp, err := http.Get(front.URL)
		if err != nil {
			fmt.Println(err)
			return
		}
		name, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		answers[string(name)]++
	}
	fmt.Println(answers)
	// Output: map[a:5 b:5]
}

// New reports all bad input at once.
func ExampleNew_badInput() {
	_, err := lb.New(
		[]lb.Target{{URL: "ftp://10.0.0.1"}, {Name: "b", URL: "http://10.0.0.2:8080", Weight: -2}},
		lb.WithRetry(lb.RetryPolicy{Statuses: []int{404}}),
	)
	fmt.Println(err)
	// Output:
	// lb: target 1: URL "ftp://10.0.0.1": scheme "ftp": want http, https, h2c or unix
	// target 2: weight -2: want 1 to 65535, 0 for 1 or NoWeight (-1)
	// RetryPolicy.Statuses has 404: want 500 to 599, 408, 425 or 429
}

// Targets is short for targets that need nothing but a URL.
func ExampleTargets() {
	pool, err := lb.New(lb.Targets("http://10.0.0.1:8080", "http://10.0.0.2:8080/v2/"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()
	for _, b := range pool.Backends() {
		fmt.Println(b.Name(), b.Weight(), b.Status())
	}
	// Output:
	// http://10.0.0.1:8080 1 unknown
	// http://10.0.0.2:8080/v2 1 unknown
}

// A Pool is an http.RoundTripper: it balances on the side of the client. Scheme
// and host of the URL are replaced.
func ExamplePool_RoundTrip() {
	targets, stop := serveNames("a")
	defer stop()
	pool, _ := lb.New(targets)
	defer pool.Close()

	client := &http.Client{Transport: pool}
	resp, err := client.Get("http://service.invalid/hello")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Println(resp.StatusCode, string(body))
	// Output: 200 a
}

// SetTargets replaces the set; what stays in it keeps its state.
func ExamplePool_SetTargets() {
	targets, stop := serveNames("a", "b")
	defer stop()
	pool, _ := lb.New(targets[:1])
	defer pool.Close()
	a := pool.Backends()[0]
	fmt.Println(askPool(pool))

	err := pool.SetTargets(targets)
	fmt.Println(pool.Backends(), err, pool.Backends()[0] == a)

	fmt.Println(pool.SetTargets(nil)) // changes nothing
	fmt.Println(pool.Backends())
	// Output:
	// 200 a
	// [a b] <nil> true
	// lb: no targets: at least one is needed
	// [a b]
}

// A draining backend ends what it has and gets nothing new.
func ExamplePool_SetState() {
	targets, stop := serveNames("a", "b")
	defer stop()
	pool, _ := lb.New(targets, lb.WithBalancer(lb.BalancerFunc(pickFirst)))
	defer pool.Close()

	fmt.Println(askPool(pool))
	err := pool.SetState("a", lb.Draining)
	fmt.Println(askPool(pool), err)
	err = pool.SetState("a", lb.Active)
	fmt.Println(askPool(pool), err)
	// Output:
	// 200 a
	// 200 b <nil>
	// 200 a <nil>
}

// Drain takes a backend out before it is stopped: it returns when nothing is under way
// there any more.
func ExamplePool_Drain() {
	targets, stop := serveNames("a", "b")
	defer stop()
	pool, _ := lb.New(targets, lb.WithBalancer(lb.BalancerFunc(pickFirst)))
	defer pool.Close()

	fmt.Println(askPool(pool))
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := pool.Drain(ctx, "a"); err != nil {
		fmt.Println(err) // says how many requests are left, which go on
	}
	fmt.Println(askPool(pool))
	// Output:
	// 200 a
	// 200 b
}

// Stats can be served as it is.
func ExamplePool_Stats() {
	targets, stop := serveNames("a", "b")
	defer stop()
	pool, _ := lb.New(targets, lb.WithName("shop"))
	defer pool.Close()
	askPool(pool)

	w := httptest.NewRecorder()
	json.NewEncoder(w).Encode(pool.Stats())

	var stats map[string]any
	json.Unmarshal(w.Body.Bytes(), &stats)
	fmt.Println(stats["name"], stats["strategy"], stats["requests"], stats["in_flight"])
	for _, key := range slices.Sorted(maps.Keys(stats["backends"].([]any)[0].(map[string]any))) {
		fmt.Print(key, " ")
	}
	// Output:
	// shop round-robin 1 0
	// connections failures in_flight name received_bytes requests retries sent_bytes since state url usable weight
}

// Shutdown lets requests end before it closes the pool.
func ExamplePool_Shutdown() {
	targets, stop := serveNames("a")
	defer stop()
	pool, _ := lb.New(targets)
	fmt.Println(askPool(pool))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	fmt.Println(pool.Shutdown(ctx))
	fmt.Println(askPool(pool))
	// Output:
	// 200 a
	// <nil>
	// 503 Service Unavailable
}

// An answer of 503 from one backend is worth a try of another.
func ExampleWithRetry() {
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "busy", http.StatusServiceUnavailable)
	}))
	defer busy.Close()
	targets, stop := serveNames("a")
	defer stop()

	pool, _ := lb.New(
		append([]lb.Target{{Name: "busy", URL: busy.URL}}, targets...),
		lb.WithBalancer(lb.BalancerFunc(pickFirst)),
		lb.WithRetry(lb.RetryPolicy{Statuses: []int{502, 503, 504}, BaseDelay: time.Millisecond}),
	)
	defer pool.Close()
	fmt.Println(askPool(pool), "after", pool.Stats().Retries, "retry")
	// Output: 200 a after 1 retry
}

// One failure is enough to eject, and it costs no request.
func ExampleWithPassiveHealth() {
	targets, stop := serveNames("a")
	defer stop()
	pool, _ := lb.New(
		append([]lb.Target{deadTarget("down")}, targets...),
		lb.WithBalancer(lb.BalancerFunc(pickFirst)),
		lb.WithPassiveHealth(lb.PassiveHealth{Failures: 1, Ejection: time.Minute}),
	)
	defer pool.Close()

	fmt.Println(askPool(pool))
	for _, b := range pool.Backends() {
		fmt.Println(b, b.Status(), b.Status().Reason)
	}
	// Output:
	// 200 a
	// down ejected failures in a row: 1, the last: dial: refused
	// a unknown
}

// A backend that does not answer in time is answered for with 504.
func ExampleWithTimeouts() {
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
	}))
	defer slow.Close()
	pool, _ := lb.New(lb.Targets(slow.URL), lb.WithTimeouts(lb.Timeouts{ResponseHeader: 20 * time.Millisecond}))
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 504 Gateway Timeout
}

// The reply is the program's own when no backend could answer.
func ExampleWithErrorHandler() {
	pool, _ := lb.New([]lb.Target{deadTarget("down")},
		lb.WithRetry(lb.RetryPolicy{Attempts: 1}),
		lb.WithErrorHandler(func(w http.ResponseWriter, r *http.Request, err error) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(lb.StatusOf(err))
			io.WriteString(w, `{"error": "out of order"}`)
		}))
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 503 {"error": "out of order"}
}

// Each change of state is logged once.
func ExampleWithLogger() {
	onlySome := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "url" {
			return slog.Attr{} // they differ from run to run
		}
		return a
	}
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{ReplaceAttr: onlySome}))
	targets, stop := serveNames("a")
	defer stop()
	pool, _ := lb.New(targets, lb.WithName("shop"), lb.WithLogger(logger))
	defer pool.Close()
	pool.SetState("a", lb.Disabled)
	// Output:
	// level=INFO msg="backend added" backend=a pool=shop
	// level=INFO msg="backend state changed" backend=a from=unknown to=disabled reason="set by the operator" pool=shop
	// level=ERROR msg="no backend is usable: refusing requests" backends=1 pool=shop
}

// Only WebSocket is passed on unless others are named.
func ExampleWithUpgrades() {
	pool, err := lb.New(lb.Targets("http://10.0.0.1:8080"), lb.WithUpgrades(lb.Upgrades{
		Protocols:   []string{"websocket", "connect-udp"},
		IdleTimeout: 10 * time.Minute,
	}))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	fmt.Println(pool.Stats().InFlight) // tunnels count until they end
	// Output: 0
}

// An http.Transport is a template for the connections to each backend.
func ExampleWithTransport() {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "over TLS")
	}))
	defer server.Close()
	roots := server.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs

	pool, _ := lb.New(lb.Targets(server.URL), lb.WithTransport(&http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots},
	}))
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 200 over TLS
}

// All connections to backends are opened by a function of one's own, for example over a
// tunnel or, as here, to a unix socket.
func ExampleWithDialer() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "app.sock")
	ln, err := net.Listen("unix", socket)
	if err != nil {
		panic(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "over a socket") })}
	go server.Serve(ln)
	defer server.Close()

	pool, _ := lb.New(lb.Targets("http://app.test"), lb.WithDialer(func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}))
	defer pool.Close()
	fmt.Println(askPool(pool))
	// Output: 200 over a socket
}

// Connections are kept for a minute and get no request any more when they are ten minutes
// old, so that a name that leads elsewhere then is followed.
func ExampleWithConnections() {
	targets, stop := serveNames("a")
	defer stop()
	pool, err := lb.New(targets, lb.WithConnections(lb.Connections{IdleTimeout: time.Minute, MaxAge: 10 * time.Minute}))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	askPool(pool)
	askPool(pool)
	conns := pool.Stats().Backends[0].Connections
	fmt.Println(conns.Opened, conns.Open, conns.Idle)
	// Output: 1 1 1
}

// Any strategy goes with all else that the pool does.
func ExampleWithBalancer() {
	targets, stop := serveNames("a", "b")
	defer stop()
	pool, _ := lb.New(targets, lb.WithBalancer(lb.LeastConnections()))
	defer pool.Close()
	askPool(pool)
	fmt.Println(pool.Stats().Strategy, pool.Stats().Requests)
	// Output: least-connections 1
}

// A strategy of one's own is a function: here requests that ask for it go to the
// backends of the new version.
func ExampleBalancerFunc() {
	strategy := lb.BalancerFunc(func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
		want := r.Header.Get("Version")
		i := slices.IndexFunc(candidates, func(b *lb.Backend) bool {
			version, _ := b.Metadata("version")
			return version == want
		})
		return candidates[max(i, 0)]
	})

	candidates := []*lb.Backend{
		lb.NewBackend(lb.Target{Name: "a"}),
		lb.NewBackend(lb.Target{Name: "b", Metadata: map[string]string{"version": "2"}}),
	}
	r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
	fmt.Println(strategy.Pick(r, candidates))
	r.Header.Set("Version", "2")
	fmt.Println(strategy.Pick(r, candidates))
	// Output:
	// a
	// b
}

// announcingStrategy says for which set it is prepared.
type announcingStrategy struct{ lb.Balancer }

func (announcingStrategy) Prepare(set []*lb.Backend) lb.Balancer {
	fmt.Println("prepared for", set)
	return nil // use it unprepared
}

// Prepare is called once per change of the set, not once per request.
func ExamplePreparer() {
	targets, stop := serveNames("a", "b")
	defer stop()
	pool, _ := lb.New(targets, lb.WithBalancer(announcingStrategy{lb.BalancerFunc(pickFirst)}))
	defer pool.Close()
	askPool(pool)
	askPool(pool)
	pool.SetState("a", lb.Draining)
	// Output:
	// prepared for [a b]
	// prepared for [b]
}

// learningStrategy counts the answers that it hears of.
type learningStrategy struct {
	lb.Balancer
	answers atomic.Int64
}

func (l *learningStrategy) Observe(_ *lb.Backend, o lb.Outcome) {
	if o.Final && o.Blame == lb.BlameNone {
		l.answers.Add(1)
	}
}

// A Learner hears how each attempt ended.
func ExampleLearner() {
	targets, stop := serveNames("a")
	defer stop()
	strategy := &learningStrategy{Balancer: lb.RoundRobin()}
	pool, _ := lb.New(targets, lb.WithBalancer(strategy))
	defer pool.Close()
	askPool(pool)
	askPool(pool)
	fmt.Println(strategy.answers.Load())
	// Output: 2
}

// NewBackend is for tests of strategies: it belongs to no pool.
func ExampleNewBackend() {
	b := lb.NewBackend(lb.Target{Name: "a", Weight: 2, Metadata: map[string]string{"zone": "west"}})
	release := b.Acquire()
	zone, ok := b.Metadata("zone")
	fmt.Println(b, b.Weight(), b.InFlight(), zone, ok)
	release(lb.Outcome{Stage: lb.StageDone, Final: true})
	fmt.Println(b.InFlight())
	// Output:
	// a 2 1 west true
	// 0
}

// An error tells where it happened, and whose fault it was.
func ExampleAttemptError() {
	pool, _ := lb.New([]lb.Target{deadTarget("down")}, lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
	defer pool.Close()
	_, err := pool.RoundTrip(httptest.NewRequest(http.MethodGet, "/", http.NoBody))
	if e, ok := errors.AsType[*lb.AttemptError](err); ok {
		fmt.Println(e.Backend, e.Stage, e.Cause, e.Blame)
	}
	fmt.Println(errors.Is(err, lb.ErrNoBackend))
	// Output:
	// down dial refused backend
	// true
}

// StatusOf is what ServeHTTP replies with.
func ExampleStatusOf() {
	fmt.Println(lb.StatusOf(fmt.Errorf("lb: %w", lb.ErrClosed)))
	fmt.Println(lb.StatusOf(&lb.AttemptError{Cause: lb.CauseReset, Err: io.ErrUnexpectedEOF}))
	fmt.Println(lb.StatusOf(&lb.AttemptError{Cause: lb.CauseTimeout, Err: os.ErrDeadlineExceeded}))
	// Output:
	// 503
	// 502
	// 504
}

// A middleware in front of the pool learns who served the request.
func ExampleRecord() {
	targets, stop := serveNames("a")
	defer stop()
	pool, _ := lb.New(append([]lb.Target{deadTarget("down")}, targets...), lb.WithBalancer(lb.BalancerFunc(pickFirst)))
	defer pool.Close()

	askPool(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, rec := lb.Record(r.Context())
		defer func() { // deferred: ServeHTTP panics if the answer breaks off
			for _, a := range rec.Attempts() {
				fmt.Println(a.Backend, a.Outcome.Stage, a.Outcome.Cause, a.Outcome.Status)
			}
		}()
		pool.ServeHTTP(w, r.WithContext(ctx))
	}))
	// Output:
	// down dial refused 0
	// a done none 200
}
