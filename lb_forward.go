package lb

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// serving is one request on its way through ServeHTTP: out to a backend, and the
// answer back to the client.
type serving struct {
	pool   *Pool
	w      http.ResponseWriter
	in     *http.Request // as it came
	asked  *http.Request // the same, with its client in the context
	out    http.Request  // as it goes out to any backend
	body   inbound       // of an HTTP/1.1 request that has one
	duplex bool          // body is used
	call   call
	answer undelivered // nil without one

	client clientWriter

	replaced io.Closer // the body that a hook has put in the answer's place

	hints    sync.Mutex // held while an informational answer is passed on; guards the following
	answered bool       // no more of these
	panicked any        // what the writer panicked with
}

// undelivered is the body of an answer that may not have been read to its end.
type undelivered interface {
	// abandon ends it with why it was not, unless it has ended.
	abandon(Cause)
}

// forward passes r on and the answer back.
func (p *Pool) forward(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		w.Header().Set("Allow", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
		http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
		return
	}
	if !hasPath(r) {
		http.Error(w, "400 Bad Request: the target has no path", http.StatusBadRequest)
		return
	}
	s := &serving{pool: p, w: w, in: r}
	defer s.end()
	s.prepare()
	resp, err := s.call.init(p, &s.out, nil).run()
	if err == nil {
		s.answer, _ = resp.Body.(undelivered)
	}
	s.noMoreHints()
	if err != nil {
		p.fail(w, s.asked, err)
		return
	}
	if hook := p.cfg.modify; hook != nil {
		if err := s.modify(hook, resp); err != nil {
			s.failHere(err)
			return
		}
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		s.tunnel(resp)
		return
	}
	s.deliver(resp)
}

// hasPath tells whether r asks for something that has a path, or for nothing in particular
// as only OPTIONS does. What net/http reads as a URL without one, such as a:b, must not
// become a request for /. So the preface of HTTP/2 is refused, too.
func hasPath(r *http.Request) bool {
	return r.URL.Opaque == "" && (r.URL.Path != "*" || r.Method == http.MethodOptions)
}

// prepare makes of the client's request what goes out to any backend.
func (s *serving) prepare() {
	believed := false
	s.out, s.asked = *s.in, s.in
	if trust := &s.pool.cfg.trust; !trust.none() {
		var client netip.Addr
		client, believed = trust.client(s.in)
		s.asked = s.in.WithContext(withClient(s.in.Context(), client))
		s.out = *s.asked
	}
	out := &s.out
	out.Header = s.pool.cfg.requestHeader(s.in, upgradeOf(s.in, s.pool.cfg.upgrades.Protocols), believed)
	out.Close = false
	s.call.original, s.call.asked = s.in, s.asked
	if out.Header["Expect"] == nil {
		// Else the server writes a 100 Continue by itself when the body is first read,
		// under a lock that the writer of another hint cannot take: the two would mix.
		s.call.hint = s.hint
	}
	switch {
	case s.in.ContentLength == 0 || s.in.Body == http.NoBody:
		out.Body = nil
	case s.in.ProtoMajor == 1 && s.in.Body != nil:
		// Without full duplex the server takes the request's body for itself before it
		// writes the answer: an answer that comes early would wait for the upload, and
		// a 502 for a client that stalls. A writer that cannot do it, a recorder for
		// example, needs it not.
		_ = http.NewResponseController(s.w).EnableFullDuplex()
		s.body.ReadCloser = s.in.Body
		s.duplex, out.Body = true, &s.body
	}
}

// rawTarget is the path of a URL byte for byte as it came, empty if that is how net/http
// writes it anyway: of some paths it would make others. A middleware that has changed the
// path has its way: RawPath counts only while it stands for Path.
func rawTarget(u *url.URL) string {
	if u.RawPath == "" || strings.ContainsAny(u.RawPath, "? ") {
		return ""
	}
	if path, err := url.PathUnescape(u.RawPath); err != nil || path != u.Path {
		return ""
	}
	return u.RawPath
}

// end closes what may still be open when the handler returns, or panics: the body of
// the request, and an answer that was not passed on to its end.
func (s *serving) end() {
	s.hints.Lock()
	s.answered = true
	s.hints.Unlock()
	if s.answer != nil {
		s.answer.abandon(CauseNone)
	}
	if s.replaced != nil {
		defer s.replaced.Close()
	}
	if s.duplex {
		s.body.leave(s.w)
	}
}

// hint passes an informational answer on. It is called by the transport, maybe on a
// goroutine of its own.
func (s *serving) hint(code int, header textproto.MIMEHeader) error {
	s.hints.Lock()
	defer s.hints.Unlock()
	if s.answered || !s.in.ProtoAtLeast(1, 1) {
		return nil
	}
	defer func() {
		if v := recover(); v != nil { // of a middleware's writer
			s.answered, s.panicked = true, v
		}
	}()
	h := s.w.Header()
	before := maps.Clone(h)
	copyHeader(h, http.Header(header))
	s.w.WriteHeader(code)
	clear(h) // its fields are not those of the answer
	maps.Copy(h, before)
	return nil
}

// noMoreHints ends them. What the writer has panicked with in one goes on here, where
// the server expects it.
func (s *serving) noMoreHints() {
	s.hints.Lock()
	defer s.hints.Unlock()
	s.answered = true
	if v := s.panicked; v != nil {
		panic(v)
	}
}

