package lb

import (
	"context"
	"errors"
	"net"
	"net/http"
)

// Verdict is what a probe says of a backend. The zero value is VerdictUnhealthy, so
// that a Checker may return 0 with an error.
type Verdict uint8

// The verdicts. All but the first pass.
const (
	// VerdictUnhealthy: it does not work.
	VerdictUnhealthy Verdict = iota
	// VerdictHealthy: it works.
	VerdictHealthy
	// VerdictDegraded: it works, but is to be spared. It gets requests only if no
	// healthy backend is left for them.
	VerdictDegraded
	// VerdictDrain: it works, but wants no new requests, because it is about to end
	// for example. Those under way go on to their end.
	VerdictDrain
)

var verdictNames = [...]string{"unhealthy", "healthy", "degraded", "drain"}

// String returns the verdict as one lower-case word.
func (v Verdict) String() string { return nameIn(verdictNames[:], int(v)) }

// MarshalText makes it the word of String in JSON and in logs.
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// passes tells whether the backend answers its probe well.
func (v Verdict) passes() bool { return v != VerdictUnhealthy }

// health is the health of a backend of which this is what is known.
func (v Verdict) health() Health {
	switch v {
	case VerdictHealthy:
		return HealthHealthy
	case VerdictDegraded:
		return HealthDegraded
	case VerdictDrain:
		return HealthDraining
	}
	return HealthUnhealthy
}

// Checker finds out whether a backend works; see WithChecker.
type Checker interface {
	// Check probes t once and returns its verdict. err is the reason, for the log and
	// Stats; a verdict of healthy with an error counts as unhealthy, and so does one
	// that does not exist.
	//
	// It is called concurrently for different backends, on a goroutine of the pool's,
	// never twice at once for the same. ctx ends after HealthCheck.Timeout, and when
	// the backend leaves or the pool is closed: Check must return then. One that does
	// not is left behind, which counts as a failure and in Stats.Abandoned, and again
	// each time that the backend should have been probed until it returns. A panic is
	// contained and counts as a failure.
	Check(ctx context.Context, t ProbeTarget) (Verdict, error)
}

// CheckerFunc makes a Checker of a function.
type CheckerFunc func(ctx context.Context, t ProbeTarget) (Verdict, error)

// Check calls f.
func (f CheckerFunc) Check(ctx context.Context, t ProbeTarget) (Verdict, error) { return f(ctx, t) }

// ProbeTarget is what a Checker probes: a backend and the way to it. It is made by
// the pool for each probe; the zero value cannot be used. Its connections are apart
// from those of traffic, and go the same way.
type ProbeTarget struct {
	backend *Backend
	address probeAddress
	host    string // the Host field unless a request has one
}

// probeAddress is where a backend is probed.
type probeAddress struct {
	endpoint
	path string // to ask for in place of HealthCheck.Path, if not empty
}

// equal tells whether a and to are the same place.
func (a *probeAddress) equal(to *probeAddress) bool {
	return a == to || a != nil && to != nil && *a == *to
}

// newProbeTarget returns what to probe of b now; a port above 0 is in place of that
// of the target's URL.
func newProbeTarget(b *Backend, port int) ProbeTarget {
	if own := b.settings.Load().health; own != nil {
		return ProbeTarget{b, *own, own.host}
	}
	t := ProbeTarget{backend: b, address: probeAddress{endpoint: b.endpoint}}
	if port > 0 {
		t.address.setPort(port)
	}
	switch t.host = b.endpoint.sendHost; t.host {
	case "", HostFromURL:
		t.host = t.address.host
	}
	return t
}

// Backend returns the backend that is probed.
func (t ProbeTarget) Backend() *Backend { return t.backend }

// URL returns the base of what is probed: Target.HealthURL without its path and
// query or else the target's URL, with the port of HealthCheck.Port.
func (t ProbeTarget) URL() string { return t.address.url() }

// RoundTrip sends r over a fresh connection, which ends with the answer's body.
// Scheme and host of r.URL are replaced by those of URL, and r.URL's path follows
// the path of URL. Without a Host in r or its URL, the Host field is that of
// Target.Host or else the host that is probed. Redirects are not followed. It makes
// t the Transport of an http.Client.
//
// If WithTransport has a RoundTripper that is not an *http.Transport, that is called,
// and connections are its affair.
func (t ProbeTarget) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL == nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, errors.New("lb: request without URL")
	}
	out := r.WithContext(r.Context())
	u := t.address.join(r.URL)
	out.URL = &u
	if out.Host == "" {
		out.Host = or(r.URL.Host, t.host)
	}
	if out.Header == nil {
		out.Header = make(http.Header)
	}
	return t.backend.conns.probe.RoundTrip(out)
}

// Dial opens a connection to the host of URL, with a TLS handshake if its scheme is
// https. The caller closes it. Without connections of the pool's own (see
// WithTransport) it returns an error that wraps errors.ErrUnsupported.
func (t ProbeTarget) Dial(ctx context.Context) (net.Conn, error) {
	return t.backend.conns.dialProbe(ctx, &t.address.endpoint)
}
