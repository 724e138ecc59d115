package lb_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// script is one request and what each backend will do with it.
type script struct {
	id      string
	method  string
	keyed   bool // carries an Idempotency-Key
	chunked bool
	body    string
	stalls  bool // the client pauses in mid-body
	acts    map[string]string
}

// saw is what the client saw of the answer.
type saw struct {
	hints   []string // the Link of each 103
	status  int
	backend string
	body    string
	err     error // of the exchange or of the body
}

const (
	lawsReplayLimit = 4 << 10
	lawsAnswerBytes = 3000
)

// acts are what a backend can do with a request, by name. Each that answers fills
// its answer with its own name, so that mixtures can be seen.
func acts(name string) map[string]lbtest.Behavior {
	answer := func(status int, hint, readFirst, cut bool) lbtest.Behavior {
		return lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if hint {
				w.Header().Set("Link", name)
				w.WriteHeader(http.StatusEarlyHints)
			}
			if readFirst {
				if _, err := io.Copy(io.Discard, r.Body); err != nil {
					panic(http.ErrAbortHandler)
				}
			} else {
				http.NewResponseController(w).EnableFullDuplex()
			}
			w.Header().Set(lbtest.BackendHeader, name)
			w.WriteHeader(status)
			io.WriteString(w, strings.Repeat(name, lawsAnswerBytes/2))
			http.NewResponseController(w).Flush()
			if cut {
				panic(http.ErrAbortHandler)
			}
			io.WriteString(w, strings.Repeat(name, lawsAnswerBytes/2))
		}))
	}
	return map[string]lbtest.Behavior{
		"ok":             answer(200, false, true, false),
		"ok, hinted":     answer(200, true, true, false),
		"early ok":       answer(200, false, false, false),
		"busy":           answer(503, false, true, false),
		"busy, hinted":   answer(503, true, true, false),
		"early busy":     answer(503, false, false, false),
		"cut":            answer(200, false, true, true),
		"cut busy":       answer(503, false, true, true),
		"reset at once":  lbtest.ResetAfter(0),
		"reset in body":  lbtest.ResetAfter(1000),
		"reset at cap":   lbtest.ResetAfter(lawsReplayLimit),
		"reset past cap": lbtest.ResetAfter(lawsReplayLimit + 1000),
		"reset":          lbtest.Reset(),
		"hang":           lbtest.Hang(),
	}
}

// scripted does what the request's header says for this backend.
func scripted(name string) lbtest.Behavior {
	all := acts(name)
	behavior := lbtest.Answer()
	for act, do := range all {
		behavior = lbtest.When(func(r *http.Request) bool { return r.Header.Get("Act-"+name) == act }, do, behavior)
	}
	return behavior
}

func randomScript(rng *rand.Rand, id string, backends []string) script {
	names := slices.Sorted(func(yield func(string) bool) {
		for name := range acts("") {
			if !yield(name) {
				return
			}
		}
	})
	s := script{id: id, acts: map[string]string{}, chunked: rng.IntN(2) == 0, keyed: rng.IntN(4) == 0, stalls: rng.IntN(8) == 0}
	s.method = []string{"GET", "PUT", "POST", "DELETE", "PATCH"}[rng.IntN(5)]
	if s.method != "GET" {
		sizes := []int{0, 1, 999, lawsReplayLimit - 1, lawsReplayLimit, lawsReplayLimit + 1, 5 * lawsReplayLimit}
		s.body = text(sizes[rng.IntN(len(sizes))])
	}
	for _, b := range backends {
		s.acts[b] = names[rng.IntN(len(names))]
	}
	return s
}

func (s *script) repeatable() bool { return s.keyed || (s.method != "POST" && s.method != "PATCH") }

// run sends the script's request and reads the answer.
func (s *script) run(r *rig) (got saw) {
	var body io.Reader
	if s.method != "GET" {
		body = strings.NewReader(s.body)
		if s.stalls && len(s.body) > 1 {
			half := len(s.body) / 2
			body = io.MultiReader(strings.NewReader(s.body[:half]), pause(700*time.Millisecond), strings.NewReader(s.body[half:]))
		}
	}
	ctx := httptrace.WithClientTrace(r.t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			got.hints = append(got.hints, h.Get("Link"))
			return nil
		},
	})
	req, err := http.NewRequestWithContext(ctx, s.method, "http://"+frontAddr, body)
	if err != nil {
		r.t.Fatal(err)
	}
	if body != nil && !s.chunked {
		req.ContentLength = int64(len(s.body))
	}
	req.Header.Set(lbtest.RequestIDHeader, s.id)
	if s.keyed {
		req.Header.Set("Idempotency-Key", s.id)
	}
	for b, act := range s.acts {
		req.Header.Set("Act-"+b, act)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		got.err = err
		return got
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	got.status, got.backend, got.body, got.err = resp.StatusCode, resp.Header.Get(lbtest.BackendHeader), string(b), err
	return got
}

// pause is a reader of nothing that takes a while.
type pause time.Duration

func (p pause) Read([]byte) (int, error) {
	linger(time.Duration(p)) // virtual
	return 0, io.EOF
}

