package lbtest

import (
	"context"
	"crypto/sha256"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

const (
	// RequestIDHeader names the request header that [Backend.Arrivals] counts
	// by.
	RequestIDHeader = "Request-Id"

	// BackendHeader names the response header in which a backend gives its
	// name.
	BackendHeader = "Backend"
)

// Backend is an HTTP/1.1 server with a [Behavior] that can be changed at any
// time, and a record of the requests it received. Its health probe can have a
// behaviour and a record of its own, see SetProbe.
//
// NewBackend and Network.NewBackend start one; the zero value is not usable.
// It starts with [Answer] and ends with Close, which the test's cleanup calls.
// All methods may be called concurrently.
//
// What net/http cannot parse as a request it answers with 400; the backend
// does not see it.
type Backend struct {
	tb     testing.TB
	name   string
	addr   string
	listen func(addr string) (net.Listener, error)
	server *http.Server
	ctx    context.Context // parent of every request's context
	cancel context.CancelFunc

	// running counts what Close waits for: the loops that accept, connections
	// that net/http serves, and handlers.
	running sync.WaitGroup

	switching sync.Mutex // held while behavior and listener change together

	mu            sync.Mutex // guards the following
	behavior      Behavior
	listener      net.Listener // nil while refusing and after Close
	closed        bool
	conns         map[*conn]struct{}
	lastConn      int // number of the connection accepted last
	forgottenConn int // value of lastConn when Forget was called
	serving       int // without probes
	maxServing    int
	traffic       *record
	probePath     string // empty until SetProbe
	probeBehavior Behavior
	probes        *record
}

// NewBackend starts a backend on 127.0.0.1 and a free port. Its name is for
// the test's own use and appears in answers. It is closed when the test ends;
// if it cannot listen, the test fails at once.
func NewBackend(tb testing.TB, name string) *Backend {
	tb.Helper()
	return startBackend(tb, name, "127.0.0.1:0", func(addr string) (net.Listener, error) {
		return net.Listen("tcp", addr)
	})
}

func startBackend(tb testing.TB, name, addr string, listen func(string) (net.Listener, error)) *Backend {
	tb.Helper()
	b := &Backend{
		tb:      tb,
		name:    name,
		listen:  listen,
		conns:   make(map[*conn]struct{}),
		traffic: newRecord(),
		probes:  newRecord(),
	}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	b.server = &http.Server{
		Handler:                      http.HandlerFunc(b.serveHTTP),
		ErrorLog:                     log.New(io.Discard, "", 0),
		Protocols:                    protocols,
		DisableGeneralOptionsHandler: true, // OPTIONS * is a request like any other
		BaseContext:                  func(net.Listener) context.Context { return b.ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		ConnState: b.connState,
	}
	l, err := listen(addr)
	if err != nil {
		b.cancel()
		tb.Fatalf("lbtest: backend %q: %v", name, err)
	}
	b.addr = l.Addr().String()
	b.accept(l)
	tb.Cleanup(b.Close)
	return b
}

// Name returns the name the backend was given.
func (b *Backend) Name() string { return b.name }

// URL returns "http://" and the address, without a trailing slash.
func (b *Backend) URL() string { return "http://" + b.addr }

// Addr returns the address as "host:port". It stays the same for the life of
// the backend.
func (b *Backend) Addr() string { return b.addr }

// Set changes what the backend does with requests that arrive from now on;
// requests that are being served keep the behaviour they started with, and
// those for the path of SetProbe have their own. See [Refuse] for what it does
// to connections. After Close, Set does nothing.
func (b *Backend) Set(behavior Behavior) {
	b.switching.Lock()
	defer b.switching.Unlock()
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return
	}
	b.behavior = behavior
	l := b.listener
	var open []*conn
	if behavior.kind == refuses {
		b.listener = nil
		open = b.connsLocked()
	}
	b.mu.Unlock()
	switch {
	case behavior.kind != refuses && l == nil:
		l, err := b.listen(b.addr)
		if err != nil {
			b.tb.Errorf("lbtest: backend %q cannot listen again: %v", b.name, err)
			return
		}
		b.accept(l)
	case behavior.kind == refuses && l != nil:
		l.Close()
	}
	for _, c := range open {
		c.reset()
	}
}

// Received returns the requests in order of arrival, of which it keeps the
// last 10,000. They are copies: the caller may keep and change them. Those for
// the path of SetProbe are not among them: see Probes.
func (b *Backend) Received() []Received {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.traffic.all()
}

// Count returns how many requests have arrived, including those that Received
// no longer keeps, without those that ProbeCount counts.
func (b *Backend) Count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.traffic.count
}

