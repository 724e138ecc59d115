package lbtest_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/lbtest"
)

const probePath = "/healthz"

// get makes a request as a health checker does.
func get(t *testing.T, b *lbtest.Backend, path string) *http.Request {
	t.Helper()
	return newRequest(t, "GET", b.URL()+path, nil)
}

func TestProbeAndTrafficAreServedApart(t *testing.T) {
	for _, tt := range []struct {
		name           string
		traffic, probe lbtest.Behavior
		trafficStatus  int
		status         int
		body           string // "*" for any
		err            string // part of the error's text
	}{
		{"the probe fails", lbtest.Answer(), lbtest.AnswerStatus(503, ""), 200, 503, "", ""},
		{"the probe is answered wrongly", lbtest.Answer(), lbtest.AnswerStatus(200, "other"), 200, 200, "other", ""},
		{"the probe is not answered in HTTP", lbtest.Answer(), lbtest.Raw("garbage"), 200, 0, "", "malformed"},
		{"the probe's answer is cut", lbtest.Answer(), lbtest.ResetMid(3), 200, 200, "xxx", "reset"},
		{"the zero value answers the probe", lbtest.Answer(), lbtest.Behavior{}, 200, 200, "*", ""},
		{"traffic fails and the probe does not", lbtest.AnswerStatus(500, "no"), lbtest.AnswerStatus(200, "ok"), 500, 200, "ok", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBothNetworks(t, func(t *testing.T, r *rig) {
				b := r.backend(t, "a")
				b.Set(tt.traffic)
				b.SetProbe(probePath, tt.probe)
				for i := range 2 {
					if status, _, err := r.send(put(t, b, "body")); status != tt.trafficStatus || err != nil {
						t.Errorf("traffic %d = %d, %v, want %d", i, status, err, tt.trafficStatus)
					}
					status, body, err := r.send(get(t, b, probePath))
					if tt.body == "*" {
						body = "*"
					}
					failed := err != nil && tt.err != "" && strings.Contains(err.Error(), tt.err)
					if status != tt.status || body != tt.body || (err != nil || tt.err != "") && !failed {
						t.Errorf("probe %d = %d, %q, %v; want %d, %q, %q", i, status, body, err, tt.status, tt.body, tt.err)
					}
				}
				if b.Count() != 2 || b.ProbeCount() != 2 {
					t.Errorf("Count() = %d, ProbeCount() = %d, want 2 each", b.Count(), b.ProbeCount())
				}
			})
		})
	}
}

func TestSlowProbeDelaysNoTraffic(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.SetProbe(probePath, lbtest.Delay(r.delay))
		start := time.Now()
		if status, _, err := r.send(put(t, b, "")); status != 200 || r.virtual && time.Since(start) != 0 {
			t.Errorf("traffic = %d, %v after %v, want it at once", status, err, time.Since(start))
		}
		start = time.Now()
		status, _, err := r.send(get(t, b, probePath))
		took := time.Since(start)
		if status != 200 || err != nil || took < r.delay || r.virtual && took != r.delay {
			t.Errorf("probe = %d, %v after %v, want 200 after %v", status, err, took, r.delay)
		}
	})
}

func TestHangingProbeTimesOutWhileTrafficFlows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := lbtest.NewNetwork()
		b := n.NewBackend(t, "a")
		b.SetProbe(probePath, lbtest.Hang())
		r := &rig{client: &http.Client{Transport: n.Transport(), Timeout: time.Hour}}
		probe := make(chan error, 1)
		start := time.Now()
		go func() {
			_, _, err := r.send(get(t, b, probePath))
			probe <- err
		}()
		synctest.Wait()
		if status, _, err := r.send(put(t, b, "")); status != 200 || b.ProbeCount() != 1 {
			t.Errorf("traffic = %d, %v with %d probes, want 200 with 1", status, err, b.ProbeCount())
		}
		if err := <-probe; !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Hour {
			t.Errorf("probe = %v after %v, want a timeout after 1h", err, time.Since(start))
		}
		synctest.Wait()
		if got := b.Probes(); len(got) != 1 || !got[0].Canceled || b.MaxConcurrent() != 1 {
			t.Errorf("Probes() = %+v, want one canceled; MaxConcurrent() = %d, want 1 without it", got, b.MaxConcurrent())
		}
	})
}

func TestProbeIsWellAgain(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.SetProbe(probePath, lbtest.Hang())
		hanging := make(chan error, 1)
		go func() {
			_, _, err := r.send(get(t, b, probePath))
			hanging <- err
		}()
		r.until(t, "the first probe arrived", func() bool { return b.ProbeCount() == 1 })
		for i, want := range []int{503, 200, 503, 200} {
			b.SetProbe(probePath, lbtest.AnswerStatus(want, ""))
			if status, _, err := r.send(get(t, b, probePath)); status != want || b.ProbeCount() != i+2 {
				t.Errorf("probe %d = %d, %v, %d in all; want %d", i, status, err, b.ProbeCount(), want)
			}
		}
		select {
		case err := <-hanging:
			t.Fatalf("the first probe ended with another behaviour: %v", err)
		default:
		}
		b.Close()
		if err := <-hanging; err == nil {
			t.Error("the first probe was answered")
		}
	})
}

