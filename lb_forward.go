package lb

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync/atomic"
	"time"
)

// serving is one request on its way through ServeHTTP: a forwarder of net/http's for
// this request alone, so that what it leaves open can be closed.
type serving struct {
	proxy  httputil.ReverseProxy
	pool   *Pool
	in     *http.Request // as it came
	answer undelivered   // nil without one
}

// undelivered is the body of an answer that may not have been read to its end.
type undelivered interface{ abandon() }

func (p *Pool) serving(r *http.Request) *serving {
	s := &serving{pool: p, in: r}
	s.proxy = httputil.ReverseProxy{
		Rewrite:      rewrite,
		Transport:    s,
		BufferPool:   &p.memory,
		ErrorHandler: s.fail,
		ErrorLog:     p.silent, // what it would log is told by Outcome and error handler
	}
	return s
}

// RoundTrip is the pool's for requests that ServeHTTP has let in.
func (s *serving) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := s.pool.newCall(r, nil).run()
	if err == nil {
		s.answer, _ = resp.Body.(undelivered)
	}
	return resp, err
}

// fail is told that there is no answer to pass on. An error that is not from an
// attempt is the forwarder's own: an upgrade that cannot be carried out.
func (s *serving) fail(w http.ResponseWriter, _ *http.Request, err error) {
	if _, ok := errors.AsType[*AttemptError](err); !ok && !errors.Is(err, ErrNoBackend) && !errors.Is(err, ErrClosed) {
		err = fmt.Errorf("lb: %w", err)
		s.pool.totals.failed(err)
	}
	s.pool.fail(w, s.in, err)
}

// end closes an answer that was not passed on to its end: a writer that could not
// be taken over for an upgrade, or that panicked.
func (s *serving) end() {
	if s.answer != nil {
		s.answer.abandon()
	}
}

// forward passes r on and the answer back.
func (p *Pool) forward(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		w.Header().Set("Allow", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
		http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
		return
	}
	s := p.serving(r)
	defer s.end()
	if r.ContentLength == 0 || r.ProtoMajor != 1 {
		s.proxy.ServeHTTP(w, r)
		return
	}
	// Without full duplex the server takes the request's body for itself before it
	// writes the answer: an answer that comes early would wait for the upload, and
	// a 502 for a client that stalls. A writer that cannot do it, a recorder for
	// example, needs it not.
	_ = http.NewResponseController(w).EnableFullDuplex()
	body := newInbound(r.Body)
	r = r.WithContext(r.Context()) // a copy: the caller's keeps its body
	r.Body = body
	defer body.leave(w)
	s.proxy.ServeHTTP(w, r)
}

// inbound is the body of an HTTP/1.1 request as the server gives it, until the
// handler returns.
//
// A connection whose body was not read to its end must not carry another request.
// In full duplex the server looks for that end only after the handler has
// returned, and goes on to the next request whether it has found it or not: what
// is left of the body would be taken for requests, which a client could smuggle in
// that way. And when it does find the end, its watch for a client that leaves
// begins too late to be called off and collides with the reading of the next
// request.
type inbound struct {
	io.ReadCloser
	turn chan struct{} // full while a Read is under way
	left atomic.Bool   // the handler returns: no Read begins any more
	eof  atomic.Bool
}

func newInbound(body io.ReadCloser) *inbound {
	return &inbound{ReadCloser: body, turn: make(chan struct{}, 1)}
}

func (b *inbound) Read(p []byte) (int, error) {
	b.turn <- struct{}{}
	defer func() { <-b.turn }()
	if b.left.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.eof.Store(true)
	}
	return n, err
}

// leave ends the reading as the handler returns. A Read that waits for the client
// is woken by a deadline, which the server would do too, but not for one that is
// just about to begin.
func (b *inbound) leave(w http.ResponseWriter) {
	b.left.Store(true)
	select {
	case b.turn <- struct{}{}:
		<-b.turn
		if b.eof.Load() {
			return
		}
	default:
		// The deadline cancels the connection's context, so that it is of no use
		// any more even if the Read came to the end of the body just now.
		if http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) == nil {
			b.await()
		}
	}
	closeConnection(w)
}

// await returns when no Read is under way, or late: a middleware's body may not
// heed the deadline.
func (b *inbound) await() {
	t := time.NewTimer(closeGrace)
	defer t.Stop()
	select {
	case b.turn <- struct{}{}:
		<-b.turn
	case <-t.C:
	}
}

// closeConnection has the server close an HTTP/1.1 connection after the answer,
// also when its header has been written already. Nothing in net/http says so but
// a MaxBytesReader that is over its limit, and that waits a little, too, so that
// the client can read the answer before it sees the end.
func closeConnection(w http.ResponseWriter) {
	for w != nil {
		over := http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0)
		_, _ = over.Read(make([]byte, 1))
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return
		}
		w = u.Unwrap()
	}
}

// rewrite makes of the client's request what goes out to any backend.
func rewrite(pr *httputil.ProxyRequest) {
	setForwarded(pr.Out.Header, pr.In)
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery // as it came: nothing here parses it
	pr.Out.Trailer = pr.In.Trailer           // the server fills it in when the body has ended
}

// fail answers a request that got no backend's answer.
func (p *Pool) fail(w http.ResponseWriter, r *http.Request, err error) {
	switch StatusOf(err) {
	case StatusClientClosed:
		// Nobody reads this. It is for a middleware that logs statuses.
		w.WriteHeader(StatusClientClosed)
		return
	case http.StatusServiceUnavailable:
		setRetryAfter(w.Header(), p.retryAfter())
	}
	p.cfg.errorHandler(w, r, err)
}

// retryAfter is when it may be worth asking again, in whole seconds: when the
// first ejection ends, at least 1 and at most 30.
func (p *Pool) retryAfter() int {
	const soonest, latest = 1, 30
	seconds := math.Inf(1)
	now := time.Now()
	for _, b := range p.set.current.Load().all {
		if until := b.Status().Until; b.takesRequests() && !until.IsZero() {
			seconds = min(seconds, math.Ceil(until.Sub(now).Seconds()))
		}
	}
	if math.IsInf(seconds, 1) {
		return soonest
	}
	return int(min(max(seconds, soonest), latest))
}
