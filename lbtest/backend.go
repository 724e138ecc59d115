package lbtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
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

	// maxReceived is how many requests a backend remembers.
	maxReceived = 10_000
)

// Received is what a backend knows of one request. It is recorded when the
// request's header has arrived; the facts about its body follow as they become
// known.
type Received struct {
	// Seq numbers the requests in order of arrival, from 1.
	Seq int `json:"seq"`
	// Method is the request's method.
	Method string `json:"method"`
	// Target is the request target, byte for byte as in the request line.
	Target string `json:"target"`
	// Host is the Host header, or the host of an absolute target.
	Host string `json:"host"`
	// Header has all other headers but Transfer-Encoding and Trailer, which
	// net/http takes out.
	Header http.Header `json:"header"`
	// BodyBytes counts the body bytes read so far.
	BodyBytes int64 `json:"body_bytes"`
	// BodySHA256 is the hash of the body in hex, empty until all of the body
	// was read.
	BodySHA256 string `json:"body_sha256"`
	// BodyErr is why the body could not be read to its end, or nil.
	BodyErr error `json:"-"`
	// Conn is the number of the connection, from 1 in order of acceptance.
	Conn int `json:"conn"`
	// Reused is true unless this was the first request of its connection.
	Reused bool `json:"reused"`
	// At is when the header had arrived.
	At time.Time `json:"at"`
	// Canceled is true if the client left before it was answered (with Handle:
	// before the handler returned). It is known when the backend is done with
	// the request.
	Canceled bool `json:"canceled"`
}

// Backend is an HTTP/1.1 server with a [Behavior] that can be changed at any
// time, and a record of the requests it received.
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
	serving       int
	maxServing    int
	count         int
	records       []*Received    // a ring once it has maxReceived elements
	oldest        int            // where the ring starts
	arrivals      map[string]int // of the ids in records
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
		tb:       tb,
		name:     name,
		listen:   listen,
		conns:    make(map[*conn]struct{}),
		arrivals: make(map[string]int),
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
// requests that are being served keep the behaviour they started with. See
// [Refuse] for what it does to connections. After Close, Set does nothing.
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
// last 10,000. They are copies: the caller may keep and change them.
func (b *Backend) Received() []Received {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]Received, 0, len(b.records))
	for i := range b.records {
		all = append(all, b.records[(b.oldest+i)%len(b.records)].clone())
	}
	return all
}

// Count returns how many requests have arrived, including those that Received
// no longer keeps.
func (b *Backend) Count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count
}

// Arrivals returns how many of the requests that Received returns had id in
// their RequestIDHeader.
func (b *Backend) Arrivals(id string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.arrivals[id]
}

// MaxConcurrent returns the highest number of requests served at one time.
func (b *Backend) MaxConcurrent() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.maxServing
}

// OpenConns returns how many connections are open now. One that the client
// closes counts until the backend has noticed.
func (b *Backend) OpenConns() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.conns)
}

// TotalConns returns how many connections were accepted.
func (b *Backend) TotalConns() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lastConn - b.forgottenConn
}

// Forget clears what was recorded: requests, counts and the highest
// concurrency. Requests still being served count for MaxConcurrent again;
// Received.Seq starts from 1, connections keep their numbers.
func (b *Backend) Forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.records, b.oldest, b.count = nil, 0, 0
	b.forgottenConn = b.lastConn
	b.maxServing = b.serving
	clear(b.arrivals)
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

// accept serves the connections of l until l is closed.
func (b *Backend) accept(l net.Listener) {
	b.mu.Lock()
	b.listener = l
	b.mu.Unlock()
	b.running.Go(func() {
		// It returns when l is closed, always with an error.
		_ = b.server.Serve(&listener{Listener: l, backend: b})
	})
}

// admit counts c in, or reports that it came too late. The accepting loop
// calls it, so running is not zero and may be added to.
func (b *Backend) admit(c *conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || b.behavior.kind == refuses {
		return false
	}
	b.lastConn++
	c.number = b.lastConn
	b.conns[c] = struct{}{}
	b.running.Add(1)
	return true
}

