package lb_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// A request that reached a backend which hangs is repeated only if its method
// allows that: a POST gets 504 and has arrived once (traefik/traefik#8990).
func TestPostIsNeverSentTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Hang(), lbtest.Answer()}, noEjection(),
			lb.WithTimeouts(lb.Timeouts{ResponseHeader: 200 * time.Millisecond}))
		for i := range 50 {
			id := fmt.Sprint(i)
			a := r.must("POST", id, strings.NewReader("pay"))
			want := http.StatusOK
			if r.backends[0].Arrivals(id) > 0 {
				want = http.StatusGatewayTimeout
			}
			r.wantStatus(a, want)
			if n := r.arrivals(id); n != 1 {
				t.Errorf("POST %s arrived %d times", id, n)
			}
		}
		if hung := r.backends[0].Count(); hung != 25 {
			t.Errorf("%d of 50 POSTs reached the hanging backend, want 25", hung)
		}
		for i := range 50 {
			r.wantStatus(r.must("GET", fmt.Sprintf("get %d", i), nil), 200)
		}
		r.wantIdle()
	})
}

// What makes a request repeatable, and what does not (traefik/traefik#1104).
func TestOnlyRepeatableRequestsReachASecondBackend(t *testing.T) {
	for _, tt := range []struct {
		method, field string
		want          int
	}{
		{"GET", "", 200}, {"HEAD", "", 200}, {"OPTIONS", "", 200}, {"PUT", "", 200}, {"DELETE", "", 200},
		{"POST", "", 502}, {"PATCH", "", 502}, {"LOCK", "", 502},
		{"POST", "Idempotency-Key", 200}, {"PATCH", "X-Idempotency-Key", 200},
	} {
		bubble(t, tt.method+" "+tt.field, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Answer()}, noEjection())
			for i := range 8 {
				id := fmt.Sprint(i)
				var fields []string
				if tt.field != "" {
					fields = []string{tt.field, id}
				}
				a := r.must(tt.method, id, nil, fields...)
				if r.backends[0].Arrivals(id) == 0 {
					r.wantStatus(a, 200)
					continue
				}
				r.wantStatus(a, tt.want)
				if n := r.arrivals(id); tt.want == 502 && n != 1 {
					t.Errorf("arrived %d times", n)
				}
			}
			if r.backends[0].Count() != 4 {
				t.Errorf("the resetting backend got %d of 8, want 4", r.backends[0].Count())
			}
		})
	}
}

// With retries off, one request is one arrival (traefik/traefik#9872).
func TestNoHiddenRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Reset()}, noEjection(), lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
		for i := range 100 {
			r.wantStatus(r.must("GET", fmt.Sprintf("get %d", i), nil), 502)
			r.wantStatus(r.must("POST", fmt.Sprintf("post %d", i), strings.NewReader("x")), 502)
		}
		if n := r.count(); n != 200 {
			t.Errorf("arrivals = %d, want 200", n)
		}
	})
}

// A retry goes to another backend while one is left (traefik/traefik#2723,
// envoyproxy/envoy#2259).
func TestRetryLeavesTheBackendThatFailed(t *testing.T) {
	for _, bad := range []int{1, 4} {
		bubble(t, fmt.Sprintf("%d bad, 1 good", bad), func(t *testing.T) {
			r := newRig(t, answers(bad+1), noEjection(), lb.WithRetry(lb.RetryPolicy{Attempts: bad + 1}),
				lb.WithTimeouts(lb.Timeouts{Dial: 200 * time.Millisecond}))
			for _, b := range r.backends[:bad] {
				r.net.Blackhole(b.Addr(), true)
			}
			for range 100 {
				within(t, time.Duration(bad)*200*time.Millisecond+300*time.Millisecond, func() {
					r.wantStatus(r.must("GET", "", nil), 200)
				})
			}
			if n := r.backends[bad].Count(); n != 100 {
				t.Errorf("the good backend got %d of 100", n)
			}
		})
	}
	bubble(t, "one bad that resets, hashed to", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Answer()}, noEjection(), lb.WithBalancer(lb.IPHash()))
		for i := range 20 {
			r.wantStatus(r.must("GET", fmt.Sprint(i), nil), 200)
			if n := r.backends[0].Arrivals(fmt.Sprint(i)); n > 1 {
				t.Errorf("request %d asked the failed backend %d times", i, n)
			}
		}
	})
}

func answers(n int) []lbtest.Behavior {
	list := make([]lbtest.Behavior, n)
	for i := range list {
		list[i] = lbtest.Answer()
	}
	return list
}

// Requests without a body are the easiest to repeat (vulcand/oxy PR#253).
func TestRequestsWithoutBodyAreRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Answer()}, noEjection())
		for i, method := range []string{"GET", "HEAD", "DELETE", "GET", "HEAD", "DELETE"} {
			id := fmt.Sprint(i)
			r.wantStatus(r.must(method, id, nil), 200)
			if n := r.arrivals(id); n < 1 || n > 2 {
				t.Errorf("%s arrived %d times", method, n)
			}
		}
	})
}