// deliver passes the answer on.
func (s *serving) deliver(resp *http.Response) {
	h := s.w.Header()
	s.call.hideBackend(resp)
	if via := s.pool.cfg.via; via != "" {
		addVia(resp.Header, resp.ProtoMajor, resp.ProtoMinor, via)
	}
	copyHeader(h, resp.Header)
	if resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified {
		delete(h, "Content-Length") // as net/http's server does for HTTP/1.1, but not for HTTP/2
	}
	if len(h["Content-Type"]) == 0 {
		h["Content-Type"] = nil // or the server guesses one
	}
	maps.DeleteFunc(resp.Trailer, func(name string, _ []string) bool { return !mayTrail(name) })
	announced := slices.Collect(maps.Keys(resp.Trailer))
	for _, name := range announced {
		h.Add("Trailer", name)
	}
	out := &s.client
	out.begin(s.w, s.pool.cfg.timeouts.ClientWrite)
	defer out.end()
	s.w.WriteHeader(resp.StatusCode)
	if cause := s.copyBody(resp); cause != CauseNone {
		s.answer.abandon(cause)
		s.cut()
		return
	}
	if len(resp.Trailer) > 0 { // those that were not announced too
		maps.DeleteFunc(resp.Trailer, func(name string, _ []string) bool { return !mayTrail(name) })
		s.trailers(resp.Trailer, announced)
	}
}

// copyBody passes the answer's body on, and returns why it could not be passed on to
// its end: CauseReset if it broke off, CauseClientGone if nobody takes it.
func (s *serving) copyBody(resp *http.Response) Cause {
	if resp.Body == http.NoBody || s.in.Method == http.MethodHead {
		return CauseNone
	}
	out := &s.client
	streams := resp.ContentLength < 0 || isEventStream(resp.Header)
	if streams && !out.flush() { // the header goes ahead
		return CauseClientGone
	}
	buf := s.pool.memory.Get()
	defer s.pool.memory.Put(buf)
	if !streams {
		out.flushSoon()
	}
	for written := int64(0); ; {
		n, errRead := resp.Body.Read(buf)
		out.notSoon()
		written += int64(n)
		if n > 0 && !out.write(buf[:n]) {
			return CauseClientGone
		}
		// What comes in small pieces is to arrive in them.
		if n > 0 && (streams || n < len(buf) && written < resp.ContentLength) && !out.flush() {
			return CauseClientGone
		}
		switch {
		case errRead == io.EOF:
			return CauseNone
		case errRead != nil:
			return CauseReset
		}
	}
}

// headerPatience is how long the header of an answer waits for the first of its body, to
// be sent together with it.
const headerPatience = 10 * time.Millisecond

// clientWriter writes an answer's body, each piece within its time.
type clientWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	limit   time.Duration // Timeouts.ClientWrite; zero for none

	late     *time.Timer // flushes the header; nil if none is to
	mu       sync.Mutex  // guards the following, and the writer while late may fire
	over     bool        // late has nothing to do any more
	panicked any         // what it panicked with
}

// begin lets go of the server's time-outs, which are for the whole of an exchange, if
// there is a limit for each write. Errors are of writers that know no deadlines.
func (c *clientWriter) begin(w http.ResponseWriter, limit time.Duration) {
	c.w, c.control, c.limit = w, http.NewResponseController(w), limit
	if c.limit > 0 {
		_ = c.control.SetReadDeadline(time.Time{})
	}
}

// end sends what is left under the last deadline, which it lets go of then: the
// connection may have a next request.
func (c *clientWriter) end() {
	c.notSoon()
	if c.limit > 0 {
		c.flush()
		_ = c.control.SetWriteDeadline(time.Time{})
	}
}

// hurry sets the deadline of what is written next.
func (c *clientWriter) hurry() {
	if c.limit > 0 {
		_ = c.control.SetWriteDeadline(time.Now().Add(c.limit))
	}
}

// flushSoon sends what was written, unless notSoon is called before.
func (c *clientWriter) flushSoon() {
	c.late = time.AfterFunc(headerPatience, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.over {
			return
		}
		defer func() { c.panicked = recover() }() // of a middleware's writer
		c.flush()
	})
}

func (c *clientWriter) notSoon() {
	if c.late == nil {
		return
	}
	c.late.Stop()
	c.late = nil
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	if c.panicked != nil {
		panic(c.panicked) // where the server expects it
	}
}

// write tells whether p could be written.
func (c *clientWriter) write(p []byte) bool {
	c.hurry()
	_, err := c.w.Write(p)
	return err == nil
}

// flush tells whether what was written could be sent. A writer that cannot flush has
// its own time for that.
func (c *clientWriter) flush() bool {
	c.hurry()
	err := c.control.Flush()
	return err == nil || errors.Is(err, http.ErrNotSupported)
}

// isEventStream tells whether each event is to be passed on at once (HTML Living
// Standard, server-sent events), whatever its length.
func isEventStream(h http.Header) bool {
	mediaType, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.EqualFold(textproto.TrimString(mediaType), "text/event-stream")
}

// trailers sends the fields that came after the body. Those that were not announced
// are marked as net/http asks for.
func (s *serving) trailers(trailer http.Header, announced []string) {
	s.client.flush() // or a short answer would go out without trailers
	h := s.w.Header()
	for name, values := range trailer {
		if !slices.Contains(announced, name) {
			name = http.TrailerPrefix + name
		}
		h[name] = values
	}
}

// cut makes the client see that the answer is not whole: the server ends the
// connection, or the stream. Without a server there is nobody to tell.
func (s *serving) cut() {
	if s.in.Context().Value(http.ServerContextKey) != nil {
		panic(http.ErrAbortHandler)
	}
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

// failHere is fail for an error that is not from an attempt.
func (s *serving) failHere(err error) {
	err = fmt.Errorf("lb: %w", err)
	s.pool.totals.failed(err)
	s.pool.fail(s.w, s.asked, err)
}

var errNoTunnel = errors.New("connection of the client cannot be taken over for an upgrade")

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
