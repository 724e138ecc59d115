package lb

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// attemptKey finds the attempt in the context of its dial.
type attemptKey struct{}

// attempt is one try of one request on one backend. It is also the context of
// that try: the request's own, but with a client trace of the attempt in place of
// the caller's. It passes on what it hears but the 1xx answers of attempts that were
// discarded, which httputil.ReverseProxy, for one, would give to the client.
type attempt struct {
	context.Context
	call    *call
	backend *Backend
	number  int
	began   time.Time
	wait    time.Duration // until the answer's headers came
	epoch   uint32        // of the backend's health
	trial   bool          // holds the backend's one request on trial
	caller  *httptrace.ClientTrace
	trace   httptrace.ClientTrace
	body    *attemptBody // nil without a body
	ownBody attemptBody
	url     url.URL
	answer  answer

	ended    atomic.Bool // nothing of it reaches the client any more
	finished atomic.Bool // counted down

	mu     sync.Mutex // guards the following, which the transport's goroutines write
	dials  int        // dials that ended
	dialed bool       // one of them well
	taken  taken
	before int64     // bytes sent on connections that the transport gave up by itself
	opaque bool      // a connection was not ours: its bytes are not known
	stale  bool      // the answer had come before the request went out
	asked  time.Time // when the transport began to wait for a 100 Continue; zero: it does not
	agreed bool      // which has come
}

// taken is the connection that carries an attempt, and its counters' state when
// the attempt got it.
type taken struct {
	conn           *countedConn
	sent, received int64
	reused         bool // it or one before it had carried another request
	idled          bool // it has

	over                     bool // the connection has gone on to another attempt
	sentAfter, receivedAfter int64
}

// moved is how many bytes the connection moved for the attempt.
func (t *taken) moved() (sent, received int64) {
	switch {
	case t.conn == nil:
		return 0, 0
	case t.over:
		return t.sentAfter, t.receivedAfter
	}
	return t.conn.sent.Load() - t.sent, t.conn.received.Load() - t.received
}

// begin starts an attempt on b, for which pick has reserved a place.
func (c *call) begin(p picked) *attempt {
	c.attempts++
	a := &c.first // most requests have one attempt: it needs no allocation of its own
	if c.attempts > 1 {
		a = new(attempt)
	}
	a.Context, a.call, a.backend, a.number = c.in.Context(), c, p.backend, c.attempts
	a.began, a.epoch, a.trial = time.Now(), p.epoch, p.trial
	a.caller = httptrace.ContextClientTrace(a.Context)
	if a.caller != nil {
		a.trace = *a.caller
	}
	if p.backend.conns.owned { // else the connections may be another pool's
		a.trace.GotConn = a.gotConn
		a.trace.GotFirstResponseByte = a.gotFirstByte
	}
	a.trace.Got1xxResponse = nil
	if c.hint != nil || a.caller != nil && a.caller.Got1xxResponse != nil {
		a.trace.Got1xxResponse = a.got1xx
	}
	if p.backend.conns.owned && c.body != nil && c.in.Header["Expect"] != nil {
		a.trace.Wait100Continue, a.trace.Got100Continue = a.wait100, a.got100
	}
	p.backend.begin(a.number)
	return a
}

// Value shows the attempt's client trace in place of the caller's, and the attempt
// to its dial.
func (a *attempt) Value(key any) any {
	switch key {
	case attemptKey{}:
		return a
	case backendKey{}:
		return a.backend
	}
	v := a.Context.Value(key)
	if _, ok := v.(*httptrace.ClientTrace); ok {
		return &a.trace
	}
	return v
}

// do sends the request and returns the answer's headers, or why there are none.
func (a *attempt) do() (*http.Response, Outcome) {
	req := a.outgoing()
	if hook := a.call.pool.cfg.rewrite; hook != nil {
		if err := a.rewrite(hook, req); err != nil {
			a.end()
			return nil, a.outcome(err)
		}
	}
	conns := a.backend.conns
	rt := conns.plain
	if req.Header.Get("Upgrade") != "" {
		rt = conns.upgrade
	}
	resp, err := a.roundTrip(rt, req)
	if err == nil {
		if err = a.checkAnswer(req, resp); err != nil {
			resp.Body.Close()
		}
	}
	if err != nil {
		a.end()
		return nil, a.outcome(err)
	}
	o := a.outcome(nil)
	o.Status = resp.StatusCode
	a.wait = o.Wait
	return resp, o
}

// checkAnswer finds what net/http lets through and a server cannot pass on.
func (a *attempt) checkAnswer(req *http.Request, resp *http.Response) error {
	switch code := resp.StatusCode; {
	case a.isStale():
		return errUnasked
	case code < 200 && code != http.StatusSwitchingProtocols || code > 999:
		return fmt.Errorf("%w: status %d", errBadAnswer, code)
	case code == http.StatusSwitchingProtocols && !switchesAsAsked(req, resp):
		return fmt.Errorf("%w: switched to %q, which was not asked for", errBadAnswer, resp.Header.Get("Upgrade"))
	}
	return nil
}