// A discarded answer gives its connection back or closes it before the next
// attempt (alexfalkowski/go-service PR#2521): with one connection per backend,
// one that is kept would block the request after it.
func TestDiscardedAnswersReleaseTheirConnection(t *testing.T) {
	for name, busy := range map[string]lbtest.Behavior{
		"short answer":   lbtest.AnswerStatus(503, "busy"),
		"long answer":    lbtest.AnswerStatus(503, text(300<<10)),
		"endless answer": lbtest.Handle(http.HandlerFunc(endless503)),
	} {
		bubble(t, name, func(t *testing.T) {
			network := lbtest.NewNetwork()
			a, b := network.NewBackend(t, "a"), network.NewBackend(t, "b")
			a.Set(busy)
			template := network.Transport()
			template.MaxConnsPerHost = 1
			pool, err := lb.New(lb.Targets(a.URL(), b.URL()), lb.WithTransport(template),
				lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}}))
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			for range 500 {
				req, _ := http.NewRequest("GET", "http://pool/", nil)
				within(t, time.Second, func() {
					resp, err := pool.RoundTrip(req)
					if err != nil {
						t.Fatal(err)
					}
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					if resp.StatusCode != 200 {
						t.Fatalf("status = %d", resp.StatusCode)
					}
				})
			}
			if s := pool.Stats(); s.InFlight != 0 {
				t.Errorf("in flight = %d", s.InFlight)
			}
			if a.OpenConns() > 1 || b.OpenConns() > 1 {
				t.Errorf("open connections = %d and %d, want at most 1", a.OpenConns(), b.OpenConns())
			}
		})
	}
}

func endless503(w http.ResponseWriter, r *http.Request) {
	w.WriteHeader(503)
	for r.Context().Err() == nil {
		if _, err := io.WriteString(w, text(1<<10)); err != nil {
			return
		}
		http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// When all attempts end in a retried status, the last answer is passed on as it
// is.
func TestLastRetriedAnswerIsPassedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.AnswerStatus(503, "from a"), lbtest.AnswerStatus(503, "from b")},
			lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}}))
		a := r.must("GET", "1", nil)
		r.wantStatus(a, 503)
		if s := string(a.body); s != "from a" && s != "from b" {
			t.Errorf("body = %q, want a backend's", s)
		}
		if n := r.arrivals("1"); n != 2 {
			t.Errorf("arrivals = %d, want 2", n)
		}
		r.wantStatus(r.must("POST", "2", strings.NewReader("x")), 503)
		if n := r.arrivals("2"); n != 1 {
			t.Errorf("a POST that was answered 503 arrived %d times", n)
		}
		r.wantIdle()
	})
}

// A backend that closes a kept-alive connection under a request: what can be
// repeated is, what cannot is told so and has not been sent twice.
func TestConnectionClosedUnderARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.CloseReused()}, noEjection())
		for i := range 20 {
			r.wantStatus(r.must("GET", fmt.Sprint(i), nil), 200)
			r.wantStatus(r.must("PUT", fmt.Sprintf("put %d", i), strings.NewReader("x")), 200)
		}
		r.wantIdle()
	})
}

// One unreachable backend of four costs the first requests its dial time-out and
// the later ones nothing; none fails (sozu-proxy/sozu#475).
func TestUnreachableBackendIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, answers(4))
		r.net.Blackhole(r.backends[0].Addr(), true)
		var slow int
		for range 400 {
			began := time.Now()
			r.wantStatus(r.must("GET", "", nil), 200)
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("a request took %v", took)
			} else if took > 50*time.Millisecond {
				slow++
			}
			linger(50 * time.Millisecond)
		}
		// three until it is ejected, and one trial after each ejection in 20 s
		if slow > 3+3 {
			t.Errorf("%d of 400 requests had to wait, want at most 6", slow)
		}
	})
}

// Two of three backends refuse: with the defaults nothing fails.
func TestTwoOfThreeRefuseAndNothingFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Answer(), lbtest.Refuse()})
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				method, body := "GET", io.Reader(nil)
				if i%2 == 1 {
					method, body = "POST", strings.NewReader(text(1000))
				}
				a, err := r.do(method, fmt.Sprint(i), body)
				if err != nil || a.status != 200 || r.arrivals(fmt.Sprint(i)) != 1 {
					t.Errorf("%s %d: status %d, %v, arrived %d times", method, i, a.status, err, r.arrivals(fmt.Sprint(i)))
				}
			})
			linger(5 * time.Millisecond)
		}
		wg.Wait()
		r.wantIdle()
	})
}

// The loop stops where its limits say: attempts, total time.
func TestAttemptsEnd(t *testing.T) {
	bubble(t, "attempts", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Reset(), lbtest.Reset(), lbtest.Reset(), lbtest.Reset()}, noEjection())
		r.wantStatus(r.must("GET", "1", nil), 502)
		if n := r.arrivals("1"); n != 3 {
			t.Errorf("arrivals = %d, want 3", n)
		}
	})
	bubble(t, "failed dials do not use them up", func(t *testing.T) {
		behaviors := answers(9)
		for i := range 8 {
			behaviors[i] = lbtest.Refuse()
		}
		r := newRig(t, behaviors, noEjection())
		for i := range 20 {
			r.wantStatus(r.must("POST", fmt.Sprint(i), strings.NewReader("x")), 200)
		}
	})
	bubble(t, "a backend alone that refuses is asked again after a delay", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse()})
		a := r.must("GET", "1", nil)
		r.wantStatus(a, 503)
		if a.header.Get("Retry-After") == "" {
			t.Error("503 without Retry-After")
		}
		if got := r.pool.Stats().Backends[0].Requests; got != 3 {
			t.Errorf("attempts = %d, want 3", got)
		}
	})
	bubble(t, "total time", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Hang(), lbtest.Hang(), lbtest.Hang()}, noEjection(),
			lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second}), lb.WithRetry(lb.RetryPolicy{Total: 500 * time.Millisecond}))
		r.wantStatus(r.must("GET", "1", nil), 504)
		if n := r.arrivals("1"); n != 1 {
			t.Errorf("arrivals = %d, want 1", n)
		}
	})
}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