// connState is called by net/http in the goroutine of the connection.
func (b *Backend) connState(nc net.Conn, state http.ConnState) {
	c := nc.(*conn)
	switch state {
	case http.StateIdle:
		c.idle.Store(true)
		if c.ahead.Swap(false) && b.closesReused() {
			c.abort()
		}
	case http.StateClosed, http.StateHijacked:
		b.running.Done()
	}
}

func (b *Backend) connsLocked() []*conn {
	open := make([]*conn, 0, len(b.conns))
	for c := range b.conns {
		open = append(open, c)
	}
	return open
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
	b.count++
	x.received = &Received{
		Seq:    b.count,
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
	b.recordLocked(x.received)
	b.serving++
	b.maxServing = max(b.maxServing, b.serving)
	return b.behavior, true
}

// recordLocked appends r, in the place of the oldest if there are too many.
func (b *Backend) recordLocked(r *Received) {
	if id := r.Header.Get(RequestIDHeader); id != "" {
		b.arrivals[id]++
	}
	if len(b.records) < maxReceived {
		b.records = append(b.records, r)
		return
	}
	id := b.records[b.oldest].Header.Get(RequestIDHeader)
	if b.arrivals[id]--; b.arrivals[id] <= 0 {
		delete(b.arrivals, id)
	}
	b.records[b.oldest] = r
	b.oldest = (b.oldest + 1) % maxReceived
}

// end completes the record when the handler returns or panics.
func (b *Backend) end(x *exchange) {
	left := x.r.Context().Err() != nil
	b.mu.Lock()
	defer b.mu.Unlock()
	b.serving--
	left = left || connectionLost(x.received.BodyErr)
	// A client may leave as soon as it has the answer. A connection that the
	// backend ended says nothing about the client.
	x.received.Canceled = left && !x.answered && !x.conn.aborted.Load()
}

func (r *Received) clone() Received {
	c := *r
	c.Header = r.Header.Clone()
	return c
}

// connKey is the context key of a request's *conn.
type connKey struct{}

// listener wraps what it accepts in a conn.
type listener struct {
	net.Listener
	backend *Backend
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: nc, backend: l.backend}
		if l.backend.admit(c) {
			return c, nil
		}
		c.reset()
	}
}

// conn is a connection of a backend; it is in the backend's set until closed.
type conn struct {
	net.Conn
	backend  *Backend
	number   int         // set before it is served
	requests int         // guarded by the backend's lock
	idle     atomic.Bool // between two requests; net/http sets it, Read clears it
	ahead    atomic.Bool // a further request began to arrive during the last one
	aborted  atomic.Bool // the backend, not the client, ended it; never cleared
}

// Read ends the connection if this is the start of a further request and the
// backend closes reused connections.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	// While a handler runs, net/http reads a single byte to notice that the
	// client leaves; nothing else in it reads so little. A byte that it finds
	// must not close the connection under the answer: connState does it after.
	if n > 0 && len(p) == 1 {
		c.ahead.Store(true)
	}
	if n > 0 && c.idle.Swap(false) && c.backend.closesReused() {
		c.abort()
		return 0, io.EOF // net/http answers most other errors
	}
	return n, err
}

func (b *Backend) closesReused() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.behavior.kind == closesReused
}

// Close takes c out of the set and closes it.
func (c *conn) Close() error {
	c.backend.mu.Lock()
	delete(c.backend.conns, c)
	c.backend.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite lets net/http end a connection without a reset, as it does with
// a *net.TCPConn.
func (c *conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// abort closes c on behalf of the backend.
func (c *conn) abort() {
	c.aborted.Store(true)
	_ = c.Close() // whoever closed it first has the error
}

// end ends c the way behavior ends connections.
func (c *conn) end(behavior Behavior) {
	if behavior.kind == refuses {
		c.reset()
		return
	}
	c.abort()
}