// switchesAsAsked tells whether a 101 answer names a protocol that the request has
// offered (RFC 9110, section 7.8).
func switchesAsAsked(req *http.Request, resp *http.Response) bool {
	to := resp.Header.Get("Upgrade")
	for offered := range strings.SplitSeq(req.Header.Get("Upgrade"), ",") {
		if to != "" && strings.EqualFold(strings.TrimSpace(offered), to) {
			return true
		}
	}
	return false
}

// roundTrip calls rt, which may be the user's, or call what is: it may panic or
// return nothing.
func (a *attempt) roundTrip(rt http.RoundTripper, r *http.Request) (resp *http.Response, err error) {
	defer func() {
		if v := recover(); v != nil {
			a.call.pool.set.panics.caught("the RoundTripper", v)
			resp, err = nil, fmt.Errorf("transport panicked: %v", v)
		}
	}()
	resp, err = rt.RoundTrip(r)
	if err != nil {
		_ = err.Error() // if that panics, as that of a nil pointer does, it is to do so here
	}
	return checkRoundTrip(resp, err)
}

// checkRoundTrip makes of what a RoundTripper returned an answer with a body or an
// error.
func checkRoundTrip(resp *http.Response, err error) (*http.Response, error) {
	switch {
	case err != nil && resp != nil && resp.Body != nil:
		resp.Body.Close()
		return nil, err
	case err == nil && (resp == nil || resp.Body == nil):
		return nil, errNoAnswer
	}
	return resp, err
}

// outgoing is the request as this backend gets it. Its header is the caller's
// own: nobody writes to it.
func (a *attempt) outgoing() *http.Request {
	in, e := a.call.in, &a.backend.endpoint
	ctx := context.Context(a)
	if a.caller == nil {
		ctx = httptrace.WithClientTrace(a, &a.trace)
	}
	out := in.WithContext(ctx)
	a.url = e.join(in.Method, in.URL)
	if target := a.call.target; target != "" && a.backend.conns.raw {
		if target[0] != '/' {
			target = "/" + target
		}
		if raw := e.rawPrefix + target; !strings.HasPrefix(raw, "//") {
			a.url.Opaque = raw // which net/http writes as it is
		}
	}
	out.URL = &a.url
	out.RequestURI = ""
	out.GetBody = nil // with it, net/http would send the body again by itself
	switch e.sendHost {
	case "":
		if out.Host == "" {
			out.Host = in.URL.Host
		}
	case HostFromURL:
		out.Host = e.host
	default:
		out.Host = e.sendHost
	}
	if r := a.call.body; r != nil {
		a.ownBody = attemptBody{replay: r, attempt: a}
		a.body = &a.ownBody
		out.Body = a.body
		if len(r.declared) > 0 || r.length < 0 { // of unknown length: there may be some at its end
			a.body.trailer = make(http.Header, len(r.declared))
			for _, name := range r.declared {
				a.body.trailer[name] = nil
			}
			out.Trailer = a.body.trailer
		}
	}
	return out
}

// join returns u with the endpoint's scheme and host, and its prefix in front of
// the path. The asterisk of OPTIONS is no path.
func (e *endpoint) join(method string, u *url.URL) url.URL {
	j := *u
	j.Scheme, j.Host, j.User, j.Opaque = e.scheme, e.host, nil, ""
	// What http.StripPrefix leaves may have no slash in front.
	raw, slash := u.EscapedPath(), ""
	if raw != "" && raw[0] != '/' {
		slash = "/"
	}
	if e.prefix+slash == "" || u.Path == "*" && method == http.MethodOptions {
		return j
	}
	j.Path, j.RawPath = e.prefix+slash+u.Path, e.rawPrefix+slash+raw
	return j
}

// dialEnded is told by the backend's dialer how a dial for this attempt ended.
func (a *attempt) dialEnded(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dials++
	a.dialed = a.dialed || err == nil
}

// gotConn is told by the transport which connection carries the attempt. It is
// told again when the transport found an idle connection dead and takes another. If
// the dead one has carried bytes of the request, whether to send it again is not
// for the transport to say: the new connection is closed before it is used, and so
// is every other that it tries; see mayDial.
func (a *attempt) gotConn(info httptrace.GotConnInfo) {
	cc := countedIn(info.Conn)
	a.mu.Lock()
	a.before = a.sentLocked()
	resend := a.before > 0
	a.taken = taken{conn: cc, reused: info.Reused || a.taken.reused, idled: info.Reused}
	if cc == nil {
		a.opaque = true
	} else {
		a.taken.sent, a.taken.received = cc.sent.Load(), cc.received.Load()
	}
	a.mu.Unlock()
	if cc != nil {
		// A look costs a system call: only for a request that could not be repeated if
		// it were written to a dead connection.
		cc.own(a, info.Reused && !a.call.replayable())
	}
	if resend {
		info.Conn.Close()
	}
	if a.caller != nil && a.caller.GotConn != nil {
		a.caller.GotConn(info)
	}
}

// conn is the connection that carries the attempt, nil if it is not known.
func (a *attempt) conn() *countedConn {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.taken.conn
}

