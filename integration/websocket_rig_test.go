package integration

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/lb"
)

// A pool between WebSocket clients and servers, and what is seen at either end.

// wsPair is a client, a server and what is in front of the pool between them.
type wsPair struct {
	client, server library
	front          front
	crowd          int // how many clients there are where there are many
}

// front starts a server in front of a pool.
type front func(pool http.Handler) *httptest.Server

// withTimeouts is a front with the time-outs of a gateway's server, and with those that
// bound whole requests besides.
func withTimeouts(limit time.Duration) front {
	return func(pool http.Handler) *httptest.Server {
		s := httptest.NewUnstartedServer(pool)
		s.Config.ReadHeaderTimeout, s.Config.IdleTimeout = 10*time.Second, 2*time.Minute
		s.Config.ReadTimeout, s.Config.WriteTimeout = limit, limit
		s.Start()
		return s
	}
}

// wsSetup is what is behind the pool.
type wsSetup struct {
	backends int      // 1 if not set
	dead     []string // addresses of backends that do not live
	accept   wsOptions
	serve    func(*session) error // what backends do with a connection
	spread   time.Duration        // see lb.Upgrades.CloseSpread
}

// wsRig is a pool in use by WebSockets.
type wsRig struct {
	wsPair
	pool     *lb.Pool
	backends []*wsBackend
	server   *httptest.Server // in front of the pool

	mu      sync.Mutex // guards the following
	clients []*wsClient
}

// rig makes one. When the test ends, so must all that was begun.
func (p wsPair) rig(t *testing.T, setup wsSetup) *wsRig {
	t.Helper()
	r := &wsRig{wsPair: p}
	var urls []string
	for _, addr := range setup.dead {
		urls = append(urls, "http://"+addr)
	}
	for range max(setup.backends, 1) {
		b := startWSBackend(t, p.server, setup)
		r.backends = append(r.backends, b)
		urls = append(urls, b.server.URL)
	}
	pool, err := lb.New(lb.Targets(urls...), lb.WithUpgrades(lb.Upgrades{CloseSpread: setup.spread}))
	if err != nil {
		t.Fatal(err)
	}
	r.pool = pool
	t.Cleanup(func() { pool.Close() })
	if p.front != nil {
		r.server = p.front(pool)
		t.Cleanup(r.server.Close)
	}
	t.Cleanup(func() { r.end(t) })
	return r
}

// end ends the clients and waits until nothing is left of them.
func (r *wsRig) end(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	for _, c := range r.clients {
		c.leave()
	}
	r.mu.Unlock()
	r.waitIdle(t)
}

// waitIdle waits until nothing is under way in the pool and at the backends.
func (r *wsRig) waitIdle(t *testing.T) {
	t.Helper()
	wait(t, "nothing in flight", func() bool { return r.pool.Stats().InFlight == 0 })
	for i, b := range r.backends {
		wait(t, fmt.Sprintf("the handlers of backend %d to end", i), func() bool { return b.live.Load() == 0 })
	}
}

// backend is the only one.
func (r *wsRig) backend() *wsBackend { return r.backends[0] }

// dial connects a client, or fails the test.
func (r *wsRig) dial(t *testing.T, path string, o wsOptions) *wsClient {
	t.Helper()
	c, err := r.tryDial(path, o)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	return c
}

// tryDial connects a client. Without one, it returns the answer, if there is one.
func (r *wsRig) tryDial(path string, o wsOptions) (*wsClient, error) {
	c := newWSClient(nil)
	o.transport = &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			nc, err := new(net.Dialer).DialContext(ctx, network, addr)
			c.raw = nc
			return nc, err
		},
		TLSClientConfig: r.server.Client().Transport.(*http.Transport).TLSClientConfig.Clone(),
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	c.socket, c.answer, err = r.client.dial(ctx, "ws"+strings.TrimPrefix(r.server.URL, "http")+path, o)
	if err != nil {
		o.transport.CloseIdleConnections()
		return c, err
	}
	r.take(c)
	return c, nil
}

