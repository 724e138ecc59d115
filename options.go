package lb

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"
)

// Every default of the package, in one place. The table in doc.go repeats them
// and a test compares the two.
const (
	// DefaultDialTimeout bounds one dial. It is short on purpose: while one
	// backend cannot be reached, the request waits to be given to another.
	DefaultDialTimeout = 2 * time.Second
	// DefaultTLSHandshakeTimeout bounds the TLS handshake that follows a dial.
	DefaultTLSHandshakeTimeout = 5 * time.Second
	// DefaultResponseHeaderTimeout bounds the wait for the answer's headers,
	// counted from the moment the request has been sent whole.
	DefaultResponseHeaderTimeout = 60 * time.Second
	// DefaultExpectContinueTimeout is how long a request that says
	// "Expect: 100-continue" waits for the backend's word before its body is
	// sent anyway.
	DefaultExpectContinueTimeout = time.Second
	// DefaultMaxHeaderBytes bounds the header of an answer, those of the informational
	// answers before it included.
	DefaultMaxHeaderBytes int64 = 1 << 20
	// DefaultMaxIdleConns is how many idle connections a backend may keep.
	DefaultMaxIdleConns = 256
	// DefaultIdleConnTimeout is how long an idle connection is kept.
	DefaultIdleConnTimeout = 30 * time.Second

	// DefaultCloseSpread is the time over which WebSockets are asked to leave.
	DefaultCloseSpread = 10 * time.Second

	// DefaultAttempts is how often a request may reach a backend, the first
	// time included.
	DefaultAttempts = 3
	// DefaultMaxFailedDials is how many backends that had not been tried yet
	// may refuse a request's dial without using up its attempts.
	DefaultMaxFailedDials = 10
	// DefaultRetryBaseDelay and DefaultRetryMaxDelay bound the random delay
	// before a further attempt.
	DefaultRetryBaseDelay = 25 * time.Millisecond
	DefaultRetryMaxDelay  = 250 * time.Millisecond
	// DefaultRetryTotal is the time after which no attempt is begun any more.
	DefaultRetryTotal = 60 * time.Second
	// DefaultMaxReplayBytes is how much of one request's body is kept, so that
	// it can be sent again.
	DefaultMaxReplayBytes int64 = 64 << 10
	// DefaultMaxPoolReplayBytes bounds what all requests of a pool keep at once.
	DefaultMaxPoolReplayBytes int64 = 64 << 20

	// DefaultFailures is how many failures in a row eject a backend.
	DefaultFailures = 3
	// DefaultEjection is how long a first ejection lasts; the n-th lasts n times
	// as long, at most DefaultMaxEjection.
	DefaultEjection    = 5 * time.Second
	DefaultMaxEjection = 60 * time.Second

	// DefaultCheckInterval is the time from one probe of a backend to the next.
	DefaultCheckInterval = 5 * time.Second
	// DefaultFastCheckInterval takes its place while the backend is not in order.
	DefaultFastCheckInterval = time.Second
	// DefaultCheckTimeout bounds one probe.
	DefaultCheckTimeout = 2 * time.Second
	// DefaultRise is how many probes in a row bring an unhealthy backend back.
	DefaultRise = 2
	// DefaultFall is how many failed probes in a row take a backend out.
	DefaultFall = 3
)

// Option changes one setting of a Pool. Options are made by the With functions
// of this package and are applied in order: of two that set the same thing the
// later one wins. An Option may be used for several pools.
type Option interface{ apply(*config) }

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

// config is what the options of one pool add up to. It does not change once New
// has returned.
type config struct {
	name         string
	balancer     Balancer
	check        *HealthCheck // nil without active checks
	checker      Checker
	passive      PassiveHealth
	failClosed   bool
	retry        RetryPolicy
	timeouts     Timeouts
	transport    http.RoundTripper // nil: connections of our own
	dialer       dialFunc
	ownDialer    bool // dialer is the user's
	connections  Connections
	upgrades     Upgrades
	trust        trust
	keepLocation bool
	forwarded    bool
	via          string
	rewrite      func(*ProxyRequest)
	modify       func(*http.Response) error
	errorHandler func(http.ResponseWriter, *http.Request, error)
	logger       *slog.Logger

	faults []error // what is wrong with the options, all of it
}

