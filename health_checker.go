package lb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
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
	// VerdictDegraded: it works, but is to be spared, because it is overloaded for
	// example. It gets requests only if no healthy backend is left for them.
	VerdictDegraded
	// VerdictDrain: it works, but wants no new requests, because it is about to end.
	// Those under way go on to their end. It takes effect at once.
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
	// Check probes t once and returns its verdict. An error is the reason for it, shown
	// in the log and in Stats; it may come with every verdict but VerdictHealthy. Healthy
	// with an error, and a number that is no verdict, count as unhealthy.
	//
	// It is called concurrently for different backends, on goroutines of the pool's,
	// never twice at once for the same. ctx ends after HealthCheck.Timeout, and when
	// the backend leaves or the pool is closed: Check must return then. If it does not,
	// the call counts in Stats.Abandoned and the probe has failed, and so has every
	// further one, without a call, until Check returns. A panic is contained and counts
	// as a failure. The same means the same *Backend: one that leaves and comes back is
	// another.
	Check(ctx context.Context, t ProbeTarget) (Verdict, error)
}

// CheckerFunc makes a Checker of a function.
type CheckerFunc func(ctx context.Context, t ProbeTarget) (Verdict, error)

// Check calls f.
func (f CheckerFunc) Check(ctx context.Context, t ProbeTarget) (Verdict, error) { return f(ctx, t) }

// ProbeTarget is what a Checker probes: a backend and the way to it. The pool makes
// one for each probe, and NewProbeTarget one for tests; the methods of the zero value
// return errors. It opens a connection for each use, never one that traffic uses, with
// the dialer and the TLS settings of traffic.
type ProbeTarget struct {
	backend *Backend
	ctx     context.Context // of the probe; nil outside of one
	address probeAddress
	host    string // the Host field unless a request has one
}

// probeAddress is where a backend is probed.
type probeAddress struct {
	endpoint
	path *url.URL // path and query to ask for in place of HealthCheck.Path; nil without
}

// equal tells whether a and to are the same place.
func (a *probeAddress) equal(to *probeAddress) bool {
	if a == nil || to == nil {
		return a == to
	}
	return a.endpoint == to.endpoint && (a.path == nil) == (to.path == nil) &&
		(a.path == nil || *a.path == *to.path)
}

// newProbeTarget returns what to probe of b now; a port above 0 is in place of that
// of the target's URL.
func newProbeTarget(b *Backend, port int) ProbeTarget {
	if own := b.settings.Load().health; own != nil {
		return ProbeTarget{backend: b, address: *own, host: own.host}
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

// NewProbeTarget returns what a pool would probe of t, to test Checkers with: t's
// backend belongs to no pool. rt is what WithTransport would be given, nil for the
// default. The error is that of New for such a target.
func NewProbeTarget(t Target, rt http.RoundTripper) (ProbeTarget, error) {
	list, err := parseTargets([]Target{t})
	if err != nil {
		return ProbeTarget{}, fmt.Errorf("lb: %w", err)
	}
	opts := []Option{WithHealthCheck(HealthCheck{Path: "/"})}
	if rt != nil {
		opts = append(opts, WithTransport(rt))
	}
	cfg, err := newConfig(opts)
	if err != nil {
		return ProbeTarget{}, fmt.Errorf("lb: %w", err)
	}
	alone := &backendSet{cfg: cfg, conns: newConnSet()}
	alone.panics.logger = cfg.logger
	alone.work.init()
	return newProbeTarget(alone.newBackend(list[0]), 0), nil
}

// Backend returns the backend that is probed.
func (t ProbeTarget) Backend() *Backend { return t.backend }

// URL returns the base of what is probed: Target.HealthURL without its path and
// query or else the target's URL, with the port of HealthCheck.Port.
func (t ProbeTarget) URL() string { return t.address.url() }

// elsewhere tells that the probe goes to another place than traffic.
func (t ProbeTarget) elsewhere() bool { return t.address.url() != t.backend.URL() }

// RoundTrip sends r over a connection of its own, which ends with the answer's body.
// Scheme and host of r.URL are replaced by those of URL, and r.URL's path follows
// the path of URL; an empty one is that of Target.HealthURL, with its query. Without a
// Host in r or its URL, the Host field is that of Target.Host or else the host that is
// probed. Without a User-Agent in r's header that is "lb-health-check".
//
// It makes t the Transport of an http.Client, which follows redirects, back to the
// same backend wherever they point, unless its CheckRedirect says otherwise.
//
// If WithTransport has a RoundTripper that is not an *http.Transport, that is called,
// and connections are its affair.
func (t ProbeTarget) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL == nil || t.backend == nil {
		if r.Body != nil {
			r.Body.Close()
		}
		if r.URL == nil {
			return nil, errors.New("lb: request without URL")
		}
		return nil, errNoTarget
	}
	out := r.WithContext(r.Context())
	u := t.address.join(r.Method, r.URL)
	if r.URL.Path == "" && t.address.path != nil {
		u.Path, u.RawPath, u.RawQuery = t.address.path.Path, t.address.path.RawPath, t.address.path.RawQuery
	}
	out.URL = &u
	if out.Host == "" {
		out.Host = or(r.URL.Host, t.host)
	}
	if _, ok := r.Header["User-Agent"]; !ok {
		out.Header = r.Header.Clone()
		if out.Header == nil {
			out.Header = make(http.Header)
		}
		out.Header.Set("User-Agent", probeUserAgent)
	}
	if t.ctx != nil {
		out = out.WithContext(context.WithValue(out.Context(), probeKey{}, t.ctx))
	}
	if t.backend.conns.probeWay != nil {
		return t.backend.conns.probeOwn(t.address.endpoint, out)
	}
	return checkRoundTrip(t.backend.conns.probe.RoundTrip(out))
}

// Dial opens a connection to the host of URL, with a TLS handshake if its scheme is
// https. It is closed when the probe ends, so that no Read or Write outlasts it.
// Without connections of the pool's own (see
// WithTransport) it returns an error that wraps errors.ErrUnsupported.
func (t ProbeTarget) Dial(ctx context.Context) (net.Conn, error) {
	if t.backend == nil {
		return nil, errNoTarget
	}
	return t.dial(ctx)
}

func (t ProbeTarget) dial(ctx context.Context) (net.Conn, error) {
	if t.ctx != nil {
		ctx = context.WithValue(ctx, probeKey{}, t.ctx)
	}
	return t.backend.conns.dialProbe(ctx, &t.address.endpoint)
}

var errNoTarget = errors.New("lb: a ProbeTarget that neither a pool nor NewProbeTarget made")
