package lb_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Clients that leave say nothing about the backend: it is neither ejected nor
// blamed, and nobody counts an error (dotnet/yarp#2062, golang/go#20071).
func TestClientsThatLeaveBlameNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var handled atomic.Int64
		r := newRig(t, []lbtest.Behavior{lbtest.Delay(500 * time.Millisecond)},
			lb.WithErrorHandler(func(http.ResponseWriter, *http.Request, error) { handled.Add(1) }))
		var wg sync.WaitGroup
		for i := range 200 {
			method, body := "GET", ""
			if i%2 == 1 {
				method, body = "POST", "x"
			}
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				defer cancel()
				req, _ := http.NewRequestWithContext(ctx, method, "http://"+frontAddr, strings.NewReader(body))
				if _, err := r.client.Do(req); err == nil {
					t.Error("an aborted request was answered")
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		s := r.pool.Stats()
		if s.ClientClosed != 200 || s.Failures != 0 || s.Backends[0].Failures != 0 {
			t.Errorf("client closed = %d, failures = %d, of the backend %d; want 200, 0, 0", s.ClientClosed, s.Failures, s.Backends[0].Failures)
		}
		if handled.Load() != 0 || r.errorLog.Len() != 0 {
			t.Errorf("error handler called %d times, log %q; want silence", handled.Load(), r.errorLog)
		}
		r.wantStatus(r.must("GET", "", nil), 200)
		r.wantIdle()
	})
}

// The last usable backend stays, whatever it does (caddyserver/caddy#667).
func TestLastUsableBackendIsNeverEjected(t *testing.T) {
	bubble(t, "alone, one poisonous request", func(t *testing.T) {
		poison := func(r *http.Request) bool { return r.Header.Get("Poison") != "" }
		r := newRig(t, []lbtest.Behavior{lbtest.When(poison, lbtest.Reset(), lbtest.Answer())})
		for range 20 {
			r.wantStatus(r.must("GET", "", nil, "Poison", "1"), 502)
		}
		for range 100 {
			r.wantStatus(r.must("GET", "", nil), 200)
		}
	})
	bubble(t, "all refuse", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Refuse(), lbtest.Refuse()})
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() { r.do("GET", "", nil) })
		}
		wg.Wait()
		if n := countState(r.pool, "ejected"); n != 2 {
			t.Errorf("ejected = %d of 3, want 2", n)
		}
	})
	bubble(t, "all reset: at most half go", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Reset(), lbtest.Reset(), lbtest.Reset(), lbtest.Reset()})
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() { r.do("GET", "", nil) })
		}
		wg.Wait()
		if n := countState(r.pool, "ejected"); n != 2 {
			t.Errorf("ejected = %d of 5, want 2", n)
		}
	})
}

func countState(p *lb.Pool, state string) int {
	n := 0
	for _, b := range p.Stats().Backends {
		if b.State == state {
			n++
		}
	}
	return n
}

// Out of the box a dead backend costs no request, and after the first seconds
// only trials reach it (labstack/echo#2372).
func TestDefaultsFailOverAndEject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Answer(), lbtest.Refuse(), lbtest.Answer()})
		for i := range 1000 {
			if i%2 == 0 {
				r.wantStatus(r.must("GET", "", nil), 200)
			} else {
				r.wantStatus(r.must("POST", "", strings.NewReader("x")), 200)
			}
			linger(20 * time.Millisecond)
		}
		// three failures, then trials after about 5, 15 and 30 s; the run is 20 s long
		if n := r.pool.Stats().Backends[1].Requests; n > 3+2 {
			t.Errorf("attempts on the dead backend = %d, want at most 5", n)
		}
	})
}