// newConfig applies opts over the defaults and returns every fault it finds.
func newConfig(opts []Option) (*config, error) {
	c := &config{}
	for i, o := range opts {
		if o == nil {
			c.faultf("option %d of %d is nil: leave it out", i+1, len(opts))
			continue
		}
		o.apply(c)
	}
	if c.balancer == nil {
		c.balancer = RoundRobin()
	}
	if c.dialer == nil {
		c.dialer = new(net.Dialer).DialContext
	}
	if c.logger == nil {
		c.logger = slog.New(slog.DiscardHandler)
	}
	if c.errorHandler == nil {
		c.errorHandler = replyError
	}
	c.fillChecks()
	c.passive.fill(c)
	c.retry.fill(c)
	c.timeouts.fill(c)
	c.upgrades.fill(c)
	c.connections.fill(c)
	return c, errors.Join(c.faults...)
}

// fillChecks settles who probes, if anybody does.
func (c *config) fillChecks() {
	if c.check == nil {
		if c.checker == nil {
			return
		}
		c.check = new(HealthCheck)
	}
	switch _, ours := c.transport.(*http.Transport); {
	case c.checker != nil && (c.check.Path != "" || c.check.asksHTTP()):
		c.faultf("WithChecker and WithHealthCheck both say what to ask: set only the port, intervals, Timeout, Rise and Fall of HealthCheck beside a Checker")
	case c.checker == nil && c.check.Path == "" && c.transport != nil && !ours:
		c.faultf("HealthCheck.Path is empty, but WithTransport has a %T, over which no connections can be opened: set a Path", c.transport)
	}
	c.check.fill(c)
	if c.checker == nil {
		c.checker = CheckerFunc(c.check.check)
	}
}

func (c *config) faultf(format string, args ...any) {
	c.faults = append(c.faults, fmt.Errorf(format, args...))
}

// WithName names the pool in its log and its Stats. The default is no name.
func WithName(name string) Option {
	return optionFunc(func(c *config) { c.name = name })
}

// WithBalancer sets the strategy that chooses among the candidates of a
// request. The default is RoundRobin. A strategy keeps state (a position, what
// it has learned) and belongs to one pool: do not give the same value to two.
func WithBalancer(b Balancer) Option {
	return optionFunc(func(c *config) {
		if isNil(b) {
			c.faultf("WithBalancer: the Balancer is nil: leave the option out for RoundRobin")
			return
		}
		c.balancer = b
	})
}

// WithHealthCheck makes the pool probe its backends, as h says, from New until Close.
// Without it, and without WithChecker, none is probed.
func WithHealthCheck(h HealthCheck) Option {
	return optionFunc(func(c *config) {
		check := h // which each pool completes for itself
		c.check = &check
	})
}

// WithChecker makes the pool probe its backends with a Checker of the user's, at the
// times that HealthCheck sets; without WithHealthCheck beside it these are the
// defaults. Beside a Checker only Port, Interval, FastInterval, Timeout, Rise and Fall
// of HealthCheck may be set.
func WithChecker(checker Checker) Option {
	return optionFunc(func(c *config) {
		if isNil(checker) {
			c.faultf("WithChecker: the Checker is nil: leave the option out for the probes of WithHealthCheck")
			return
		}
		c.checker = checker
	})
}

// WithFailClosed keeps requests from backends that are not usable even if none is:
// such a request is answered with 503 and Retry-After at once, without asking
// anybody; its error wraps ErrNoBackend. By default the pool fails open: it uses
// what it has, because checks that fail everywhere are more likely wrong than right.
//
// It needs active checks to be of use: failed requests alone never take out the last
// usable backend. A backend on trial still gets its one request at a time, or it could
// not return.
func WithFailClosed() Option {
	return optionFunc(func(c *config) { c.failClosed = true })
}

// WithPassiveHealth sets how a backend is taken out because of what happened to
// the requests it was given. Without it the defaults of PassiveHealth hold.
func WithPassiveHealth(h PassiveHealth) Option {
	return optionFunc(func(c *config) { c.passive = h })
}

// WithRetry sets when a request is sent again. Without it the defaults of
// RetryPolicy hold.
func WithRetry(r RetryPolicy) Option {
	return optionFunc(func(c *config) { c.retry = r })
}

// WithTimeouts sets how long the stages of an attempt may take. Without it the
// defaults of Timeouts hold.
func WithTimeouts(t Timeouts) Option {
	return optionFunc(func(c *config) { c.timeouts = t })
}