// take makes c, which is connected, a client of the rig's.
func (r *wsRig) take(c *wsClient) {
	r.mu.Lock()
	r.clients = append(r.clients, c)
	r.mu.Unlock()
	go c.pump()
}

// wsClient is a client whose messages are read all the time.
type wsClient struct {
	socket
	raw    net.Conn
	answer *http.Response // to the handshake
	begun  atomic.Int64   // messages of which a byte has come
	in     chan wsMessage // ends with an error
	once   sync.Once
	left   chan struct{}
}

type wsMessage struct {
	kind int
	data []byte
	err  error
}

func newWSClient(s socket) *wsClient {
	return &wsClient{socket: s, in: make(chan wsMessage, 16), left: make(chan struct{})}
}

func (c *wsClient) pump() {
	for {
		m := read(c.socket, func() { c.begun.Add(1) })
		select {
		case c.in <- m:
		case <-c.left:
			return
		}
		if m.err != nil {
			return
		}
	}
}

// read waits for a whole message.
func read(s socket, begun func()) (m wsMessage) {
	kind, r, err := s.next()
	if err != nil {
		return wsMessage{err: err}
	}
	first := make([]byte, 1)
	switch _, err := io.ReadFull(r, first); err {
	case nil:
	case io.EOF:
		return wsMessage{kind: kind}
	default:
		return wsMessage{err: err}
	}
	begun()
	whole := bytes.NewBuffer(first)
	_, err = whole.ReadFrom(r)
	return wsMessage{kind, whole.Bytes(), err}
}

// receive returns the next message, or the error that ended the connection.
func (c *wsClient) receive() (wsMessage, error) {
	select {
	case m := <-c.in:
		return m, m.err
	case <-time.After(patience):
		return wsMessage{}, fmt.Errorf("waited %v in vain for a message", patience)
	}
}

// ended returns the error that ended the connection, which must be the next to come.
func (c *wsClient) ended(t *testing.T) error {
	t.Helper()
	select {
	case m := <-c.in:
		if m.err == nil {
			t.Fatalf("a message of %d bytes has come, want an error", len(m.data))
		}
		return m.err
	case <-time.After(patience):
		t.Fatalf("waited %v in vain for the end of the connection", patience)
	}
	return nil
}

// echo sends a message to a backend that sends it back.
func (c *wsClient) echo(kind int, data []byte) error {
	if err := c.write(kind, data); err != nil {
		return err
	}
	m, err := c.receive()
	if err != nil {
		return err
	}
	if m.kind != kind || !bytes.Equal(m.data, data) {
		return fmt.Errorf("%d bytes of kind %d came back as %d of kind %d", len(data), kind, len(m.data), m.kind)
	}
	return nil
}

// leave closes the connection without a word.
func (c *wsClient) leave() {
	c.once.Do(func() { close(c.left) })
	c.abort()
}

// kill closes a TCP connection, and lets its peer see a reset if so wanted.
func kill(raw net.Conn, reset bool) {
	if reset {
		_ = raw.(*net.TCPConn).SetLinger(0) // fails if it is closed
	}
	raw.Close()
}

// wsBackend is a server of WebSockets.
type wsBackend struct {
	server       *httptest.Server
	opened, live atomic.Int64
	sessions     chan *session
	ended        chan error // how each of them ended
}

// session is a connection at its backend.
type session struct {
	socket
	request *http.Request
	raw     *recordedConn
}

func (s *session) read() wsMessage { return read(s.socket, func() {}) }

// rawKey finds the connection in the context of its request.
type rawKey struct{}

func startWSBackend(t *testing.T, lib library, setup wsSetup) *wsBackend {
	t.Helper()
	b := &wsBackend{sessions: make(chan *session, 100), ended: make(chan error, 100)}
	b.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/forbidden" {
			http.Error(w, "not you", http.StatusForbidden)
			return
		}
		c, err := lib.accept(w, r, setup.accept)
		if err != nil {
			return // it has answered
		}
		b.opened.Add(1)
		b.live.Add(1)
		defer b.live.Add(-1)
		s := &session{c, r, r.Context().Value(rawKey{}).(*recordedConn)}
		b.sessions <- s
		err = setup.serve(s)
		c.abort()
		b.ended <- err
	}))
	b.server.Listener = recordingListener{b.server.Listener}
	b.server.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, rawKey{}, c)
	}
	b.server.Start()
	t.Cleanup(b.server.Close)
	return b
}

