package lb_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Faults of the caller's code and of its requests: none counts against a backend,
// ends the process or leaves anything behind.

// greedy is a RoundTripper that answers at once on host a and goes on to read the
// body, as the contract allows until the body is closed.
type greedy struct{ parts, whole atomic.Int64 }

const greedyBody = 4000

func (g *greedy) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host == "a" {
		go func() {
			io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r.Body}, make([]byte, 64))
			r.Body.Close()
		}()
		return &http.Response{StatusCode: 503, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
	}
	b, err := io.ReadAll(r.Body)
	r.Body.Close()
	if err != nil {
		return nil, err
	}
	if len(b) == greedyBody {
		g.whole.Add(1)
	} else {
		g.parts.Add(1)
	}
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
}

// inPieces reads at most size bytes at a time.
type inPieces struct {
	io.Reader
	size int
}

func (p inPieces) Read(b []byte) (int, error) { return p.Reader.Read(b[:min(len(b), p.size)]) }

// An attempt that reads on while the next one is decided on must not read past the
// cap in between: the next attempt would send the rest as if it were the whole.
func TestAttemptThatReadsOnIsFencedInTime(t *testing.T) {
	g := &greedy{}
	p := newPool(t, lb.Targets("http://a", "http://b"), noEjection(), lb.WithBalancer(lb.BalancerFunc(first)), lb.WithTransport(g),
		lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}, BaseDelay: -1, MaxReplayBytes: greedyBody / 2}))
	for i := range 10_000 {
		req, _ := http.NewRequest("PUT", "http://x/", stream{inPieces{strings.NewReader(text(greedyBody)), 512 + i%200}})
		if resp, err := p.RoundTrip(req); err == nil {
			resp.Body.Close()
		}
	}
	if g.parts.Load() > 0 || g.whole.Load() == 0 {
		t.Errorf("%d bodies arrived whole and %d in part, taken for whole", g.whole.Load(), g.parts.Load())
	}
}

// Trailers arrive with the attempt that is answered, and no attempt shares them
// with one before it.
func TestTrailersSurviveARetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		ok := lbtest.Handle(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			got = append(got, r.Trailer.Get("X-Sum"))
		}))
		r := newRig(t, []lbtest.Behavior{lbtest.ResetAfter(1024), ok}, noEjection(), lb.WithBalancer(lb.BalancerFunc(first)),
			lb.WithRetry(lb.RetryPolicy{BaseDelay: time.Second, MaxDelay: time.Second}))
		for range 20 {
			c := r.dial()
			fmt.Fprintf(c, "PUT / HTTP/1.1\r\nHost: x\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n%s\r\n", text(1024))
			linger(time.Millisecond)
			fmt.Fprint(c, "0\r\nX-Sum: abc\r\n\r\n")
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("answer = %v, %v", resp, err)
			}
			c.Close()
		}
		if s := strings.Join(got, ""); s != strings.Repeat("abc", 20) {
			t.Errorf("trailers = %q", got)
		}
	})
}

// Without retries the transport does not resend either, whatever the number of
// idle connections that it could try.
func TestTransportDoesNotResend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Delay(time.Second)}, noEjection(), lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
		for round, method := range []string{"GET", "HEAD", "OPTIONS", "POST"} {
			r.backends[0].Set(lbtest.Delay(time.Second))
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() { r.must("GET", "", nil) })
			}
			wg.Wait()
			r.backends[0].Set(lbtest.Reset())
			id := fmt.Sprint(round)
			r.wantStatus(r.must(method, id, nil, "Idempotency-Key", id), 502)
			if n := r.arrivals(id); n != 1 {
				t.Errorf("%s arrived %d times", method, n)
			}
		}
		r.wantIdle()
	})
}

// A retried answer shows that a backend was reached: when the next one refuses, the
// pool does not claim that there was nobody to ask.
func TestRefusalAfterARetriedAnswerIs502(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.AnswerStatus(504, "busy"), lbtest.Refuse()}, noEjection(),
			lb.WithBalancer(lb.BalancerFunc(first)), lb.WithRetry(lb.RetryPolicy{Attempts: 2, Statuses: []int{504}}))
		req, _ := http.NewRequest("GET", "http://x/", nil)
		_, err := r.pool.RoundTrip(req)
		if lb.StatusOf(err) != 502 || errors.Is(err, lb.ErrNoBackend) || asAttempt(t, err).Cause != lb.CauseRefused {
			t.Errorf("error = %v, status %d", err, lb.StatusOf(err))
		}
	})
}