// The whole life of an ejection, to the second: out after three failures in a
// row, longer each time, one request on trial, in again once one is answered.
func TestEjectionTrialReturn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logged bytes.Buffer
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Answer()},
			lb.WithLogger(slog.New(slog.NewTextHandler(&logged, nil))))
		a := r.pool.Backends()[0]
		tick := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); linger(100 * time.Millisecond) {
				r.wantStatus(r.must("GET", "", nil), 200)
			}
		}
		want := func(health lb.Health, attempts int64) {
			t.Helper()
			if st := a.Status(); st.Health != health {
				t.Fatalf("health = %v (%s), want %v", st.Health, st.Reason, health)
			}
			if n := r.pool.Stats().Backends[0].Requests; n != attempts {
				t.Errorf("attempts = %d, want %d", n, attempts)
			}
		}
		tick(time.Second)
		want(lb.HealthEjected, 3)
		for i, n := range []int{1, 2, 3} { // each trial fails: 5 s, 10 s, 15 s, all ±10 %
			st := a.Status()
			length := st.Until.Sub(st.Since)
			if least, most := time.Duration(n)*4500*time.Millisecond, time.Duration(n)*5500*time.Millisecond; length < least || length > most {
				t.Errorf("ejection %d lasts %v, want %v to %v", n, length, least, most)
			}
			linger(time.Until(st.Until) + time.Millisecond)
			want(lb.HealthTrial, int64(3+i))
			tick(time.Second)
			want(lb.HealthEjected, int64(4+i))
		}
		r.backends[0].Set(lbtest.Answer())
		linger(time.Until(a.Status().Until) + time.Millisecond)
		tick(time.Second)
		if st := a.Status(); st.Health != lb.HealthUnknown || st.Reason != "answered a request" {
			t.Fatalf("health = %v (%s) after an answered trial", st.Health, st.Reason)
		}
		if n := strings.Count(logged.String(), "backend state changed"); n != 4+4+1 {
			t.Errorf("%d changes logged, want 9:\n%s", n, &logged)
		}
	})
}

// On trial a backend gets one request at a time, whoever else waits.
func TestTrialIsOneRequestAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Answer()})
		for range 10 {
			r.must("GET", "", nil)
		}
		r.backends[0].Set(lbtest.Delay(3 * time.Second))
		linger(6 * time.Second)
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() { r.do("GET", "", nil) })
		}
		wg.Wait()
		if n := r.backends[0].Count(); n != 1 {
			t.Errorf("the backend on trial got %d requests at once, want 1", n)
		}
		if h := r.pool.Backends()[0].Status().Health; h != lb.HealthUnknown {
			t.Errorf("health = %v after its answer", h)
		}
	})
}

// A trial that a client cuts short proves nothing and leaves room for the next.
func TestAbortedTrialFreesItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Answer()}, lb.WithBalancer(lb.BalancerFunc(first)))
		for range 10 {
			r.must("GET", "", nil)
		}
		r.backends[0].Set(lbtest.Hang())
		linger(6 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+frontAddr, nil)
		if _, err := r.client.Do(req); err == nil {
			t.Fatal("a hanging backend answered")
		}
		synctest.Wait()
		r.backends[0].Set(lbtest.Answer())
		a := r.must("GET", "", nil)
		if a.backend() != "a" {
			t.Errorf("served by %q, want the backend on trial", a.backend())
		}
		r.wantIdle()
	})
}

func first(_ *http.Request, candidates []*lb.Backend) *lb.Backend { return candidates[0] }

// Requests that cannot be given to another backend if they fail do not try one
// out, unless no others come.
func TestTrialPrefersRequestsThatCanBeRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Answer()}, lb.WithBalancer(lb.BalancerFunc(first)))
		for range 10 {
			r.must("GET", "", nil)
		}
		r.backends[0].Set(lbtest.Answer())
		linger(time.Until(r.pool.Backends()[0].Status().Until) + time.Millisecond)
		if a := r.must("POST", "", strings.NewReader("x")); a.backend() != "b" {
			t.Errorf("a POST tried the backend out")
		}
		linger(2 * time.Second)
		if a := r.must("POST", "", strings.NewReader("x")); a.backend() != "a" {
			t.Errorf("the backend still waits for a request to be tried with")
		}
	})
}

// A backend whose answers all break off goes too, though each begins well; and
// what it sent counts as its failure.
func TestCutAnswersEject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.ResetMidChunked(1000), lbtest.Answer()})
		cut := 0
		for range 20 {
			if a, err := r.do("GET", "", nil); err != nil || a.bodyErr != nil {
				cut++
			}
		}
		if cut != 3 {
			t.Errorf("%d answers were cut, want 3 until the backend is ejected", cut)
		}
		s := r.pool.Stats()
		if s.Cut != 3 || s.Backends[0].Failures != 3 || s.Backends[0].State != "ejected" {
			t.Errorf("cut = %d, failures = %d, state = %s", s.Cut, s.Backends[0].Failures, s.Backends[0].State)
		}
		r.wantIdle()
	})
}

// An ejected backend is the last resort of a request that every usable one has
// failed: B comes back while A, the last usable, dies.
func TestEjectedBackendIsTheLastResort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Answer(), lbtest.Refuse()})
		for range 10 {
			r.must("GET", "", nil)
		}
		if n := countState(r.pool, "ejected"); n != 1 {
			t.Fatalf("ejected = %d, want 1", n)
		}
		r.backends[0].Set(lbtest.Refuse())
		r.backends[1].Set(lbtest.Answer())
		for i := range 10 {
			r.wantStatus(r.must("POST", fmt.Sprint(i), strings.NewReader("x")), 200)
		}
		if n := countState(r.pool, "ejected"); n != 1 {
			t.Errorf("ejected = %d, want 1: the roles have changed", n)
		}
	})
}

