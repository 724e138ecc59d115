package lb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// maxProbeBody is how much of an answer's body a probe reads.
const maxProbeBody = 64 << 10

// minCheckTime is the shortest interval and time-out.
const minCheckTime = time.Millisecond

// probeUserAgent is the User-Agent of probes, unless HealthCheck.Header has one.
const probeUserAgent = "lb-health-check"

// HealthCheck sets what a pool asks its backends to learn whether they work, and
// when. Each probe has a connection of its own, never one that traffic uses, opened
// with the dialer and the TLS settings of WithTransport as those are. See Health for
// what the verdicts do.
//
// A probe with a Path is an HTTP request, which passes if the answer's status is
// among Statuses and, if BodyMatch is set, its body matches; redirects are not
// followed. Without a Path it is enough that a connection can be opened, for https
// with a handshake; it goes straight to the host, past a Proxy of WithTransport, and
// does not show whether a certificate of ours is accepted: with TLS 1.3 a server says so
// only after the handshake.
//
// All backends are probed as soon as the pool is made, 32 at once; the first round
// of more than that many is spread over a second. From then on each has a timer
// of its own: the next probe comes an Interval after the end of the last, 10 % more
// or less by chance. Only the second comes sooner, at random within an Interval, so
// that the probes of a pool do not stay together. Probes go on while a backend is
// Draining, not while it is Disabled.
//
// The zero value opens connections, with the defaults for everything else.
type HealthCheck struct {
	// Path is the path to ask for, with a query if you like, for example "/healthz".
	// It follows the path of Target.URL, as that of a request does. Empty means
	// that a connection is all that is asked for.
	Path string
	// Method is the request's method. The default is GET.
	Method string
	// Host is the Host field of the request. The default is Target.Host or, if that
	// is empty, the host that is probed.
	Host string
	// Header is added to the request. Without a User-Agent in it, that is
	// "lb-health-check".
	Header http.Header
	// Statuses lists the statuses that pass, 200 to 599. The default is 200 to 299.
	Statuses []int
	// BodyMatch must match the answer's body, of which the first 64 KiB count. The
	// default, nil, does not look at the body.
	BodyMatch *regexp.Regexp
	// Port is the port to probe on each target's host. 0 means the port of the
	// target's URL. To probe another host or scheme see Target.HealthURL.
	Port int

	// Interval is the time from the end of a probe to the next one, while probes pass
	// and the backend is neither unhealthy nor ejected nor on trial. Zero means
	// DefaultCheckInterval; less than a millisecond is an error.
	Interval time.Duration
	// FastInterval takes the place of Interval otherwise: from the first failure to the
	// return. Zero means DefaultFastCheckInterval, or Interval if that is shorter; above
	// Interval or less than a millisecond is an error.
	FastInterval time.Duration
	// Timeout bounds a probe: dial, handshake, answer and as much of its body as is
	// looked at. Zero means DefaultCheckTimeout, or Interval if that is shorter; above
	// Interval or less than a millisecond is an error.
	Timeout time.Duration
	// Rise is how many probes in a row must pass for an unhealthy backend to come
	// back, Fall how many must fail to take one out. The very first verdict of a
	// backend decides at once, and so does the first after it was enabled again or its
	// HealthURL changed. Zero means DefaultRise and DefaultFall; below zero is
	// an error. A backend that goes silent is out after Interval, Fall - 1 times
	// FastInterval and Fall times Timeout, 14 s with the defaults, unless so many are
	// silent that probes have to wait for one another; one that refuses, after 8 s.
	// Often requests find out sooner, see PassiveHealth.
	Rise, Fall int

	path *url.URL // Path, read
}

// asksHTTP tells whether anything is set that only makes sense for a request.
func (h *HealthCheck) asksHTTP() bool {
	return h.Method != "" || h.Host != "" || len(h.Header) > 0 || len(h.Statuses) > 0 || h.BodyMatch != nil
}

// fill puts the defaults in and reports what is wrong.
func (h *HealthCheck) fill(c *config) {
	h.fillRequest(c)
	h.fillSchedule(c)
}

func (h *HealthCheck) fillRequest(c *config) {
	if h.Path == "" && h.asksHTTP() {
		c.faultf(`HealthCheck.Path is empty, so that only a connection is opened, but fields of a request are set: want a Path like "/healthz"`)
	}
	if h.Path != "" {
		var err error
		if h.path, err = parsePath(h.Path); err != nil {
			c.faultf("HealthCheck.Path is %q: %w", h.Path, err)
		}
	}
	if h.Method != "" && (strings.ContainsFunc(h.Method, notInToken) || h.Method == http.MethodConnect) {
		c.faultf("HealthCheck.Method is %q: want a method like GET or HEAD", h.Method)
	}
	if strings.ContainsFunc(h.Host, notInHost) {
		c.faultf("HealthCheck.Host is %q: want a host name with an optional port", h.Host)
	}
	for name, values := range h.Header {
		switch textproto.CanonicalMIMEHeaderKey(name) {
		case "Host":
			c.faultf("HealthCheck.Header has %q: set HealthCheck.Host instead", name)
		case "Content-Length", "Transfer-Encoding", "Connection", "Trailer":
			c.faultf("HealthCheck.Header has %q, which is not for the user to set: leave it out", name)
		}
		if name == "" || strings.ContainsFunc(name, notInToken) || slices.ContainsFunc(values, notAFieldValue) {
			c.faultf("HealthCheck.Header has %q: %q: not a field of HTTP", name, values)
		}
	}
	for _, status := range h.Statuses {
		if status < 200 || status > 599 {
			c.faultf("HealthCheck.Statuses has %d: want 200 to 599", status)
		}
	}
	if h.Port < 0 || h.Port > 65535 {
		c.faultf("HealthCheck.Port is %d: want 1 to 65535, or 0 for the target's own", h.Port)
	}
	if h.Method == http.MethodHead && h.BodyMatch != nil {
		c.faultf("HealthCheck.BodyMatch is set, but the answer to HEAD has no body: want another Method")
	}
	h.Method = or(h.Method, http.MethodGet)
	header := make(http.Header, len(h.Header))
	for name, values := range h.Header {
		header[textproto.CanonicalMIMEHeaderKey(name)] = slices.Clone(values)
	}
	h.Header, h.Statuses = header, slices.Clone(h.Statuses)
}