// What the client does wrong after the answer has begun is not the backend's
// fault, although its connection breaks off for it.
func TestClientFaultsAfterTheAnswerBeganBlameNobody(t *testing.T) {
	for name, tt := range map[string]struct {
		wrap func(http.Handler) http.Handler
		rest string
	}{
		"broken chunk": {rest: "zz\r\n"},
		"over a limit": {rest: "10\r\n0123456789abcdef\r\n", wrap: func(h http.Handler) http.Handler { return http.MaxBytesHandler(h, 8) }},
	} {
		bubble(t, name, func(t *testing.T) {
			echo := lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				rc := http.NewResponseController(w)
				rc.EnableFullDuplex()
				w.WriteHeader(200)
				rc.Flush()
				io.Copy(w, r.Body)
			}))
			r := newRig(t, []lbtest.Behavior{echo, echo})
			if tt.wrap != nil {
				r.server.Handler = tt.wrap(r.pool)
			}
			for range 10 {
				c := r.dial()
				fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
				br := bufio.NewReader(c)
				if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != 200 {
					t.Fatalf("answer = %v, %v", resp, err)
				}
				fmt.Fprint(c, tt.rest)
				c.SetReadDeadline(time.Now().Add(time.Second)) // the server looks for the end of the body
				io.Copy(io.Discard, br)
				c.Close()
			}
			synctest.Wait()
			r.wantUnblamed()
			r.wantIdle()
		})
	}
}

// Requests that cannot be sent as they are fail at once, at nobody's expense.
func TestUnsendableRequestsBlameNobody(t *testing.T) {
	for name, req := range map[string]*http.Request{
		"length without body": {Method: "POST", Header: http.Header{}, ContentLength: 5},
		"no header":           {Method: "GET"},
		"bad method":          {Method: "G T", Header: http.Header{}},
		"bad field":           {Method: "GET", Header: http.Header{"Bad\nField": {"x"}}},
		"bad host":            {Method: "GET", Header: http.Header{}, Host: "a\xff\xfe.xn--zz"},
		"body too short":      {Method: "PUT", Header: http.Header{}, ContentLength: 10, Body: io.NopCloser(strings.NewReader("short"))},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, answers(2))
			req := req.Clone(t.Context())
			req.URL = &url.URL{Scheme: "http", Host: "x", Path: "/"}
			for range 4 {
				_, err := r.pool.RoundTrip(req)
				if err == nil || asAttempt(t, err).Blame != lb.BlameClient || lb.StatusOf(err) != 400 {
					t.Errorf("error = %v, status %d", err, lb.StatusOf(err))
				}
			}
			r.wantUnblamed()
			r.wantIdle()
		})
	}
}

// An answer that the forwarder cannot pass on, or that a middleware's writer panics
// over, is closed and counted down.
func TestAnswersThatCannotBePassedOnAreClosed(t *testing.T) {
	bubble(t, "status that is none", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Raw("HTTP/1.1 042 Odd\r\nContent-Length: 2\r\n\r\nhi")}, noEjection())
		for range 5 {
			r.wantStatus(r.must("GET", "", nil), 502)
		}
		if n := r.pool.Stats().Backends[0].Failures; n != 5 {
			t.Errorf("failures = %d, want 5", n)
		}
		r.wantIdle()
	})
	bubble(t, "writer that panics", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.AnswerStatus(200, text(200<<10))}, noEjection())
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r.pool.ServeHTTP(panickyWriter{w}, req)
		})
		for range 5 {
			r.do("GET", "", nil)
		}
		synctest.Wait()
		r.wantIdle()
	})
}

type panickyWriter struct{ http.ResponseWriter }

func (panickyWriter) Write([]byte) (int, error) { panic("writer") }

// Panics of the user's dialer, transport and body, and a dialer that returns
// nothing, fail the attempt and are counted.
func TestPanicsAroundAnAttemptAreContained(t *testing.T) {
	for name, template := range map[string]http.RoundTripper{
		"dialer panics": &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { panic("dial") }},
		"dialer returns nothing": &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, nil
		}},
		"proxy function panics": &http.Transport{Proxy: func(*http.Request) (*url.URL, error) { panic("proxy") }},
		"transport panics":      roundTripperFunc(func(*http.Request) (*http.Response, error) { panic("transport") }),
		"transport returns nothing": roundTripperFunc(func(*http.Request) (*http.Response, error) {
			return nil, nil
		}),
	} {
		bubble(t, name, func(t *testing.T) {
			p := newPool(t, lb.Targets("http://a"), lb.WithTransport(template))
			for range 5 {
				body := &closing{Reader: strings.NewReader("x")}
				req, _ := http.NewRequest("POST", "http://x/", body)
				if resp, err := p.RoundTrip(req); err == nil {
					t.Errorf("answer = %v", resp)
				}
				if !body.closed.Load() {
					t.Error("the body was not closed")
				}
			}
			s := p.Stats()
			if panics := strings.HasSuffix(name, "panics"); s.InFlight != 0 || panics != (s.Panics > 0) {
				t.Errorf("in flight = %d, panics = %d", s.InFlight, s.Panics)
			}
			if err := p.Shutdown(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	bubble(t, "body panics", func(t *testing.T) {
		r := newRig(t, answers(1))
		for range 5 {
			req, _ := http.NewRequest("PUT", "http://x/", panickyBody{})
			if _, err := r.pool.RoundTrip(req); err == nil || asAttempt(t, err).Blame != lb.BlameClient {
				t.Errorf("error = %v", err)
			}
		}
		synctest.Wait()
		if n := r.pool.Stats().Panics; n != 10 { // of Read and of Close
			t.Errorf("panics = %d, want 10", n)
		}
		r.wantIdle()
	})
}

type roundTripperFunc func(*http.Request) (*http.Response, error)

func (f roundTripperFunc) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

type panickyBody struct{}

func (panickyBody) Read([]byte) (int, error) { panic("read") }
func (panickyBody) Close() error             { panic("close") }

// Close returns although the Close of a request's body waits for its Read, as that
// of net/http's server does.
func TestCloseDoesNotWaitForABody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, answers(1))
		body := &lockedBody{wait: make(chan struct{})}
		var wg sync.WaitGroup
		wg.Go(func() {
			req, _ := http.NewRequest("PUT", "http://x/", body)
			if _, err := r.pool.RoundTrip(req); !errors.Is(err, lb.ErrClosed) {
				t.Errorf("error = %v", err)
			}
		})
		synctest.Wait()
		within(t, 2*time.Second, func() { r.pool.Close(); wg.Wait() })
		close(body.wait)
	})
}