// gotFirstByte is told by the transport when it sees the first byte of an answer. If
// the connection has received nothing since the attempt got it, that byte was there
// before: the backend has sent more than its answer to the request before, and what
// follows answers nobody's. net/http drops such a connection, but only if it comes to
// look at it before it has given it to the next request.
func (a *attempt) gotFirstByte() {
	a.mu.Lock()
	conn := a.taken.conn
	_, received := a.taken.moved()
	a.stale = conn != nil && a.taken.idled && received == 0
	stale := a.stale
	a.mu.Unlock()
	if stale {
		conn.Close() // now, or the transport may give it to the request after this one
	}
	if a.caller != nil && a.caller.GotFirstResponseByte != nil {
		a.caller.GotFirstResponseByte()
	}
}

func (a *attempt) isStale() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stale
}

// mayDial tells whether a connection may be opened for the attempt: not once it has
// sent something.
func (a *attempt) mayDial() bool { return a.sent() == 0 }

// got1xx passes an informational answer on to the caller, from the first attempt
// and for as long as that goes on.
func (a *attempt) got1xx(code int, header textproto.MIMEHeader) error {
	if a.isStale() {
		return errUnasked
	}
	if a.number > 1 || a.ended.Load() {
		return nil
	}
	if a.call.hint != nil {
		if err := a.call.hint(code, header); err != nil {
			return err
		}
	}
	if a.caller != nil && a.caller.Got1xxResponse != nil {
		return a.caller.Got1xxResponse(code, header)
	}
	return nil
}

// wait100 and got100 are told when the transport begins to wait for the backend's word
// that it wants the body, and when that has come.
func (a *attempt) wait100() {
	a.mu.Lock()
	a.asked = time.Now()
	a.mu.Unlock()
	if a.caller != nil && a.caller.Wait100Continue != nil {
		a.caller.Wait100Continue()
	}
}

func (a *attempt) got100() {
	a.mu.Lock()
	a.agreed = true
	a.mu.Unlock()
	if a.caller != nil && a.caller.Got100Continue != nil {
		a.caller.Got100Continue()
	}
}

// wanted tells whether the client is to be asked for more of the body. The transport
// reads it also when a final answer has come in place of a 100 Continue, for the sake
// of the connection: the client would be told to go on with an upload that was refused.
func (a *attempt) wanted() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.agreed || a.asked.IsZero() || time.Since(a.asked) >= a.backend.conns.patience
}

// connEnded is told when the connection that carries the attempt is over. The
// transport may be waiting for the request's body at that moment, and would for
// as long as the client likes: ending the body ends its wait.
func (a *attempt) connEnded() {
	if a.body != nil {
		a.body.fence()
	}
}

// sent is how many bytes of the request left on connections of the pool.
func (a *attempt) sent() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.sentLocked()
}

func (a *attempt) sentLocked() int64 {
	sent, _ := a.taken.moved()
	return a.before + sent
}

// isLast tells that no other attempt will follow this one whatever comes, so that
// the body need not be kept: bytes have left, and the request may not be repeated
// or is too long to be.
func (a *attempt) isLast() bool {
	return !a.call.replayable() && (!a.backend.conns.owned || a.sent() > 0)
}

// end cuts the attempt off from the request: its body and its 1xx answers.
func (a *attempt) end() {
	a.ended.Store(true)
	if a.body != nil {
		a.body.fence()
	}
}

// passedOn is told that the connection now carries another attempt.
func (a *attempt) passedOn() {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := &a.taken
	t.sentAfter, t.receivedAfter = t.moved()
	t.over = true
}

// publish tells everybody how the attempt stands: counters, health, strategy,
// record. It releases what the attempt has reserved as soon as it is known.
func (a *attempt) publish(o *Outcome) {
	p := a.call.pool
	a.backend.count(o)
	p.set.learn(a.backend, a.epoch, a.trial, o)
	if a.trial {
		a.trial = false
		a.backend.passive.onTrial.Store(false)
	}
	p.observe(a.backend, o)
	if a.call.record != nil {
		a.call.record.add(a, o)
	}
	if o.NeverLeft && o.Reused {
		a.backend.conns.closeIdle() // one was dead, and likely the others are too
	}
	if o.Err != nil && !o.Final {
		a.finish(nil)
	}
}

// finish ends the attempt, which is counted down once whatever happens, and tells
// whether this was the call that did it. final is its last outcome if it was
// answered.
func (a *attempt) finish(final *Outcome) bool {
	if !a.finished.CompareAndSwap(false, true) {
		return false
	}
	a.end()
	if final != nil {
		final.Final = true
		final.Attempt, final.Wait = a.number, a.wait
		final.Total = time.Since(a.began)
		a.mu.Lock()
		final.Reused = a.taken.reused
		if a.backend.conns.owned { // else it is known to who read the body
			a.countLocked(final)
		}
		a.mu.Unlock()
		a.publish(final)
	}
	a.mu.Lock()
	conn := a.taken.conn
	a.mu.Unlock()
	if conn != nil {
		conn.disown(a)
	}
	a.backend.end()
	return true
}
