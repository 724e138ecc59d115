package lb_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	"example.com/lb"
)

// BenchmarkProbes measures what it takes to probe 1,000 backends each second, as a
// share of one core: the schedule and the bookkeeping alone, with a Checker that does
// nothing; with HTTP probes, client and server of their connections included; and, to
// compare with the latter, what as many requests over fresh connections cost without a
// pool, sent from a loop. Each iteration is a second of real time:
//
//	go test -run - -bench Probes -benchtime 10x .
func BenchmarkProbes(b *testing.B) {
	const backends, interval = 1000, time.Second
	probed := func(opts ...lb.Option) func(*testing.B) {
		return func(b *testing.B) {
			targets := make([]lb.Target, backends)
			url := "http://" + rawBackend(b)
			for i := range targets {
				targets[i] = lb.Target{Name: fmt.Sprint(i), URL: url}
			}
			pool, err := lb.New(targets, append([]lb.Option{lb.WithHealthCheck(lb.HealthCheck{Interval: interval})}, opts...)...)
			if err != nil {
				b.Fatal(err)
			}
			defer pool.Close()
			if err := pool.Ready(b.Context()); err != nil {
				b.Fatal(err)
			}
			seconds(b, func() { time.Sleep(interval) })
		}
	}
	nothing := lb.CheckerFunc(func(context.Context, lb.ProbeTarget) (lb.Verdict, error) { return lb.VerdictHealthy, nil })
	b.Run("schedule", probed(lb.WithChecker(nothing)))
	b.Run("http", probed(lb.WithHealthCheck(lb.HealthCheck{Path: "/healthz", Interval: interval})))
	b.Run("bare", func(b *testing.B) {
		url := "http://" + rawBackend(b) + "/healthz"
		t := &http.Transport{DisableKeepAlives: true, DisableCompression: true}
		seconds(b, func() { ask(b, t, url, backends, interval) })
	})
}

// seconds reports the processor time of iterations that take a second each.
func seconds(b *testing.B, one func()) {
	b.ReportAllocs()
	cpu, began := cpuTime(), time.Now()
	for b.Loop() {
		one()
	}
	b.ReportMetric(100*float64(cpuTime()-cpu)/float64(time.Since(began)), "core-%")
}

// ask sends n requests, spread evenly over d.
func ask(b *testing.B, t http.RoundTripper, url string, n int, d time.Duration) {
	began := time.Now()
	for i := range n {
		time.Sleep(time.Until(began.Add(d * time.Duration(i) / time.Duration(n))))
		req, err := http.NewRequest(http.MethodGet, url, http.NoBody)
		if err != nil {
			b.Fatal(err)
		}
		resp, err := t.RoundTrip(req)
		if err != nil {
			b.Fatal(err)
		}
		resp.Body.Close()
	}
	time.Sleep(time.Until(began.Add(d)))
}
