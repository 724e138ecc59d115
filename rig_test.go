package lb_test

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// rig is a pool between a client and fault backends, all on one in-memory
// network. In a synctest bubble it also finds leaks: the bubble does not end while
// a goroutine of it lives.
type rig struct {
	t        *testing.T
	net      *lbtest.Network
	backends []*lbtest.Backend
	pool     *lb.Pool
	server   *http.Server
	client   *http.Client
	own      bool          // over connections of the pool's own, also with -pooled
	errorLog *bytes.Buffer // of the server in front of the pool; read it after close
}

const frontAddr = "front.test:80"

// newRig starts a pool over one backend for each of behaviors, called a, b, c, …
// Close it within the bubble: the test's cleanup does.
func newRig(t *testing.T, behaviors []lbtest.Behavior, opts ...lb.Option) *rig {
	t.Helper()
	r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
	var urls []string
	for i, behavior := range behaviors {
		b := r.net.NewBackend(t, string(rune('a'+i)))
		b.Set(behavior)
		r.backends = append(r.backends, b)
		urls = append(urls, b.URL())
	}
	r.start(lb.Targets(urls...), opts...)
	return r
}

// pooled makes the tests' pools reach their backends over an http.Transport in place of
// connections of their own.
var pooled = flag.Bool("pooled", false, "reach backends over an http.Transport")

// byTransport is what to expect: own over connections of the pool's own, pooledly over
// an http.Transport.
func byTransport[T any](own, pooledly T) T {
	if *pooled {
		return pooledly
	}
	return own
}

// over makes a pool reach its backends over network.
func over(network *lbtest.Network) lb.Option {
	if *pooled {
		return lb.WithTransport(network.Transport())
	}
	return lb.WithDialer(network.DialContext)
}

func (r *rig) start(targets []lb.Target, opts ...lb.Option) {
	r.t.Helper()
	way := over(r.net)
	if r.own {
		way = lb.WithDialer(r.net.DialContext)
	}
	opts = append([]lb.Option{way}, opts...)
	pool, err := lb.New(targets, opts...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.pool = pool
	r.serve(pool)
	r.client = &http.Client{Transport: r.net.Transport()}
	r.t.Cleanup(func() {
		r.client.CloseIdleConnections()
		r.server.Close()
		r.pool.Close()
		advance(time.Second) // net/http lingers on connections whose request it cut
	})
}

func (r *rig) serve(h http.Handler) {
	r.t.Helper()
	ln, err := r.net.Listen(frontAddr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.server = &http.Server{Handler: h, ErrorLog: log.New(r.errorLog, "", 0)}
	go r.server.Serve(ln)
}

// reply is an answer read to its end.
type reply struct {
	status  int
	header  http.Header
	body    []byte
	bodyErr error
}

func (a reply) backend() string { return a.header.Get(lbtest.BackendHeader) }

// do sends a request to the pool. An id, if there is one, goes out as its
// Request-Id.
func (r *rig) do(method, id string, body io.Reader, fields ...string) (reply, error) {
	req, err := http.NewRequestWithContext(r.t.Context(), method, "http://"+frontAddr+"/", body)
	if err != nil {
		r.t.Fatal(err)
	}
	if id != "" {
		req.Header.Set(lbtest.RequestIDHeader, id)
	}
	for i := 0; i+1 < len(fields); i += 2 {
		req.Header.Set(fields[i], fields[i+1])
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, b, err}, nil
}

// must is do, for requests that have to be answered whole.
func (r *rig) must(method, id string, body io.Reader, fields ...string) reply {
	r.t.Helper()
	a, err := r.do(method, id, body, fields...)
	if err != nil || a.bodyErr != nil {
		r.t.Fatalf("%s %s: %v, %v", method, id, err, a.bodyErr)
	}
	return a
}

func (r *rig) wantStatus(a reply, want int) {
	r.t.Helper()
	if a.status != want {
		r.t.Errorf("status = %d %q, want %d", a.status, a.body, want)
	}
}

// arrivals is how often the request with that id reached any backend.
func (r *rig) arrivals(id string) int {
	n := 0
	for _, b := range r.backends {
		n += b.Arrivals(id)
	}
	return n
}

func (r *rig) count() int {
	n := 0
	for _, b := range r.backends {
		n += b.Count()
	}
	return n
}

// wantIdle checks that everything that was counted up has come down.
func (r *rig) wantIdle() {
	r.t.Helper()
	s := r.pool.Stats()
	if s.InFlight != 0 || s.ReplayBytes != 0 {
		r.t.Errorf("in flight = %d, replay bytes = %d, want 0 and 0", s.InFlight, s.ReplayBytes)
	}
	for _, b := range r.pool.Backends() {
		if b.InFlight() != 0 {
			r.t.Errorf("in flight on %s = %d, want 0", b.Name(), b.InFlight())
		}
	}
}

// wantUnblamed checks that nothing has counted against any backend.
func (r *rig) wantUnblamed() {
	r.t.Helper()
	for _, b := range r.pool.Stats().Backends {
		if b.Failures != 0 || b.State != "unknown" {
			r.t.Errorf("%s is blamed for %d failures, state %s: %s", b.Name, b.Failures, b.State, b.LastError)
		}
	}
}

// dial opens a raw connection to the pool's server.
func (r *rig) dial() net.Conn {
	r.t.Helper()
	c, err := r.net.DialContext(r.t.Context(), "tcp", frontAddr)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// bubble runs f in a bubble of virtual time.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

// linger lets virtual time pass on a goroutine that is not the test's, such as that of a
// handler. Outside of a bubble it panics: nobody waits in real time.
func linger(d time.Duration) {
	if time.Since(time.Unix(946684800, 0)) > 365*24*time.Hour { // when bubbles begin, and what they may take
		panic("linger: not in a bubble")
	}
	time.Sleep(d)
}

// advance lets virtual time pass and everything that follows from it happen. Outside of
// a bubble it panics: no test waits for real time in this way.
func advance(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func text(n int) string { return strings.Repeat("0123456789abcdef", n/16+1)[:n] }

func sha(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

// stream is a body whose length net/http does not know.
type stream struct{ io.Reader }

func streamOf(s string) io.Reader { return stream{strings.NewReader(s)} }

// noEjection turns passive health off, so that a test sees retries alone.
func noEjection() lb.Option { return lb.WithPassiveHealth(lb.PassiveHealth{Failures: -1}) }

// asAttempt finds the AttemptError in err.
func asAttempt(t *testing.T, err error) *lb.AttemptError {
	t.Helper()
	ae, ok := errors.AsType[*lb.AttemptError](err)
	if !ok {
		t.Fatalf("error %v (%T) holds no AttemptError", err, err)
	}
	return ae
}

// within runs f and checks that it takes at most d of virtual time.
func within(t *testing.T, d time.Duration, f func()) {
	t.Helper()
	began := time.Now()
	f()
	if took := time.Since(began); took > d {
		t.Errorf("took %v, want at most %v", took, d)
	}
}

// stalledPut uploads body with a pause after 2,000 bytes, during which a backend may
// reset, and wants 200.
func (r *rig) stalledPut(body string) {
	r.t.Helper()
	c := r.dial()
	defer c.Close()
	fmt.Fprintf(c, "PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body[:2000])
	advance(3 * time.Second)
	fmt.Fprint(c, body[2000:])
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || resp.StatusCode != 200 {
		r.t.Fatalf("answer = %v, %v", resp, err)
	}
}

func silentLog() *log.Logger { return log.New(io.Discard, "", 0) }
