package lb

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"unicode/utf8"

	"example.com/lb/internal/h1"
	"example.com/lb/internal/h2"
)

// trip is one request on its way, over either version. Until it is begun nothing is known
// of it.
type trip struct {
	out    h1.Request
	first  h1.Exchange
	second *h2.Exchange // nil over HTTP/1.1
}

// errNoUpgrade is the error of a request for an upgrade over HTTP/2 without TLS, which has
// none (RFC 9113, section 8.6); that of RFC 8441 is not spoken.
var errNoUpgrade = fmt.Errorf("%w: there is no upgrade over h2c", h1.ErrRequest)

// roundTrip sends r, in is what the answer's Request is to be. hints is told of
// informational answers.
func (w *way) roundTrip(t *trip, r, in *http.Request, trace *httptrace.ClientTrace, hints h1.Hints) (*http.Response, error) {
	fillRequest(&t.out, r)
	t.out.Trace = trace
	upgrades := len(r.Header["Upgrade"]) > 0
	if w.second == nil || w.first != nil && (upgrades || w.onlyFirst()) {
		resp, err := w.first.RoundTrip(r.Context(), &t.first, &t.out, hints, in)
		if _, ok := errors.AsType[handshakeError](err); ok && w.second != nil && !upgrades {
			w.choseFirst(false) // it may want the other now
		}
		return resp, err
	}
	if err := w.checkSecond(t, upgrades); err != nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, err
	}
	t.second = new(h2.Exchange)
	resp, err := w.second.RoundTrip(t.second, w.overSecond(&t.out, r), h2.Options{
		NoHeaderTimeout: isGRPC(r.Header), Trace: trace, Informational: hints.Informational,
	})
	if errors.Is(err, h2.ErrOther) {
		w.choseFirst(true)
		t.second = nil
		return w.first.RoundTrip(r.Context(), &t.first, &t.out, hints, in)
	}
	if err == nil {
		resp.Request = in
	}
	return resp, err
}

func (w *way) checkSecond(t *trip, upgrades bool) error {
	if upgrades {
		return errNoUpgrade
	}
	return t.out.Check()
}

// overSecond is r as net/http wants it for HTTP/2.
func (w *way) overSecond(out *h1.Request, r *http.Request) *http.Request {
	second := r.WithContext(withoutTrace{r.Context()}) // which is told by ourselves
	u := *r.URL
	u.Scheme = w.at.urlScheme()
	if strings.HasPrefix(u.Opaque, "//") {
		u.Opaque = "" // or net/http would take it for a host
	}
	second.URL, second.Host, second.Close = &u, out.Host, false
	if second.Body == nil {
		second.ContentLength = 0
	}
	return second
}

// moved is how many bytes were sent and received, zero over HTTP/2, whose connections
// carry other requests beside.
func (t *trip) moved() (sent, received int64) {
	if t.second != nil {
		return 0, 0
	}
	return t.first.Moved()
}

func (t *trip) reused() bool {
	if t.second != nil {
		return t.second.Reused()
	}
	return t.first.Reused()
}

// neverLeft tells of a trip that failed whether provably no backend has looked at it.
func (t *trip) neverLeft() bool {
	if t.second != nil {
		return t.second.NeverLeft()
	}
	sent, _ := t.first.Moved()
	return sent == 0
}

// stage is how far a trip came that failed with err.
func (t *trip) stage(err error) Stage {
	switch {
	case t.second != nil && !t.second.Connected(), t.second == nil && t.first.Stage() == h1.StageConnect:
		return connectStage(err)
	case t.second != nil && !t.second.Whole(), t.second == nil && t.first.Stage() == h1.StageSend:
		return StageRequest
	}
	return StageResponse
}

// fillRequest makes out what r says.
func fillRequest(out *h1.Request, r *http.Request) {
	*out = h1.Request{
		Method: r.Method, Target: r.URL.Opaque, Query: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery,
		Host: r.Host, Header: r.Header, Body: r.Body, Length: r.ContentLength, Trailer: r.Trailer, Close: r.Close,
		NoHeaderTimeout: len(r.Header["Upgrade"]) > 0 || isGRPC(r.Header),
	}
	if out.Target == "" {
		out.Target = r.URL.EscapedPath()
	}
	if out.Target == "" {
		out.Target = "/"
	}
	if out.Host == "" {
		out.Host = r.URL.Host
	}
	switch {
	case r.Body == http.NoBody:
		out.Body = nil
	case r.ContentLength == 0:
		out.Length = -1 // net/http's rule for requests that are sent: unknown
	}
	out.Host = asciiHost(out.Host)
}

// asciiHost returns host as it stands in a Host field: in punycode if it is an
// international name. net/http knows how, but tells nobody but who reads a request
// that it writes.
func asciiHost(host string) string {
	if strings.IndexFunc(host, func(r rune) bool { return r >= utf8.RuneSelf }) < 0 {
		return host
	}
	var b bytes.Buffer
	r := http.Request{Host: host, URL: &url.URL{Host: host}}
	if err := r.Write(&b); err != nil {
		return host
	}
	written, err := http.ReadRequest(bufio.NewReader(&b))
	if err != nil {
		return host
	}
	return written.Host
}