type lockedBody struct {
	mu   sync.Mutex
	wait chan struct{}
}

func (b *lockedBody) Read([]byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	<-b.wait
	return 0, io.EOF
}

func (b *lockedBody) Close() error {
	<-b.wait
	return nil
}

// A template that net/http has prepared for HTTP/2 serves https all the same.
func TestTemplateThatOfferedHTTP2(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Proto) }))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	template := s.Client().Transport.(*http.Transport)
	for range 2 {
		template = template.Clone() // which prepares it
		p := newPool(t, lb.Targets(s.URL), lb.WithTransport(template))
		if got := serve(p, "/"); got.Code != 200 || got.Body.String() != "HTTP/1.1" {
			t.Errorf("answer = %d %q", got.Code, got.Body)
		}
	}
}

// A strategy never sees a candidate without a share, also while one loses it.
func TestCandidatesAlwaysHaveAShare(t *testing.T) {
	var bad atomic.Int64
	g := roundTripperFunc(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
	})
	p := newPool(t, lb.Targets("http://a", "http://b"), lb.WithTransport(g), lb.WithBalancer(lb.BalancerFunc(func(_ *http.Request, c []*lb.Backend) *lb.Backend {
		for _, b := range c {
			if b.Weight() < 1 {
				bad.Add(1)
			}
		}
		return c[0]
	})))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 3000 {
			if err := p.SetTargets([]lb.Target{{URL: "http://a", Weight: 3 - 4*(i%2)}, {URL: "http://b"}}); err != nil {
				t.Error(err)
			}
		}
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
			serve(p, "/")
		}
	}
	if n := bad.Load(); n != 0 {
		t.Errorf("%d candidates had no share", n)
	}
	if w := p.Stats().Backends[0].Weight; w != lb.NoWeight {
		t.Errorf("Stats show weight %d, want NoWeight", w)
	}
}

// A pool may be the transport of another one: each keeps to its own connections and
// attempts.
func TestPoolInsideAPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.ResetAfter(1024), lbtest.Answer()}, noEjection())
		outer := newPool(t, lb.Targets("http://inner"), lb.WithTransport(r.pool))
		r.server.Handler = outer
		body := text(20 << 10)
		for range 10 {
			r.stalledPut(body)
		}
		for _, got := range r.backends[1].Received() {
			if got.BodySHA256 != sha(body) {
				t.Errorf("%d of %d bytes arrived", got.BodyBytes, len(body))
			}
		}
		synctest.Wait()
		r.wantIdle()
		if n := outer.Stats().InFlight; n != 0 {
			t.Errorf("in flight in the outer pool = %d", n)
		}
	})
}

// A backend that cuts its answer while the upload still goes on is to blame, although
// the upload breaks off for it too.
func TestCutDuringAnUploadBlamesTheBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cut := lbtest.Raw("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome of it")
		r := newRig(t, []lbtest.Behavior{cut}, noEjection())
		for range 200 {
			body, upload := io.Pipe() // its Close ends a Read with an error
			req, _ := http.NewRequest("PUT", "http://x/", body)
			go io.WriteString(upload, "hello")
			resp, err := r.pool.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(resp.Body); err == nil {
				t.Error("the cut cannot be seen")
			}
			resp.Body.Close()
		}
		synctest.Wait()
		if s := r.pool.Stats(); s.Cut != 200 || s.Backends[0].Failures != 200 {
			t.Errorf("cut = %d, failures of the backend = %d, want 200 of both", s.Cut, s.Backends[0].Failures)
		}
		r.wantIdle()
	})
}

// A status that is no answer's is refused, whoever brings it.
func TestStatusThatIsNoAnswersIsRefused(t *testing.T) {
	for _, code := range []int{0, 99, 100, 103, 150, 199, 1000} {
		p := newPool(t, lb.Targets("http://a.test"), lb.WithTransport(roundTripperFunc(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("x"))}, nil
		})))
		w := httptest.NewRecorder()
		p.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		if w.Code != 502 {
			t.Errorf("status %d came out as %d, want 502", code, w.Code)
		}
	}
}