// WithTransport makes the pool reach its backends over rt in place of connections of its
// own, which cost less, send nothing twice by themselves and know what has left. A dialer
// alone is better set with WithDialer, and TLS with Target.TLS.
//
// An *http.Transport is a template: the pool clones it for each backend, counts
// the bytes on its connections, keeps to HTTP/1.1, asks for no compression that the
// request does not ask for, and leaves the original alone. What Timeouts sets wins
// over the template's own time-outs only if the template leaves them at zero.
// MaxConnsPerHost counts connections that were opened for an upgrade apart. What
// DialTLSContext returns is used as it is: its handshake counts as a part of the dial.
//
// Any other RoundTripper is used as it is, for all backends, with the time-outs
// and connections it has. The pool then cannot prove that a request never left,
// so a request that is not idempotent is never sent a second time; nor can it
// wake an upload whose client stalls while the backend dies. It is called
// concurrently and a panic in it fails the attempt.
//
// The default is connections of the pool's own: no compression, no proxy from the
// environment, DefaultMaxIdleConns idle connections per backend.
func WithTransport(rt http.RoundTripper) Option {
	return optionFunc(func(c *config) {
		if isNil(rt) {
			c.faultf("WithTransport: the RoundTripper is nil: leave the option out for the default")
			return
		}
		if t, ok := rt.(*http.Transport); ok && t.Protocols != nil && !t.Protocols.HTTP1() {
			c.faultf("WithTransport: the Transport's Protocols (%v) lack HTTP/1.1, which is what the pool speaks over it: for HTTP/2 leave WithTransport out, with https or h2c targets", t.Protocols)
			return
		}
		c.transport = rt
	})
}

// WithDialer sets how connections to backends are opened: network is "tcp" and addr the
// target's host and port, or "unix" and the path of the socket. It holds for the pool's own connections, and for those of an
// *http.Transport of WithTransport that has no dialer of its own. dial is called
// concurrently; ctx ends when Timeouts.Dial is over, when the request that wants the
// connection ends, or with the pool. A panic in it fails the attempt. The default is that
// of a net.Dialer.
func WithDialer(dial func(ctx context.Context, network, addr string) (net.Conn, error)) Option {
	return optionFunc(func(c *config) {
		if dial == nil {
			c.faultf("WithDialer: the function is nil: leave the option out for the default")
			return
		}
		c.dialer, c.ownDialer = dial, true
	})
}

// WithConnections sets how long connections to backends are kept. Without it the defaults
// of Connections hold.
func WithConnections(conns Connections) Option {
	return optionFunc(func(c *config) { c.connections = conns })
}

// WithTrustedProxies sets whom the pool believes about the way that a request has
// taken before it came here. Without it that is nobody. See also ClientIP.
func WithTrustedProxies(p TrustedProxies) Option {
	return optionFunc(func(c *config) {
		c.trust = trust{}
		c.trust.read(p, c)
	})
}

// WithForwarded makes ServeHTTP tell backends of a request's peer in the Forwarded field
// (RFC 7239) too, beside the X-Forwarded fields: its address, the host it asked for and
// the protocol. What a trusted proxy has put there is added to. By default the field is
// taken out.
func WithForwarded() Option {
	return optionFunc(func(c *config) { c.forwarded = true })
}

// WithVia makes ServeHTTP add name to the Via field of requests and answers (RFC 9110,
// section 7.6.3), so that loops can be seen: a pseudonym, or a host with an optional port.
// The default is not to.
func WithVia(name string) Option {
	return optionFunc(func(c *config) {
		if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r != ':' && notInToken(r) }) {
			c.faultf("WithVia: %q: want a name, or a host with an optional port", name)
			return
		}
		c.via = name
	})
}

// WithUpgrades sets which upgrades ServeHTTP passes on. Without it that is WebSocket.
// RoundTrip passes on what its caller asks for.
func WithUpgrades(u Upgrades) Option {
	return optionFunc(func(c *config) { c.upgrades = u })
}

// WithRewrite sets a hook that may change each request on its way to a backend, once
// per attempt: an attempt does not see what the hook did for another. f is called
// concurrently, on the request's goroutine, and must not keep what it is given. If it
// panics, or makes of the request what cannot be sent, that is answered with 500 and goes
// nowhere else. BackendFrom finds the backend in the context of ProxyRequest.Out too.
func WithRewrite(f func(*ProxyRequest)) Option {
	return optionFunc(func(c *config) {
		if f == nil {
			c.faultf("WithRewrite: the function is nil: leave the option out to change nothing")
			return
		}
		c.rewrite = f
	})
}

// WithModifyResponse sets a hook that may change the answer that ServeHTTP is about to
// pass on: its status, header and body. It is called once per request that is answered,
// not for answers that are retried, concurrently, on the request's goroutine.
// Response.Request is the request as it came, and BackendFrom of its context the
// backend. A hook that puts another Body in place closes the old one, or has its Close do
// so, and sets the field Content-Length to the new length or takes it out: an answer of
// another length than it says is cut. It is called for the 101 of an upgrade too. An error,
// a panic, or a status that is no final answer's discards the answer: the request is
// answered with 502 through WithErrorHandler.
func WithModifyResponse(f func(*http.Response) error) Option {
	return optionFunc(func(c *config) {
		if f == nil {
			c.faultf("WithModifyResponse: the function is nil: leave the option out to change nothing")
			return
		}
		c.modify = f
	})
}

