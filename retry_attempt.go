package lb

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

// attempt is one try of one request on one backend. It is also the context of
// that try: the request's own, but with a client trace of the attempt in place of
// the caller's. It passes on what it hears but the 1xx answers of attempts that were
// discarded, which httputil.ReverseProxy, for one, would give to the client.
//
// What is known of its connection comes from trip, if that is one of our own, or from
// pooled.
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
	trip    trip         // over connections of our own
	pooled  *pooled      // nil over connections of our own
	body    *attemptBody // nil without a body
	ownBody attemptBody
	out     http.Request
	url     url.URL
	answer  answer

	ended    atomic.Bool // nothing of it reaches the client any more
	finished atomic.Bool // counted down
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
	a.caller = c.pool.set.panics.guardTrace(httptrace.ContextClientTrace(a.Context))
	if p.backend.conns.own == nil {
		a.pooled = newPooled(a)
	}
	p.backend.begin(a.number)
	return a
}

// Value shows the attempt's client trace in place of the caller's, and the attempt to the
// dial of a transport.
func (a *attempt) Value(key any) any {
	switch key {
	case attemptKey{}:
		return a
	case backendKey{}:
		return a.backend
	}
	v := a.Context.Value(key)
	if _, ok := v.(*httptrace.ClientTrace); ok && a.pooled != nil {
		return &a.pooled.trace
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
	resp, err := a.send(req)
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

// send sends req over the backend's connections.
func (a *attempt) send(req *http.Request) (*http.Response, error) {
	switch conns := a.backend.conns; {
	case conns.own != nil:
		return a.overOwn(conns.own, req)
	case req.Header.Get("Upgrade") != "" || isGRPC(req.Header):
		return a.roundTrip(conns.upgrade, req)
	default:
		return a.roundTrip(conns.plain, req)
	}
}

// overOwn sends req over a connection of our own.
func (a *attempt) overOwn(own *way, req *http.Request) (resp *http.Response, err error) {
	defer func() {
		if v := recover(); v != nil {
			a.call.pool.set.panics.caught("a hook of the client trace", v)
			resp, err = nil, fmt.Errorf("client trace panicked: %v", v)
		}
	}()
	return own.roundTrip(&a.trip, req, a.call.in, a.caller, a)
}

// checkAnswer finds what net/http lets through and a server cannot pass on.
func (a *attempt) checkAnswer(req *http.Request, resp *http.Response) error {
	switch code := resp.StatusCode; {
	case a.pooled != nil && a.pooled.isStale():
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
	out := &a.out
	switch {
	case a.pooled != nil && a.caller == nil:
		out = in.WithContext(httptrace.WithClientTrace(a, &a.pooled.trace))
	case a.pooled != nil || a.call.pool.cfg.rewrite != nil: // or nobody looks for the attempt in there
		out = in.WithContext(a)
	default:
		*out = *in
	}
	a.url = e.join(in.Method, in.URL)
	if target := a.call.target; target != "" && a.backend.conns.raw {
		if target[0] != '/' {
			target = "/" + target
		}
		if raw := e.rawPrefix + target; a.pooled == nil || !strings.HasPrefix(raw, "//") {
			a.url.Opaque = raw // which is written as it is
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
	j.Scheme, j.Host, j.User, j.Opaque = e.urlScheme(), e.host, nil, ""
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

// Informational passes an informational answer on to the caller, from the first attempt
// and for as long as that goes on. The connection tells it.
func (a *attempt) Informational(code int, header textproto.MIMEHeader) error {
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

// connEnded is told when the connection that carries the attempt is over. The
// transport may be waiting for the request's body at that moment, and would for
// as long as the client likes: ending the body ends its wait.
func (a *attempt) connEnded() {
	if a.body != nil {
		a.body.fence()
	}
}

// moved is how many bytes of the request left on connections of the pool, and how many
// came, as far as that can be told.
func (a *attempt) moved() (sent, received int64) {
	if a.pooled != nil {
		return a.pooled.moved()
	}
	return a.trip.moved()
}

// counted is moved, with the bytes of the bodies where connections are shared.
func (a *attempt) counted() (sent, received int64) {
	if a.pooled == nil && a.trip.second != nil {
		if a.body != nil {
			sent = a.body.taken()
		}
		return sent, a.answer.read.Load()
	}
	return a.moved()
}

// sent is how many bytes of the request left.
func (a *attempt) sent() int64 {
	sent, _ := a.moved()
	return sent
}

// reused tells whether the connection had carried another request.
func (a *attempt) reused() bool {
	if a.pooled != nil {
		return a.pooled.reused()
	}
	return a.trip.reused()
}

// mayBlock tells whether nobody waits for the goroutine that reads the attempt's body. A
// transport's RoundTrip does, also net/http's for HTTP/2.
func (a *attempt) mayBlock() bool { return a.pooled == nil && a.trip.second == nil }

// wanted tells whether the client is to be asked for more of the body.
func (a *attempt) wanted() bool { return a.pooled == nil || a.pooled.wanted() }

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
	if o.NeverLeft && o.Reused && a.pooled != nil {
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
		final.Reused = a.reused()
		if a.backend.conns.owned { // else it is known to who read the body
			final.SentBytes, final.ReceivedBytes = a.counted()
		}
		a.publish(final)
	}
	if a.pooled != nil {
		a.pooled.disown()
	}
	a.backend.end()
	return true
}