// echo sends back what comes.
func echo(s *session) error {
	for {
		m := s.read()
		if m.err != nil {
			return m.err
		}
		if err := s.write(m.kind, m.data); err != nil {
			return err
		}
	}
}

// session waits for the next connection.
func (b *wsBackend) session(t *testing.T) *session {
	t.Helper()
	select {
	case s := <-b.sessions:
		return s
	case <-time.After(patience):
		t.Fatalf("waited %v in vain for a connection", patience)
		return nil
	}
}

// end waits until a connection has ended and returns how.
func (b *wsBackend) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-b.ended:
		return err
	case <-time.After(patience):
		t.Fatalf("waited %v in vain for a handler to end", patience)
		return nil
	}
}

type recordingListener struct{ net.Listener }

func (l recordingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &recordedConn{Conn: c}, nil
}

// recordedConn keeps the beginning of what passes.
type recordedConn struct {
	net.Conn
	mu      sync.Mutex // guards the following
	in, out []byte
}

// recordLimit is how much of each direction is kept.
const recordLimit = 16 << 10

func (c *recordedConn) keep(to *[]byte, p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*to = append(*to, p[:min(len(p), recordLimit-len(*to))]...)
}

func (c *recordedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.keep(&c.in, p[:n])
	return n, err
}

func (c *recordedConn) Write(p []byte) (int, error) {
	c.keep(&c.out, p) // before anybody can have answered
	return c.Conn.Write(p)
}

// frames returns what has come and gone behind the handshake.
func (c *recordedConn) frames() (in, out []wsFrame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return framesIn(c.in), framesIn(c.out)
}

// wsFrame is the head of a frame (RFC 6455, section 5.2).
type wsFrame struct {
	opcode           byte
	last, compressed bool
	length           int
}

// The opcodes.
const (
	opContinuation, opText, opPing = 0, 1, 9
)

// halfFrame is the begin of a message in one frame that has more.
func halfFrame() []byte {
	const length, here = 1000, 10
	return append([]byte{128 | binaryData, 126, length >> 8, length & 255}, make([]byte, here)...)
}

// framesIn returns the whole frames that follow the head of a request or an answer.
func framesIn(recorded []byte) (list []wsFrame) {
	_, b, _ := bytes.Cut(recorded, []byte("\r\n\r\n"))
	for len(b) >= 2 {
		f := wsFrame{opcode: b[0] & 15, last: b[0]&128 != 0, compressed: b[0]&64 != 0, length: int(b[1] & 127)}
		head := 2
		switch {
		case f.length == 126 && len(b) >= 4:
			f.length, head = int(binary.BigEndian.Uint16(b[2:])), 4
		case f.length == 127 && len(b) >= 10:
			f.length, head = int(binary.BigEndian.Uint64(b[2:])), 10
		}
		if b[1]&128 != 0 { // masked
			head += 4
		}
		if len(b)-head < f.length {
			break
		}
		list, b = append(list, f), b[head+f.length:]
	}
	return list
}

// seen lists what callbacks were given.
type seen struct {
	mu   sync.Mutex // guards the following
	list []string
}

// add returns how many there are now.
func (s *seen) add(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, what)
	return len(s.list)
}

func (s *seen) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list)
}

// await waits for the n-th.
func (s *seen) await(n int) error {
	for began := time.Now(); len(s.all()) < n; time.Sleep(time.Millisecond) {
		if time.Since(began) > patience {
			return fmt.Errorf("waited %v in vain for callback %d", patience, n)
		}
	}
	return nil
}

// refusing returns an address that nobody listens on, for as long as the test runs: it
// is the own address of a connection.
func refusing(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.LocalAddr().String()
}

// resetting returns the address of a server that resets every connection.
func resetting(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			kill(c, true)
		}
	}()
	return l.Addr().String()
}