func TestProbesAreRecordedApart(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.SetProbe(probePath, lbtest.Answer())
		for _, path := range []string{probePath + "?full=1", "/", probePath, "/"} {
			req := newRequest(t, "PUT", b.URL()+path, io.MultiReader(strings.NewReader("body")))
			req.Header.Set(lbtest.RequestIDHeader, "id-1")
			if status, body, err := r.send(req); status != 200 || !strings.Contains(body, `"target":"`+path+`"`) {
				t.Errorf("%s = %d, %q, %v, want its record", path, status, body, err)
			}
		}
		for what, all := range map[string][]lbtest.Received{"/": b.Received(), probePath: b.Probes()} {
			if len(all) != 2 {
				t.Fatalf("%d records of %s, want 2", len(all), what)
			}
			for i, got := range all {
				path, _, _ := strings.Cut(got.Target, "?")
				if path != what || got.Seq != i+1 || got.BodyBytes != 4 || got.BodySHA256 == "" || got.Method != "PUT" {
					t.Errorf("record %d of %s = %+v", i, what, got)
				}
			}
		}
		if b.Count() != 2 || b.ProbeCount() != 2 || b.Arrivals("id-1") != 2 || b.MaxConcurrent() != 1 {
			t.Errorf("Count %d, ProbeCount %d, Arrivals %d, MaxConcurrent %d", b.Count(), b.ProbeCount(), b.Arrivals("id-1"), b.MaxConcurrent())
		}
		if b.TotalConns() != 1 || b.OpenConns() != 1 || b.Probes()[0].Reused || !b.Received()[0].Reused {
			t.Errorf("%d connections, %d open, want one for all", b.TotalConns(), b.OpenConns())
		}
		b.Probes()[0].Header.Set(lbtest.RequestIDHeader, "changed")
		if b.Probes()[0].Header.Get(lbtest.RequestIDHeader) == "changed" {
			t.Error("Probes does not return copies")
		}
	})
}

func TestProbePathIsComparedWithoutQuery(t *testing.T) {
	for _, tt := range []struct {
		name, requestLine string
		probe             bool
	}{
		{"the path", "GET /healthz", true},
		{"another method", "HEAD /healthz", true},
		{"a query", "GET /healthz?full=1", true},
		{"an escaped letter", "GET /health%7A", true},
		{"an absolute target", "GET http://a.test/healthz", true},
		{"a longer path", "GET /healthz/", false},
		{"a path that ends alike", "GET /a/healthz", false},
		{"other letters", "GET /Healthz", false},
		{"the path as a query", "GET /?/healthz", false},
		{"no path", "OPTIONS *", false},
		{"an empty path", "GET http://a.test", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBothNetworks(t, func(t *testing.T, r *rig) {
				b := r.backend(t, "a")
				c := r.dial(t, b)
				br := bufio.NewReader(c)
				for i, want := range []int{0, 1} { // before and after SetProbe
					fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: a.test\r\n\r\n", tt.requestLine)
					method, _, _ := strings.Cut(tt.requestLine, " ")
					resp, err := http.ReadResponse(br, &http.Request{Method: method})
					if err != nil {
						t.Fatal(err)
					}
					io.Copy(io.Discard, resp.Body)
					if !tt.probe {
						want = 0
					}
					if b.ProbeCount() != want || b.Count() != i+1-want {
						t.Errorf("request %d: ProbeCount() = %d, Count() = %d, want %d probes", i, b.ProbeCount(), b.Count(), want)
					}
					b.SetProbe(probePath, lbtest.Answer())
				}
			})
		})
	}
}

func TestChangeOfProbePathForgetsNothing(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		for _, path := range []string{"/old", "/new"} {
			b.SetProbe(path, lbtest.AnswerStatus(204, ""))
			if status, _, err := r.send(get(t, b, path)); status != 204 {
				t.Errorf("%s = %d, %v, want 204", path, status, err)
			}
		}
		if status, _, err := r.send(get(t, b, "/old")); status != 200 {
			t.Errorf("the old path = %d, %v, want 200", status, err)
		}
		got := b.Probes()
		if len(got) != 2 || got[0].Target != "/old" || got[1].Target != "/new" || got[1].Seq != 2 || b.Count() != 1 {
			t.Errorf("Probes() = %+v, Count() = %d", got, b.Count())
		}
	})
}

func TestForgetClearsProbesAndKeepsTheirBehavior(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.SetProbe(probePath, lbtest.AnswerStatus(503, ""))
		r.send(get(t, b, probePath))
		r.send(get(t, b, probePath))
		b.Forget()
		if got := b.Probes(); len(got) != 0 || b.ProbeCount() != 0 {
			t.Errorf("Probes() = %+v, ProbeCount() = %d after Forget", got, b.ProbeCount())
		}
		status, _, err := r.send(get(t, b, probePath))
		if got := b.Probes(); status != 503 || len(got) != 1 || got[0].Seq != 1 || b.Count() != 0 {
			t.Errorf("probe = %d, %v; Probes() = %+v, Count() = %d", status, err, got, b.Count())
		}
	})
}