// WithOriginalLocation passes the fields Location and Content-Location of answers on as
// they are. Without it ServeHTTP makes those that name the backend's own origin, or a path
// below that of the target's URL, paths of the pool's own: clients neither see addresses of
// backends in them nor are led past the pool. What a middleware such as http.StripPrefix
// has taken off the path is not put back in front: a hook of WithModifyResponse can.
func WithOriginalLocation() Option {
	return optionFunc(func(c *config) { c.keepLocation = true })
}

// WithErrorHandler sets who answers when ServeHTTP has no backend's answer to
// pass on. StatusOf tells the status that fits err; errors.AsType finds an
// *AttemptError in it. The text of err names backends and belongs into a log,
// not into the reply. r is the request as it came.
//
// f is called on the request's goroutine, concurrently for different requests,
// before anything was written to w. It is not called for a client that left:
// nobody would read the reply. The field Retry-After is set already when the status
// is 503. The default replies with the status and its standard text or, to a request of
// gRPC, with the grpc-status that fits: 14 (unavailable) for most, 4 for a time-out.
func WithErrorHandler(f func(w http.ResponseWriter, r *http.Request, err error)) Option {
	return optionFunc(func(c *config) {
		if f == nil {
			c.faultf("WithErrorHandler: the function is nil: leave the option out for the default reply")
			return
		}
		c.errorHandler = f
	})
}

// WithLogger sets where the pool reports, at level Info unless it says otherwise:
//
//	backend added, backend removed
//	backend state changed         from, to and reason; Warn if it was ejected or has
//	                              become unhealthy
//	no backend is usable          Error; what the pool does about it
//	backends are usable again
//	backend fails but stays       Warn; as the last usable one, or one of too many
//	panics and other misbehaviour of user code: Error
//
// Each change of state is told once, the last two the first, second, fourth, eighth time
// and so on. Requests are not logged; see Record. The default logs
// nothing. The logger is called without any lock held, on the goroutine that caused
// the record; changes come in their order, one at a time.
func WithLogger(l *slog.Logger) Option {
	return optionFunc(func(c *config) {
		if l == nil {
			c.faultf("WithLogger: the logger is nil: leave the option out to log nothing")
			return
		}
		c.logger = l
	})
}

// Timeouts bounds the stages of one attempt, and the writes of its answer. The zero
// value means the defaults; a negative value turns that bound off. What bounds a whole request is
// RetryPolicy.Total and the request's own context.
type Timeouts struct {
	// Dial bounds one dial. Zero means DefaultDialTimeout.
	Dial time.Duration
	// TLSHandshake bounds the handshake after a dial to an https target. Zero
	// means DefaultTLSHandshakeTimeout.
	TLSHandshake time.Duration
	// ResponseHeader bounds the wait for the answer's headers once the request has been
	// sent whole; the answer's body is not bounded. Zero means
	// DefaultResponseHeaderTimeout, which leaves time for slow answers. A backend that
	// accepts requests and hangs is found out, and another one asked, only when this time
	// is up, and not at all if clients give up before: set it below their patience and
	// well below RetryPolicy.Total, to little more than the slowest good answer takes.
	//
	// Requests that ask for an upgrade and those of gRPC, which have deadlines of their
	// own, are exempt, and so are targets with a Handler. (A field that the client sends
	// is enough to be exempt; what a server can do about that is its own WriteTimeout.)
	ResponseHeader time.Duration
	// ClientWrite bounds each write of an answer to the client, instead of the server's
	// WriteTimeout, which bounds the whole answer, and of its ReadTimeout, once the
	// answer has begun. So a server with ordinary time-outs can stream for hours, and a
	// client that takes nothing any more is let go. Zero, the default, leaves the
	// server's time-outs as they are, and so does a negative value. It has no effect on a
	// writer that knows no deadlines, nor on tunnels.
	ClientWrite time.Duration
}

func (t *Timeouts) fill(*config) {
	t.Dial = timeoutOr(t.Dial, DefaultDialTimeout)
	t.TLSHandshake = timeoutOr(t.TLSHandshake, DefaultTLSHandshakeTimeout)
	t.ResponseHeader = timeoutOr(t.ResponseHeader, DefaultResponseHeaderTimeout)
	t.ClientWrite = max(0, t.ClientWrite)
}

// timeoutOr resolves a time-out setting to what net/http understands: zero, the
// user's "default", becomes def, and a negative value, "none", becomes zero.
func timeoutOr(d, def time.Duration) time.Duration {
	switch {
	case d == 0:
		return def
	case d < 0:
		return 0
	}
	return d
}
