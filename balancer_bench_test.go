package lb_test

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	"example.com/lb"
)

// BenchmarkPick measures what a pick costs, prepared as the pool prepares it. The
// weights differ, except where the name says equal; nothing is in flight, so for
// least connections equal weights are the worst case: every candidate ties. The
// goal is no allocation and, on one CPU, under 100 ns at 3 backends and at 1000
// under 1 µs, or 3 µs for least connections, which looks at all of them.
//
//	go test -run - -bench 'Pick/' -cpu 1,2 -count 6 .
func BenchmarkPick(b *testing.B) {
	eachPick(b, readyFor, func(b *testing.B, strategy lb.Balancer, set []*lb.Backend, requests []*http.Request) {
		var workers atomic.Int64
		b.RunParallel(func(pb *testing.PB) {
			for i := int(workers.Add(1)) * len(requests) / 7; pb.Next(); i++ {
				if strategy.Pick(requests[i%len(requests)], set) == nil {
					b.Error("Pick() = nil")
				}
			}
		})
	})
}

// BenchmarkPickAmongOthers measures a pick for a request that has failed on one
// backend already.
func BenchmarkPickAmongOthers(b *testing.B) {
	eachPick(b, readyFor, func(b *testing.B, strategy lb.Balancer, set []*lb.Backend, requests []*http.Request) {
		i := 0
		for b.Loop() {
			i++
			strategy.Pick(requests[i%len(requests)], set[1:])
		}
	})
}

// BenchmarkPickUnprepared measures what a strategy costs behind a wrapper that
// hides Prepare: it has to see for itself that the candidates are the same.
func BenchmarkPickUnprepared(b *testing.B) {
	asItIs := func(strategy lb.Balancer, _ []*lb.Backend) lb.Balancer { return strategy }
	eachPick(b, asItIs, func(b *testing.B, strategy lb.Balancer, set []*lb.Backend, requests []*http.Request) {
		i := 0
		for b.Loop() {
			i++
			strategy.Pick(requests[i%len(requests)], set)
		}
	})
}

type pickBenchmark func(b *testing.B, strategy lb.Balancer, set []*lb.Backend, requests []*http.Request)

func eachPick(b *testing.B, ready func(lb.Balancer, []*lb.Backend) lb.Balancer, run pickBenchmark) {
	requests := clients(1 << 12)
	for _, s := range []struct {
		name        string
		newBalancer func() lb.Balancer
		equal       bool
	}{
		{"round-robin", lb.RoundRobin, false},
		{"round-robin-equal", lb.RoundRobin, true},
		{"least-connections", lb.LeastConnections, false},
		{"least-connections-equal", lb.LeastConnections, true},
		{"ip-hash", lb.IPHash, false},
	} {
		for _, n := range []int{3, 100, 1000} {
			b.Run(fmt.Sprintf("%s/%d", s.name, n), func(b *testing.B) {
				set := make([]*lb.Backend, n)
				for i := range set {
					set[i] = lb.NewBackend(lb.Target{Name: fmt.Sprintf("backend-%d", i), Weight: 1 + i*7%13})
					if s.equal {
						set[i] = lb.NewBackend(lb.Target{Name: fmt.Sprintf("backend-%d", i)})
					}
				}
				strategy := ready(s.newBalancer(), set)
				strategy.Pick(requests[0], set) // lets an unprepared one build its table
				b.ReportAllocs()
				b.ResetTimer()
				run(b, strategy, set, requests)
			})
		}
	}
}

func TestPickDoesNotAllocate(t *testing.T) {
	r := requestFrom("[2001:db8::1]:1234")
	for _, newBalancer := range []func() lb.Balancer{lb.RoundRobin, lb.LeastConnections, lb.IPHash} {
		t.Run(fmt.Sprint(newBalancer()), func(t *testing.T) {
			for _, weights := range [][]int{{1, 1, 1}, {5, 1, 1}, {lb.MaxWeight, 7, 1}} {
				set := weighted(weights...)
				eachWay(t, newBalancer, set, func(t *testing.T, b lb.Balancer) {
					if n := testing.AllocsPerRun(1000, func() { b.Pick(r, set) }); n != 0 {
						t.Errorf("a pick by weights %v allocates %v times, want 0", weights, n)
					}
				})
				ready := readyFor(newBalancer(), set)
				if n := testing.AllocsPerRun(1000, func() { ready.Pick(r, set[1:]) }); n != 0 {
					t.Errorf("a pick among a part of weights %v allocates %v times, want 0", weights, n)
				}
			}
		})
	}
}
