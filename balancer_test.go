package lb_test

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"example.com/lb"
	"example.com/lb/lbtest"
)

func TestBuiltinStrategiesKeepTheContract(t *testing.T) {
	for _, newBalancer := range []func() lb.Balancer{lb.RoundRobin, lb.LeastConnections, lb.IPHash} {
		t.Run(fmt.Sprint(newBalancer()), func(t *testing.T) { lbtest.RunBalancer(t, newBalancer) })
	}
}

// tally counts picks by the name of the backend.
type tally map[string]int

// wantShares checks that the counts are those of want (names and counts), give or
// take a fraction of each, and that nobody else was picked.
func (n tally) wantShares(t *testing.T, fraction float64, want tally) {
	t.Helper()
	for name, w := range want {
		if math.Abs(float64(n[name]-w)) > fraction*float64(w) {
			t.Errorf("%s was picked %d times, want %d ± %g %% (all: %v)", name, n[name], w, fraction*100, n)
		}
	}
	for name := range n {
		if _, ok := want[name]; !ok {
			t.Errorf("%s was picked %d times, want never", name, n[name])
		}
	}
}

// weighted returns backends called a, b, c, … with these weights.
func weighted(weights ...int) []*lb.Backend {
	set := make([]*lb.Backend, len(weights))
	for i, w := range weights {
		set[i] = lb.NewBackend(lb.Target{Name: string(rune('a' + i)), Weight: w})
	}
	return set
}

// readyFor returns the strategy prepared for set, if it can be.
func readyFor(b lb.Balancer, set []*lb.Backend) lb.Balancer {
	if p, ok := b.(lb.Preparer); ok {
		return p.Prepare(slices.Clone(set))
	}
	return b
}

// eachWay runs a test on the strategy unprepared and prepared for set.
func eachWay(t *testing.T, newBalancer func() lb.Balancer, set []*lb.Backend, test func(t *testing.T, b lb.Balancer)) {
	t.Run("unprepared", func(t *testing.T) { test(t, newBalancer()) })
	t.Run("prepared", func(t *testing.T) { test(t, readyFor(newBalancer(), set)) })
}

func requestFrom(addr string) *http.Request {
	return &http.Request{Method: http.MethodGet, RemoteAddr: addr, Header: http.Header{}}
}

func picks(b lb.Balancer, candidates []*lb.Backend, n int) tally {
	got := tally{}
	r := requestFrom("")
	for range n {
		got[b.Pick(r, candidates).Name()]++
	}
	return got
}

// stubPool is a pool over a RoundTripper of the test's own; no network is used.
type stubPool struct {
	*lb.Pool
	t      *testing.T
	mu     sync.Mutex // guards the following
	served tally      // by host, which is the name
}

