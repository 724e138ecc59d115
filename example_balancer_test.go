package lb_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"example.com/lb"
)

// Turns are taken in proportion to weight.
func ExampleRoundRobin() {
	strategy := lb.RoundRobin()
	candidates := []*lb.Backend{
		lb.NewBackend(lb.Target{Name: "a", Weight: 5}),
		lb.NewBackend(lb.Target{Name: "b", Weight: 1}),
		lb.NewBackend(lb.Target{Name: "c", Weight: 1}),
	}
	picks := make(map[string]int)
	for range 7 {
		picks[strategy.Pick(nil, candidates).Name()]++
	}
	fmt.Println(picks)
	// Output: map[a:5 b:1 c:1]
}

// The backend with the least to do for its weight is next.
func ExampleLeastConnections() {
	strategy := lb.LeastConnections()
	a, b := lb.NewBackend(lb.Target{Name: "a"}), lb.NewBackend(lb.Target{Name: "b", Weight: 3})
	release := a.Acquire()
	for range 2 {
		b.Acquire()
	}
	fmt.Println(strategy.Pick(nil, []*lb.Backend{a, b})) // 1 for a weight of 1, 2 for one of 3
	release(lb.Outcome{Stage: lb.StageDone, Final: true})
	fmt.Println(strategy.Pick(nil, []*lb.Backend{a, b}))
	// Output:
	// b
	// a
}

// A client keeps its backend when the order changes or another one leaves.
func ExampleIPHash() {
	strategy := lb.IPHash()
	a, b, c := lb.NewBackend(lb.Target{Name: "a"}), lb.NewBackend(lb.Target{Name: "b"}), lb.NewBackend(lb.Target{Name: "c"})
	r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
	r.RemoteAddr = "192.0.2.7:50000"
	fmt.Println(strategy.Pick(r, []*lb.Backend{a, b, c}))
	r.RemoteAddr = "192.0.2.7:50001"
	fmt.Println(strategy.Pick(r, []*lb.Backend{c, b, a}))
	fmt.Println(strategy.Pick(r, []*lb.Backend{a, b}))
	// Output:
	// a
	// a
	// a
}