func (h *HealthCheck) fillSchedule(c *config) {
	check := func(name string, d, most time.Duration) {
		if d != 0 && d < minCheckTime { // a bare number is in nanoseconds
			c.faultf("HealthCheck.%s is %v: want at least %v, or 0 for the default", name, d, minCheckTime)
		}
		if d > most {
			c.faultf("HealthCheck.%s is %v: want at most the Interval (%v)", name, d, most)
		}
	}
	interval := or(max(0, h.Interval), DefaultCheckInterval)
	check("Interval", h.Interval, interval)
	check("FastInterval", h.FastInterval, interval)
	check("Timeout", h.Timeout, interval)
	if h.Rise < 0 {
		c.faultf("HealthCheck.Rise is %d: want 1 or more, or 0 for %d", h.Rise, DefaultRise)
	}
	if h.Fall < 0 {
		c.faultf("HealthCheck.Fall is %d: want 1 or more, or 0 for %d", h.Fall, DefaultFall)
	}
	h.Interval = interval
	h.FastInterval = or(h.FastInterval, min(DefaultFastCheckInterval, interval))
	h.Timeout = or(h.Timeout, min(DefaultCheckTimeout, interval))
	h.Rise, h.Fall = or(h.Rise, DefaultRise), or(h.Fall, DefaultFall)
}

// parsePath reads a path with an optional query.
func parsePath(s string) (*url.URL, error) {
	if !strings.HasPrefix(s, "/") {
		return nil, errors.New(`want a path that begins with a slash, like "/healthz"`)
	}
	u, err := url.ParseRequestURI("http://x" + s) // the host keeps "//" from being one
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return nil, err
	}
	if strings.Contains(s, "#") {
		return nil, errors.New("a fragment is not allowed")
	}
	u.Scheme, u.Host = "", ""
	return u, nil
}

// notInToken tells that r cannot stand in a method or field name (RFC 9110, section
// 5.6.2).
func notInToken(r rune) bool {
	return r <= ' ' || r >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
}

// notAFieldValue tells that v would break the request (RFC 9110, section 5.5).
func notAFieldValue(v string) bool { return strings.ContainsAny(v, "\r\n\x00") }

// check is the Checker that h describes.
func (h *HealthCheck) check(ctx context.Context, t ProbeTarget) (Verdict, error) {
	path := h.path
	if own := t.address.path; own != nil {
		path = own
	}
	if path == nil {
		return h.connect(ctx, t)
	}
	if err := h.ask(ctx, t, path); err != nil {
		where := path.RequestURI()
		if t.elsewhere() {
			where = t.URL() + where
		}
		return VerdictUnhealthy, fmt.Errorf("%s %s: %w", h.Method, where, err)
	}
	return VerdictHealthy, nil
}

func (h *HealthCheck) connect(ctx context.Context, t ProbeTarget) (Verdict, error) {
	if t.backend.conns.handler != nil {
		return VerdictHealthy, nil // it is here
	}
	nc, err := t.dial(ctx)
	if err != nil {
		return VerdictUnhealthy, err
	}
	nc.Close()
	return VerdictHealthy, nil
}

// ask sends the request and returns what is wrong with what comes of it.
func (h *HealthCheck) ask(ctx context.Context, t ProbeTarget, path *url.URL) error {
	var connected atomic.Bool
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { connected.Store(true) },
	})
	r := &http.Request{
		Method: h.Method, URL: path, Host: h.Host, Header: h.Header,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}
	resp, err := t.RoundTrip(r.WithContext(traced))
	switch {
	case err != nil && ctx.Err() != nil && connected.Load():
		return errors.New("no answer")
	case err != nil && ctx.Err() != nil:
		return errors.New("no connection")
	case err != nil:
		return err
	}
	defer resp.Body.Close()
	return h.judge(resp)
}

// judge returns what is wrong with an answer.
func (h *HealthCheck) judge(resp *http.Response) error {
	ok := resp.StatusCode >= 200 && resp.StatusCode <= 299
	want := "200 to 299"
	if len(h.Statuses) > 0 {
		ok = slices.Contains(h.Statuses, resp.StatusCode)
		want = strings.Trim(fmt.Sprint(h.Statuses), "[]")
	}
	body := io.LimitReader(resp.Body, maxProbeBody)
	if !ok || h.BodyMatch == nil {
		// A server that is cut off in its answer may make noise about it.
		t := time.AfterFunc(discardTime, func() { resp.Body.Close() })
		_, _ = io.Copy(io.Discard, body)
		t.Stop()
	}
	if !ok {
		return fmt.Errorf("status %d, want %s", resp.StatusCode, want)
	}
	if h.BodyMatch == nil {
		return nil
	}
	text, err := io.ReadAll(body)
	if err != nil {
		return fmt.Errorf("body: %w", err)
	}
	if !h.BodyMatch.Match(text) {
		return fmt.Errorf("body %.40q does not match %q", text, h.BodyMatch)
	}
	return nil
}