// newStubPool returns a pool of the targets. answer tells what becomes of an
// attempt on the backend of that name; nil means that every one is answered.
func newStubPool(t *testing.T, targets []lb.Target, answer func(name string, r *http.Request) error, opts ...lb.Option) *stubPool {
	t.Helper()
	p := &stubPool{t: t, served: tally{}}
	rt := roundTripFunc(func(r *http.Request) (*http.Response, error) {
		if answer != nil {
			if err := answer(r.URL.Host, r); err != nil {
				return nil, err
			}
		}
		p.mu.Lock()
		p.served[r.URL.Host]++
		p.mu.Unlock()
		return &http.Response{StatusCode: http.StatusOK, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
	})
	pool, err := lb.New(targets, append([]lb.Option{lb.WithTransport(rt)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	p.Pool = pool
	return p
}

type roundTripFunc func(*http.Request) (*http.Response, error)

func (f roundTripFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// get sends n requests, one at a time.
func (p *stubPool) get(n int) {
	p.t.Helper()
	for range n {
		r, err := http.NewRequest(http.MethodGet, "http://service.test/", nil)
		if err != nil {
			p.t.Fatal(err)
		}
		resp, err := p.RoundTrip(r)
		if err != nil {
			p.t.Fatal(err)
		}
		resp.Body.Close()
	}
}

// take returns who served since it was called last.
func (p *stubPool) take() tally {
	p.mu.Lock()
	defer p.mu.Unlock()
	got := p.served
	p.served = tally{}
	return got
}

func (p *stubPool) set(targets []lb.Target) {
	p.t.Helper()
	if err := p.SetTargets(targets); err != nil {
		p.t.Fatal(err)
	}
}

// named returns targets called a, b, c, … with these weights.
func named(weights ...int) []lb.Target {
	targets := make([]lb.Target, len(weights))
	for i, w := range weights {
		name := string(rune('a' + i))
		targets[i] = lb.Target{Name: name, URL: "http://" + name, Weight: w}
	}
	return targets
}

func TestRoundRobinSpreadsTurns(t *testing.T) {
	set := weighted(5, 1, 1)
	const turn = "aabacaa"
	eachWay(t, lb.RoundRobin, set, func(t *testing.T, b lb.Balancer) {
		var order strings.Builder
		for range 3 * len(turn) {
			order.WriteString(b.Pick(requestFrom(""), set).Name())
		}
		got := order.String()
		if !strings.Contains(turn+turn, got[:len(turn)]) {
			t.Errorf("weights 5, 1, 1 gave %q, want a rotation of %q", got[:len(turn)], turn)
		}
		if want := strings.Repeat(got[:len(turn)], 3); got != want {
			t.Errorf("three turns were %q, want %q", got, want)
		}
	})
}

func TestRoundRobinBeginsAnywhere(t *testing.T) {
	set := weighted(1, 1, 1)
	first := tally{}
	for range 3000 {
		first[readyFor(lb.RoundRobin(), set).Pick(requestFrom(""), set).Name()]++
	}
	first.wantShares(t, 0.15, tally{"a": 1000, "b": 1000, "c": 1000})
}

// TestRotationSurvivesUpdates is traefik/traefik#8787 and
// kubernetes/ingress-nginx#4023: each update set the rotation back to the first
// backend, so that frequent updates sent most requests there, and a fleet of
// proxies moved in lockstep.
func TestRotationSurvivesUpdates(t *testing.T) {
	targets := named(1, 1, 1, 1)
	pool := newStubPool(t, targets, nil)
	for range 400 {
		pool.set(targets)
		pool.get(1)
	}
	pool.take().wantShares(t, 0.24, tally{"a": 100, "b": 100, "c": 100, "d": 100}) // 25 % ± 6 %

	first := tally{}
	for range 200 {
		pool := newStubPool(t, targets, nil)
		pool.get(1)
		for name := range pool.take() {
			first[name]++
		}
	}
	for name, n := range first {
		if n > 80 {
			t.Errorf("%d of 200 fresh pools began with %s, want at most 80", n, name)
		}
	}
}

// TestAbsentBackendSkewsNobody: in Caddy's weighted round robin the share of a
// host that is down falls on its neighbour in the list; of weights 5, 1, 1 without
// the first the others would get 6:1.
func TestAbsentBackendSkewsNobody(t *testing.T) {
	set := weighted(5, 1, 1)
	t.Run("for one request", func(t *testing.T) {
		got := picks(readyFor(lb.RoundRobin(), set), set[1:], 10_000)
		got.wantShares(t, 0.06, tally{"b": 5000, "c": 5000})
	})
	t.Run("for all", func(t *testing.T) {
		pool := newStubPool(t, named(5, 1, 1), nil)
		if err := pool.SetState("a", lb.Disabled); err != nil {
			t.Fatal(err)
		}
		pool.get(1000)
		pool.take().wantShares(t, 0, tally{"b": 500, "c": 500})
	})
	t.Run("for retries", func(t *testing.T) {
		down := errors.New("down")
		pool := newStubPool(t, named(1, 1, 1, 1), func(name string, _ *http.Request) error {
			if name == "a" {
				return down
			}
			return nil
		}, lb.WithPassiveHealth(lb.PassiveHealth{Failures: -1}), lb.WithRetry(lb.RetryPolicy{BaseDelay: -1}))
		const n = 12_000
		pool.get(n)
		pool.take().wantShares(t, 0.05, tally{"b": n / 3, "c": n / 3, "d": n / 3})
		if s := pool.Stats(); s.Retries != n/4 {
			t.Errorf("%d requests were retried, want the %d that a got", s.Retries, n/4)
		}
	})
}

func TestHugeWeightsKeepTheirShares(t *testing.T) {
	for _, weights := range [][]int{
		{lb.MaxWeight, lb.MaxWeight - 1, 1},
		{lb.MaxWeight, 3},
		{9973, 9967, 9949, 9941},
	} {
		t.Run(fmt.Sprint(weights), func(t *testing.T) {
			set := weighted(weights...)
			eachWay(t, lb.RoundRobin, set, func(t *testing.T, b lb.Balancer) {
				total := 0
				for _, w := range weights {
					total += w
				}
				got := picks(b, set, total)
				for i, b := range set {
					if d := got[b.Name()] - weights[i]; d < -5 || d > 5 {
						t.Errorf("of %d picks %s got %d, want %d ± 5", total, b.Name(), got[b.Name()], weights[i])
					}
				}
			})
		})
	}
}

// TestWeightsFollowUpdates is traefik/traefik#2812: the API showed new weights
// while traffic stayed as it was.
func TestWeightsFollowUpdates(t *testing.T) {
	for _, newBalancer := range []func() lb.Balancer{lb.RoundRobin, lb.LeastConnections, lb.IPHash} {
		b := newBalancer()
		t.Run(fmt.Sprint(b), func(t *testing.T) {
			pool := newStubPool(t, named(1, 1, 1), nil, lb.WithBalancer(b))
			for i := range 100 {
				weights, want := []int{1, lb.NoWeight, lb.NoWeight}, "a"
				if i%2 == 1 {
					weights, want = []int{lb.NoWeight, 1, lb.NoWeight}, "b"
				}
				pool.set(named(weights...))
				pool.get(20)
				pool.take().wantShares(t, 0, tally{want: 20})
			}
		})
	}
}

// TestWeightsFollowUpdatesUnprepared: a wrapper hides Prepare, so the strategy
// itself has to notice that weights changed under the same backends.
func TestWeightsFollowUpdatesUnprepared(t *testing.T) {
	pool := newStubPool(t, named(1, 1), nil, lb.WithBalancer(struct{ lb.Balancer }{lb.RoundRobin()}))
	for _, weights := range [][]int{{3, 1}, {1, 1}, {1, 4}} {
		pool.set(named(weights...))
		pool.get(100 * (weights[0] + weights[1]))
		pool.take().wantShares(t, 0.02, tally{"a": 100 * weights[0], "b": 100 * weights[1]})
	}
}

// TestWeightSurvivesAbsence is traefik/traefik#2986: weights were forgotten once a
// backend had gone and come back.
func TestWeightSurvivesAbsence(t *testing.T) {
	for _, newBalancer := range []func() lb.Balancer{lb.RoundRobin, lb.LeastConnections} {
		b := newBalancer()
		t.Run(fmt.Sprint(b), func(t *testing.T) {
			pool := newStubPool(t, named(3, 1), nil, lb.WithBalancer(b))
			for _, s := range []lb.State{lb.Disabled, lb.Active} {
				if err := pool.SetState("a", s); err != nil {
					t.Fatal(err)
				}
				if s == lb.Disabled {
					pool.get(10)
					pool.take().wantShares(t, 0, tally{"b": 10})
				}
			}
			pool.get(400)
			pool.take().wantShares(t, 0.1, tally{"a": 300, "b": 100})
		})
	}
}

// TestTiesAreShared is caddyserver/caddy#5609: of backends with equally few
// requests the last one always won, so a quiet pool used one host.
func TestTiesAreShared(t *testing.T) {
	pool := newStubPool(t, named(1, 1, 1), nil, lb.WithBalancer(lb.LeastConnections()))
	pool.get(3000)
	pool.take().wantShares(t, 0.15, tally{"a": 1000, "b": 1000, "c": 1000}) // 33 % ± 5 %
}

// TestWeightsCountWhileThereIsLittleToDo is haproxy/haproxy#1393: weighted least
// connections compared whole numbers in flight and so ignored weights at low
// concurrency.
func TestWeightsCountWhileThereIsLittleToDo(t *testing.T) {
	pool := newStubPool(t, named(5, 2), nil, lb.WithBalancer(lb.LeastConnections()))
	pool.get(700)
	pool.take().wantShares(t, 0.15, tally{"a": 500, "b": 200})
}

func TestLeastConnectionsTakesTheLeastForItsWeight(t *testing.T) {
	for _, c := range []struct {
		name           string
		weights, loads []int
		want           string
	}{
		{name: "the idle one", weights: []int{1, 1, 1}, loads: []int{2, 0, 1}, want: "b"},
		{name: "the last one", weights: []int{1, 1, 1}, loads: []int{2, 3, 1}, want: "c"},
		{name: "the heavy one though it has more to do", weights: []int{5, 1}, loads: []int{4, 1}, want: "a"},
		{name: "the light one when the heavy one is full", weights: []int{5, 1}, loads: []int{6, 1}, want: "b"},
		{name: "large weights do not overflow", weights: []int{lb.MaxWeight, 1}, loads: []int{1000, 0}, want: "b"},
	} {
		t.Run(c.name, func(t *testing.T) {
			set := weighted(c.weights...)
			for i, n := range c.loads {
				for range n {
					set[i].Acquire()
				}
			}
			picks(lb.LeastConnections(), set, 20).wantShares(t, 0, tally{c.want: 20})
		})
	}
}

// TestLeastConnectionsFillsInProportion holds every request that it picks for.
func TestLeastConnectionsFillsInProportion(t *testing.T) {
	set := weighted(4, 2, 1)
	b := lb.LeastConnections()
	got := tally{}
	for range 700 {
		p := b.Pick(requestFrom(""), set)
		p.Acquire()
		got[p.Name()]++
	}
	got.wantShares(t, 0.01, tally{"a": 400, "b": 200, "c": 100})
}

// TestReturnOfANameKeepsCountsApart is llm-d/llm-d#1950, vllm-project/aibrix#2421
// and BerriAI/litellm#40401: the count in flight was found by name, so after a
// backend left and came back it fell below zero, and the backend drew everything.
func TestReturnOfANameKeepsCountsApart(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	hold := func(_ string, r *http.Request) error {
		if r.Header.Get("Hold") != "" {
			entered <- struct{}{}
			<-release
		}
		return nil
	}
	pool := newStubPool(t, named(1, lb.NoWeight), hold, lb.WithBalancer(lb.LeastConnections()))
	var held sync.WaitGroup
	holdOne := func() {
		held.Go(func() {
			r, _ := http.NewRequest(http.MethodGet, "http://service.test/", nil)
			r.Header.Set("Hold", "1")
			resp, err := pool.RoundTrip(r)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		})
		<-entered
	}
	wantInFlight := func(b *lb.Backend, want int) {
		t.Helper()
		if got := b.InFlight(); got != want {
			t.Errorf("InFlight() = %d, want %d", got, want)
		}
	}
	before := pool.Backends()[0]
	holdOne()
	pool.set(named(lb.NoWeight, 1)[1:])
	pool.set(named(1, lb.NoWeight))
	after := pool.Backends()[0]
	if before == after {
		t.Fatal("the backend that came back is the one that left")
	}
	wantInFlight(before, 1)
	wantInFlight(after, 0)
	holdOne()
	wantInFlight(before, 1)
	wantInFlight(after, 1)

	sampled := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(sampled)
		for {
			if a, b := before.InFlight(), after.InFlight(); a < 0 || b < 0 {
				t.Errorf("InFlight() = %d before and %d after, want none below 0", a, b)
				return
			}
			select {
			case <-done:
				return
			default:
			}
		}
	}()
	release <- struct{}{}
	release <- struct{}{}
	held.Wait()
	close(done)
	<-sampled
	wantInFlight(before, 0)
	wantInFlight(after, 0)

	pool.set(named(1, 1, 1))
	pool.take()
	pool.get(300)
	pool.take().wantShares(t, 0.15, tally{"a": 100, "b": 100, "c": 100})
}

// tenantFirst is the strategy of labstack/echo PR#1136 and labstack/echo#1202, which
// a balancer that does not see the request cannot be: requests that name a tenant
// go to a backend of it, all others to the one with the least to do.
type tenantFirst struct{ others lb.Balancer }

func (t tenantFirst) Pick(r *http.Request, candidates []*lb.Backend) *lb.Backend {
	if tenant := r.Header.Get("Tenant"); tenant != "" {
		for _, b := range candidates {
			if of, ok := b.Metadata("tenant"); ok && of == tenant {
				return b
			}
		}
	}
	return t.others.Pick(r, candidates)
}

func TestBalancerByHeaderAndMetadata(t *testing.T) {
	newBalancer := func() lb.Balancer { return tenantFirst{lb.LeastConnections()} }
	lbtest.RunBalancer(t, newBalancer)

	targets := named(1, 1, 1)
	targets[1].Metadata = map[string]string{"tenant": "acme"}
	pool := newStubPool(t, targets, nil, lb.WithBalancer(newBalancer()))
	var choice string
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, record := lb.Record(r.Context())
		pool.ServeHTTP(w, r.WithContext(ctx))
		choice = record.Backend()
	})
	for range 20 {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Tenant", "acme")
		w := httptest.NewRecorder()
		outer.ServeHTTP(w, r)
		if w.Code != http.StatusOK || choice != "b" {
			t.Fatalf("a request of acme: status %d by %q, want 200 by %q", w.Code, choice, "b")
		}
	}
	seen := tally{}
	for range 300 {
		outer.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
		seen[choice]++
	}
	seen.wantShares(t, 0.15, tally{"a": 100, "b": 100, "c": 100})
}
