package lb

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httputil"
	"time"
)

// serving is one request on its way through ServeHTTP: a forwarder of net/http's for
// this request alone, so that what it leaves open can be closed.
type serving struct {
	proxy  httputil.ReverseProxy
	pool   *Pool
	in     *http.Request // as it came
	duplex bool          // HTTP/1.1 with a body, which goes through body
	body   inbound
	call   call
	answer undelivered // nil without one
}

// undelivered is the body of an answer that may not have been read to its end.
type undelivered interface{ abandon() }

func (p *Pool) serving(r *http.Request) *serving {
	s := &serving{pool: p, in: r}
	s.proxy = httputil.ReverseProxy{
		Rewrite:      s.rewrite,
		Transport:    s,
		BufferPool:   &p.memory,
		ErrorHandler: s.fail,
		ErrorLog:     p.silent, // what it would log is told by Outcome and error handler
	}
	return s
}

// RoundTrip is the pool's for requests that ServeHTTP has let in.
func (s *serving) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := s.call.init(s.pool, r, nil).run()
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
	s.duplex = true
	defer s.body.leave(w)
	s.proxy.ServeHTTP(w, r)
}

// rewrite makes of the client's request what goes out to any backend.
func (s *serving) rewrite(pr *httputil.ProxyRequest) {
	if s.duplex {
		s.body.ReadCloser = pr.Out.Body
		pr.Out.Body = &s.body
	}
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
// first backend may be back, at least 1 and at most 30.
func (p *Pool) retryAfter() int {
	const soonest, latest = 1, 30
	seconds := math.Inf(1)
	now := time.Now()
	for _, b := range p.set.current.Load().all {
		if back := b.mayReturn(); b.takesRequests() && !back.IsZero() {
			seconds = min(seconds, math.Ceil(back.Sub(now).Seconds()))
		}
	}
	if math.IsInf(seconds, 1) {
		return soonest
	}
	return int(min(max(seconds, soonest), latest))
}