// Arrivals returns how many of the requests that Received returns had id in
// their RequestIDHeader.
func (b *Backend) Arrivals(id string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.traffic.arrivals[id]
}

// MaxConcurrent returns the highest number of requests served at one time,
// not counting probes.
func (b *Backend) MaxConcurrent() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.maxServing
}

// OpenConns returns how many connections are open now, those for probes too.
// One that the client closes counts until the backend has noticed.
func (b *Backend) OpenConns() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.conns)
}

// TotalConns returns how many connections were accepted, those for probes too.
func (b *Backend) TotalConns() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lastConn - b.forgottenConn
}

// Forget clears what was recorded: requests, probes, counts and the highest
// concurrency. Requests still being served count for MaxConcurrent again;
// Received.Seq starts from 1, connections keep their numbers. What Set and
// SetProbe have set stays.
func (b *Backend) Forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.traffic, b.probes = newRecord(), newRecord()
	b.forgottenConn = b.lastConn
	b.maxServing = b.serving
}

// Close closes the listener and all connections, so that every request being
// served fails, and waits until the goroutines of the backend have ended.
// Closing twice is allowed; closing from within a handler is not.
func (b *Backend) Close() {
	b.switching.Lock()
	b.mu.Lock()
	b.closed = true
	l := b.listener
	b.listener = nil
	open := b.connsLocked()
	b.mu.Unlock()
	b.switching.Unlock()
	if l != nil {
		l.Close()
	}
	// The connections go first: a handler that gives up because its context
	// ended must not be able to end its answer properly.
	for _, c := range open {
		c.abort()
	}
	b.cancel()
	b.server.Close()
	b.running.Wait()
}

func (b *Backend) serveHTTP(w http.ResponseWriter, r *http.Request) {
	b.running.Add(1)
	defer b.running.Done()
	x := &exchange{backend: b, conn: r.Context().Value(connKey{}).(*conn), w: w, r: r}
	behavior, ok := b.begin(x)
	if !ok {
		x.conn.end(behavior)
		panic(http.ErrAbortHandler)
	}
	defer b.end(x)
	r.Body = &body{ReadCloser: r.Body, exchange: x, hash: sha256.New()}
	w.Header().Set(BackendHeader, b.name)
	behavior.run(x)
}

// begin records the request and returns the behavior for it. It returns false
// and records nothing if the connection should be over: the request arrived
// before Set or conn.Read could end it.
func (b *Backend) begin(x *exchange) (Behavior, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	x.conn.requests++
	reused := x.conn.requests > 1
	if kind := b.behavior.kind; kind == refuses || kind == closesReused && reused {
		return b.behavior, false
	}
	x.received = &Received{
		Method: x.r.Method,
		Target: x.r.RequestURI,
		Host:   x.r.Host,
		Header: x.r.Header.Clone(),
		Conn:   x.conn.number,
		Reused: reused,
		At:     time.Now(),
	}
	if x.r.Body == http.NoBody {
		x.received.BodySHA256 = hexSum(sha256.New())
	}
	if b.isProbeLocked(x.r) {
		x.probe = true
		b.probes.add(x.received)
		return b.probeBehavior, true
	}
	b.traffic.add(x.received)
	b.serving++
	b.maxServing = max(b.maxServing, b.serving)
	return b.behavior, true
}

// end completes the record when the handler returns or panics.
func (b *Backend) end(x *exchange) {
	left := x.r.Context().Err() != nil
	b.mu.Lock()
	defer b.mu.Unlock()
	if !x.probe {
		b.serving--
	}
	left = left || connectionLost(x.received.BodyErr)
	// A client may leave as soon as it has the answer. A connection that the
	// backend ended says nothing about the client.
	x.received.Canceled = left && !x.answered && !x.conn.aborted.Load()
}
