package lb

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"unicode/utf8"

	"example.com/lb/internal/h1"
)

// hold makes the connections to e our own.
func (c *conns) hold(e endpoint, cfg *config, work *gate) {
	c.owned, c.raw = true, true
	dial := c.bounded(cfg.dialer, cfg.timeouts)
	tlsConfig := clientConfig(e.tls)
	c.own = h1.New(c.settings(cfg, work, dialing(dial, cfg.timeouts, e, tlsConfig)))
	if cfg.check == nil {
		return
	}
	c.probe = probeTransport(func(e endpoint) *h1.Pool {
		return h1.New(c.settings(cfg, work, dialing(dial, Timeouts{}, e, tlsConfig)))
	})
	c.dial = forProbe(c.registered(dial))
	c.dialTLS = handshaking(c.dial, tlsConfig)
}

// clientConfig returns a copy of config to make connections with, which it has all to
// itself.
func clientConfig(config *tls.Config) *tls.Config {
	own := config.Clone()
	if own == nil {
		own = new(tls.Config)
	}
	own.NextProtos = nil
	if own.ClientSessionCache == nil {
		own.ClientSessionCache = tls.NewLRUClientSessionCache(tlsSessions)
	}
	return own
}

// tlsSessions is how many sessions are kept for a backend, to resume: its connections
// have one at a time.
const tlsSessions = 8

// settings returns those of connections that dial opens.
func (c *conns) settings(cfg *config, work *gate, dial func(context.Context, func(net.Conn) net.Conn) (net.Conn, error)) h1.Config {
	return h1.Config{
		Dial: dial,
		Go: func(f func()) bool {
			if !work.enter() {
				return false
			}
			go func() {
				defer work.leave()
				f()
			}()
			return true
		},
		Opened:          c.all.add,
		Closed:          c.all.remove,
		MaxIdle:         DefaultMaxIdleConns,
		IdleTimeout:     DefaultIdleConnTimeout,
		HeaderTimeout:   cfg.timeouts.ResponseHeader,
		ContinueTimeout: DefaultExpectContinueTimeout,
		MaxHeaderBytes:  DefaultMaxHeaderBytes,
	}
}

// handshakeError is what went wrong between dial and request.
type handshakeError struct{ error }

func (e handshakeError) Unwrap() error { return e.error }

// connectStage is the stage of an attempt that got no connection because of err.
func connectStage(err error) Stage {
	if errors.Is(err, h1.ErrRequest) {
		return StageRequest // which was not even tried
	}
	if _, ok := errors.AsType[handshakeError](err); ok {
		return StageTLS
	}
	return StageDial
}

// dialing returns how a connection to e is opened, with a handshake if there is to be one.
func dialing(dial dialFunc, limits Timeouts, e endpoint, tlsConfig *tls.Config) func(context.Context, func(net.Conn) net.Conn) (net.Conn, error) {
	addr := e.addr()
	return func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
		nc, err := dial(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		nc = count(nc)
		if e.scheme != "https" {
			return nc, nil
		}
		tc, err := shakeHands(ctx, nc, tlsConfig, addr, limits)
		if err != nil {
			nc.Close()
			return nil, handshakeError{fmt.Errorf("TLS handshake: %w", err)}
		}
		return tc, nil
	}
}

// registered returns dial with its connections known to the pool, which closes them when
// it is closed.
func (c *conns) registered(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		known := &knownConn{Conn: nc, all: c.all}
		if !c.all.add(known) {
			nc.Close()
			return nil, ErrClosed
		}
		return known, nil
	}
}

// knownConn is a connection that the pool knows of.
type knownConn struct {
	net.Conn
	all *connSet
}

func (c *knownConn) Close() error {
	c.all.remove(c)
	return c.Conn.Close()
}

// fillRequest makes r what goes out.
func fillRequest(out *h1.Request, r *http.Request) {
	*out = h1.Request{
		Method: r.Method, Target: r.URL.Opaque, Query: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery,
		Host: r.Host, Header: r.Header, Body: r.Body, Length: r.ContentLength, Trailer: r.Trailer, Close: r.Close,
		NoHeaderTimeout: len(r.Header["Upgrade"]) > 0,
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

// probeTransport sends each request over a connection of its own, to where its URL says.
type probeTransport func(endpoint) *h1.Pool

func (t probeTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	var out h1.Request
	fillRequest(&out, r)
	out.Close, out.NoHeaderTimeout = true, true // a probe has a time-out of its own
	out.Trace = httptrace.ContextClientTrace(r.Context())
	pool := t(endpoint{scheme: r.URL.Scheme, host: r.URL.Host})
	return pool.RoundTrip(r.Context(), new(h1.Exchange), &out, noEvents{}, r)
}

// noEvents hears of what nobody wants to know.
type noEvents struct{}

func (noEvents) GotConn(net.Conn, bool)                        {}
func (noEvents) Informational(int, textproto.MIMEHeader) error { return nil }

var _ io.Closer = (*knownConn)(nil)