// The operator's word and the health of a backend are told apart, and when no
// backend is usable the pool fails open but never to one that was taken out.
func TestStatesAndFailOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Answer(), lbtest.Answer()})
		names := []string{r.backends[0].URL(), r.backends[1].URL(), r.backends[2].URL()}
		for range 12 {
			r.must("GET", "", nil)
		}
		setState(t, r.pool, names[1], lb.Draining)
		setState(t, r.pool, names[2], lb.Disabled)
		s := r.pool.Stats()
		if got := s.Backends[0].State + " " + s.Backends[1].State + " " + s.Backends[2].State; got != "ejected draining disabled" || !s.FailOpen {
			t.Errorf("states = %s, fail open = %t", got, s.FailOpen)
		}
		before := r.backends[1].Count() + r.backends[2].Count()
		r.backends[0].Set(lbtest.Answer())
		for range 10 {
			if a := r.must("GET", "", nil); a.status != 200 || a.backend() != "a" {
				t.Errorf("answer = %d from %q, want 200 from the unusable one", a.status, a.backend())
			}
		}
		if after := r.backends[1].Count() + r.backends[2].Count(); after != before {
			t.Error("a draining or disabled backend got a request")
		}
		if r.pool.Stats().FailOpen {
			t.Error("the backend answered and is still held unusable")
		}
		setState(t, r.pool, names[0], lb.Disabled)
		a := r.must("GET", "", nil)
		r.wantStatus(a, 503)
		setState(t, r.pool, names[2], lb.Active)
		r.wantStatus(r.must("GET", "", nil), 200)
	})
}

func setState(t *testing.T, p *lb.Pool, name string, s lb.State) {
	t.Helper()
	if err := p.SetState(name, s); err != nil {
		t.Fatal(err)
	}
}

// A strategy that learns hears of each attempt once or twice, and its panics are
// its own.
func TestLearnerHearsOutcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &learner{Balancer: lb.BalancerFunc(first)}
		r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Answer()}, lb.WithBalancer(l), noEjection())
		r.wantStatus(r.must("GET", "", nil), 200)
		r.wantStatus(r.must("GET", "", nil), 200)
		l.mu.Lock()
		defer l.mu.Unlock()
		kinds := map[string]int{}
		for _, o := range l.heard {
			kinds[fmt.Sprintf("%s/%s/%s final=%t", o.Stage, o.Cause, o.Blame, o.Final)]++
		}
		want := map[string]int{"response/reset/backend final=false": 2, "body/none/none final=false": 2, "done/none/none final=true": 2}
		if fmt.Sprint(kinds) != fmt.Sprint(want) {
			t.Errorf("heard %v, want %v", kinds, want)
		}
		if n := r.pool.Stats().Panics; n != int64(len(l.heard)) {
			t.Errorf("panics = %d, want %d", n, len(l.heard))
		}
	})
}

type learner struct {
	lb.Balancer
	mu    sync.Mutex // guards the following
	heard []lb.Outcome
}

func (l *learner) Observe(_ *lb.Backend, o lb.Outcome) {
	l.mu.Lock()
	l.heard = append(l.heard, o)
	l.mu.Unlock()
	panic("learner")
}

// Stats is one JSON document with stable keys.
func TestStatsAsJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Answer()}, lb.WithName("shop"))
		for range 4 {
			r.must("GET", "", nil)
		}
		var got struct {
			Name     string
			Strategy string
			Requests int64
			Retries  int64
			Backends []map[string]any
		}
		b, err := json.Marshal(r.pool.Stats())
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if got.Name != "shop" || got.Strategy != "round-robin" || got.Requests != 4 || got.Retries != 2 {
			t.Errorf("stats = %s", b)
		}
		for _, key := range []string{"name", "url", "state", "since", "weight", "in_flight", "requests", "failures", "retries", "sent_bytes", "received_bytes", "last_error"} {
			if _, ok := got.Backends[0][key]; !ok {
				t.Errorf("backend lacks %q in %s", key, b)
			}
		}
		if got.Backends[0]["failures"] != 2.0 || got.Backends[1]["retries"] != 2.0 || got.Backends[1]["received_bytes"].(float64) < 100 {
			t.Errorf("backends = %s", b)
		}
	})
}