func TestRefuseAndCloseReusedActOnProbes(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.SetProbe(probePath, lbtest.AnswerStatus(204, ""))
		b.Set(lbtest.Refuse())
		if _, _, err := r.send(get(t, b, probePath)); !hasErrno(err, syscall.ECONNREFUSED) {
			t.Errorf("probe = %v, want connection refused", err)
		}
		b.Set(lbtest.CloseReused())
		for i, ok := range []bool{true, false, true} {
			// A body keeps the transport from sending it again.
			req := newRequest(t, "PUT", b.URL()+probePath, io.MultiReader(strings.NewReader("body")))
			if status, _, err := r.send(req); ok != (status == 204) || ok != (err == nil) {
				t.Errorf("probe %d = %d, %v, want success %t", i, status, err, ok)
			}
		}
		if b.ProbeCount() != 2 || b.TotalConns() != 2 {
			t.Errorf("%d probes over %d connections, want 2 over 2", b.ProbeCount(), b.TotalConns())
		}
	})
}

func TestRecordKeepsTheLastProbes(t *testing.T) {
	const kept, sent = 10_000, 10_010
	n := lbtest.NewNetwork()
	b := n.NewBackend(t, "a")
	b.SetProbe("/", lbtest.Handle(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	c, err := n.DialContext(t.Context(), "tcp", b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go io.WriteString(c, strings.Repeat("GET / HTTP/1.1\r\nHost: a\r\n\r\n", sent-1)+
		"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
	io.Copy(io.Discard, c)
	got := b.Probes()
	if b.ProbeCount() != sent || len(got) != kept || got[0].Seq != sent-kept+1 || got[kept-1].Seq != sent {
		t.Errorf("%d of %d probes kept, want %d of %d", len(got), b.ProbeCount(), kept, sent)
	}
}

func TestSetProbeIsSafeUnderTraffic(t *testing.T) {
	const each = 40
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.SetProbe(probePath, lbtest.Answer())
		done := make(chan struct{})
		var setters, clients sync.WaitGroup
		for _, status := range []int{200, 503} {
			setters.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
						b.SetProbe(probePath, lbtest.AnswerStatus(status, ""))
						b.Probes()
						r.pause()
					}
				}
			})
		}
		for range 4 {
			clients.Go(func() {
				for range each {
					if status, _, err := r.send(get(t, b, probePath)); status != 200 && status != 503 {
						t.Errorf("probe = %d, %v, want 200 or 503", status, err)
					}
					if status, _, err := r.send(put(t, b, "body")); status != 200 {
						t.Errorf("traffic = %d, %v, want 200", status, err)
					}
					r.pause()
				}
			})
		}
		clients.Wait()
		close(done)
		setters.Wait()
		if b.ProbeCount() != 4*each || b.Count() != 4*each || len(b.Probes()) != 4*each {
			t.Errorf("%d probes, %d kept, and %d other requests, want %d each", b.ProbeCount(), len(b.Probes()), b.Count(), 4*each)
		}
	})
}

func TestImpossibleProbesPanic(t *testing.T) {
	for name, tt := range map[string]struct {
		path     string
		behavior lbtest.Behavior
		want     string
	}{
		"Refuse":               {probePath, lbtest.Refuse(), "Refuse acts on connections"},
		"CloseReused":          {probePath, lbtest.CloseReused(), "CloseReused acts on connections"},
		"an empty path":        {"", lbtest.Answer(), `""`},
		"a path without slash": {"healthz", lbtest.Answer(), `"healthz"`},
		"a URL":                {"http://a.test/healthz", lbtest.Answer(), `"http://a.test/healthz"`},
		"a path with a query":  {"/healthz?full=1", lbtest.Answer(), `"/healthz?full=1"`},
	} {
		t.Run(name, func(t *testing.T) {
			b := lbtest.NewNetwork().NewBackend(t, "a")
			defer func() {
				if text, ok := recover().(string); !ok || !strings.HasPrefix(text, "lbtest: ") || !strings.Contains(text, tt.want) {
					t.Errorf("panic(%q), want one of lbtest about %s", text, tt.want)
				}
			}()
			b.SetProbe(tt.path, tt.behavior)
		})
	}
}

// A backend fails its health probe while it goes on to serve traffic.
func ExampleBackend_SetProbe() {
	b := lbtest.NewBackend(exampleTB{}, "blue")
	defer b.Close() // a test's cleanup does it

	show := func(path string) {
		resp, err := http.Get(b.URL() + path)
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		fmt.Println(path, resp.StatusCode)
	}
	b.SetProbe("/healthz", lbtest.AnswerStatus(503, ""))
	show("/healthz")
	show("/orders")
	b.SetProbe("/healthz", lbtest.Answer()) // is well again
	show("/healthz")
	fmt.Println(b.ProbeCount(), "probes,", b.Count(), "other request")
	// Output:
	// /healthz 503
	// /orders 200
	// /healthz 200
	// 2 probes, 1 other request
}