// TestLawsHoldForRandomScripts sends thousands of requests of every shape to
// backends that do everything wrong, and checks what must hold whatever happens.
func TestLawsHoldForRandomScripts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for round := range 12 {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, uint64(round)))
			names := []string{"a", "b", "c", "d"}[:1+rng.IntN(4)]
			var behaviors []lbtest.Behavior
			for _, name := range names {
				behaviors = append(behaviors, scripted(name))
			}
			r := newRig(t, behaviors, noEjection(),
				lb.WithTimeouts(lb.Timeouts{ResponseHeader: 300 * time.Millisecond}),
				lb.WithRetry(lb.RetryPolicy{Attempts: 1 + rng.IntN(4), Statuses: []int{503}, MaxReplayBytes: lawsReplayLimit}))
			records := &recorder{next: r.pool}
			r.server.Handler = records
			var wg sync.WaitGroup
			for worker := range 8 {
				scripts := make([]script, 40)
				for i := range scripts {
					scripts[i] = randomScript(rng, fmt.Sprintf("%d-%d", worker, i), names)
				}
				wg.Go(func() {
					for i := range scripts {
						got := scripts[i].run(r)
						checkAnswer(t, &scripts[i], &got)
						checkAttempts(t, r, &scripts[i], &got, records.of(scripts[i].id))
					}
				})
			}
			wg.Go(func() { disturb(r, rng.Uint64(), 20) })
			wg.Wait()
			linger(5 * time.Second) // readers of stalled bodies come to their end
			checkBodies(t, r)
			r.wantIdle()
		})
		if t.Failed() {
			t.Fatalf("round %d of seed %d", round, seed)
		}
	}
}

// disturb has backends refuse and close connections, one at a time.
func disturb(r *rig, seed uint64, times int) {
	rng := rand.New(rand.NewPCG(seed, 0))
	for range times {
		i := rng.IntN(len(r.backends))
		r.backends[i].Set([]lbtest.Behavior{lbtest.Refuse(), lbtest.CloseReused()}[rng.IntN(2)])
		linger(time.Duration(rng.IntN(200)) * time.Millisecond)
		r.backends[i].Set(scripted(r.backends[i].Name()))
		linger(time.Duration(rng.IntN(200)) * time.Millisecond)
	}
}

// recorder keeps the pool's record of each request.
type recorder struct {
	next    http.Handler
	records sync.Map // request id → *lb.RequestRecord
}

func (m *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, rec := lb.Record(r.Context())
	m.records.Store(r.Header.Get(lbtest.RequestIDHeader), rec)
	m.next.ServeHTTP(w, r.WithContext(ctx))
}

func (m *recorder) of(id string) []lb.AttemptRecord {
	rec, ok := m.records.Load(id)
	if !ok {
		return nil
	}
	return rec.(*lb.RequestRecord).Attempts()
}

// checkAnswer holds an answer to laws 1 and 3: it is one backend's alone, and
// whole unless the client can see that it is not.
func checkAnswer(t *testing.T, s *script, got *saw) {
	t.Helper()
	if got.backend == "" || got.err != nil && got.body == "" {
		return // the pool's own reply, or none at all
	}
	if strings.HasPrefix(got.body, "{") {
		return // lbtest.CloseReused answered while the backends were disturbed
	}
	if strings.Trim(got.body, got.backend) != "" {
		t.Errorf("%s: the body from %s holds something else: %.60q", s.id, got.backend, got.body)
	}
	act := s.acts[got.backend]
	if whole := len(got.body) == 2*(lawsAnswerBytes/2); got.err == nil && (!whole || strings.HasPrefix(act, "cut")) {
		t.Errorf("%s: %d bytes from %s (%s) look like a whole answer", s.id, len(got.body), got.backend, act)
	}
}

// checkAttempts holds the attempts to laws 1 (hints of the first alone), 2 and 3.
func checkAttempts(t *testing.T, r *rig, s *script, got *saw, attempts []lb.AttemptRecord) {
	t.Helper()
	arrived := r.arrivals(s.id)
	if !s.repeatable() && arrived > 1 {
		t.Errorf("%s: %s arrived %d times", s.id, s.method, arrived)
	}
	if got.backend != "" && len(attempts) > 0 && attempts[len(attempts)-1].Backend != r.backend(got.backend).URL() {
		t.Errorf("%s: answered by %s, but the last attempt was on %s", s.id, got.backend, attempts[len(attempts)-1].Backend)
	}
	for _, hint := range got.hints {
		if len(attempts) > 0 && r.backend(hint).URL() != attempts[0].Backend {
			t.Errorf("%s: early hint of %s, but the first attempt was on %s", s.id, hint, attempts[0].Backend)
		}
	}
	for i, a := range attempts {
		if a.Outcome.Blame == lb.BlameClient {
			t.Errorf("%s: attempt %d of %d blames the client: %v, %s of %d bytes stalls %t chunked %t, %v, saw %d %q %v", s.id, i+1, len(attempts), a.Outcome, s.method, len(s.body), s.stalls, s.chunked, s.acts, got.status, got.backend, got.err)
		}
	}
}

func (r *rig) backend(name string) *lbtest.Backend {
	for _, b := range r.backends {
		if b.Name() == name {
			return b
		}
	}
	r.t.Fatalf("no backend %q", name)
	return nil
}

// checkBodies checks that no backend took a part of a body for a whole one.
func checkBodies(t *testing.T, r *rig) {
	t.Helper()
	hashes := map[string]bool{}
	for _, n := range []int{0, 1, 999, lawsReplayLimit - 1, lawsReplayLimit, lawsReplayLimit + 1, 5 * lawsReplayLimit} {
		hashes[sha(text(n))] = true
	}
	for _, b := range r.backends {
		for _, got := range b.Received() {
			if got.BodySHA256 != "" && got.BodyErr == nil && !hashes[got.BodySHA256] {
				t.Errorf("%s took %d bytes for the whole body of %s", b.Name(), got.BodyBytes, got.Header.Get(lbtest.RequestIDHeader))
			}
		}
	}
}
