package integration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	coder "github.com/coder/websocket"
	gorilla "github.com/gorilla/websocket"
)

// Two WebSocket libraries under one face.

// The kinds of messages; both libraries give them these numbers.
const text, binaryData = 1, 2

// library is a WebSocket library.
type library struct {
	name   string
	dial   func(ctx context.Context, url string, o wsOptions) (socket, *http.Response, error)
	accept func(w http.ResponseWriter, r *http.Request, o wsOptions) (socket, error)
}

var libraries = []library{
	{"gorilla", dialGorilla, acceptGorilla},
	{"coder", dialCoder, acceptCoder},
}

// wsOptions are those of a dial or of an accept.
type wsOptions struct {
	protocols []string
	deflate   bool
	onPing    func(payload string) (answer bool) // nil answers
	onPong    func(payload string)
	header    http.Header     // of a client
	transport *http.Transport // of a client: how it dials and whom it trusts
}

// socket is one end of a WebSocket connection. next needs one caller at a time, and so
// have write, begin and end together; ping may be called beside them.
type socket interface {
	protocol() string
	// next waits for a message and returns its kind and content.
	next() (int, io.Reader, error)
	write(kind int, data []byte) error
	// begin writes parts of one message, calling between after each of them; end ends it.
	begin(kind int, between func() error, parts ...[]byte) error
	end() error
	// ping sends a ping and returns its payload; want is one, if the library takes it.
	ping(want string) string
	// shut sends the frame that closes.
	shut(code int, reason string) error
	// abort closes the connection without it.
	abort()
}

// wsClosed returns the code and the reason of the frame that closed a connection, -1 if
// err is not from one.
func wsClosed(err error) (code int, reason string) {
	if e, ok := errors.AsType[*gorilla.CloseError](err); ok && e.Code != gorilla.CloseAbnormalClosure {
		return e.Code, e.Text
	}
	if e, ok := errors.AsType[coder.CloseError](err); ok {
		return int(e.Code), e.Reason
	}
	return -1, ""
}

type gorillaSocket struct {
	*gorilla.Conn
	unfinished io.WriteCloser
}

// gorillaBuffer is how long the frames of a message in parts are at most.
const gorillaBuffer = 1024

func dialGorilla(ctx context.Context, url string, o wsOptions) (socket, *http.Response, error) {
	d := gorilla.Dialer{
		NetDialContext: o.transport.DialContext, TLSClientConfig: o.transport.TLSClientConfig,
		Subprotocols: o.protocols, EnableCompression: o.deflate, WriteBufferSize: gorillaBuffer,
	}
	c, resp, err := d.DialContext(ctx, url, o.header)
	if err != nil {
		return nil, resp, err
	}
	return newGorilla(c, o), resp, nil
}

func acceptGorilla(w http.ResponseWriter, r *http.Request, o wsOptions) (socket, error) {
	u := gorilla.Upgrader{Subprotocols: o.protocols, EnableCompression: o.deflate, WriteBufferSize: gorillaBuffer}
	c, err := u.Upgrade(w, r, nil)
	if err != nil {
		return nil, err
	}
	return newGorilla(c, o), nil
}

func newGorilla(c *gorilla.Conn, o wsOptions) socket {
	if answer := c.PingHandler(); o.onPing != nil {
		c.SetPingHandler(func(payload string) error {
			if o.onPing(payload) {
				return answer(payload)
			}
			return nil
		})
	}
	if o.onPong != nil {
		c.SetPongHandler(func(payload string) error { o.onPong(payload); return nil })
	}
	return &gorillaSocket{Conn: c}
}

func (s *gorillaSocket) protocol() string              { return s.Subprotocol() }
func (s *gorillaSocket) next() (int, io.Reader, error) { return s.NextReader() }
func (s *gorillaSocket) abort()                        { s.Close() }

func (s *gorillaSocket) write(kind int, data []byte) error {
	if err := s.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	return s.WriteMessage(kind, data)
}

func (s *gorillaSocket) begin(kind int, between func() error, parts ...[]byte) (err error) {
	if err := s.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if s.unfinished, err = s.NextWriter(kind); err != nil {
		return err
	}
	return writeParts(s.unfinished, between, parts)
}

func (s *gorillaSocket) end() error { return s.unfinished.Close() }

func (s *gorillaSocket) ping(want string) string {
	_ = s.WriteControl(gorilla.PingMessage, []byte(want), time.Now().Add(patience)) // it will be missed
	return want
}

func (s *gorillaSocket) shut(code int, reason string) error {
	return s.WriteControl(gorilla.CloseMessage, gorilla.FormatCloseMessage(code, reason), time.Now().Add(patience))
}

func writeParts(w io.Writer, between func() error, parts [][]byte) error {
	for _, part := range parts {
		if _, err := w.Write(part); err != nil {
			return err
		}
		if err := between(); err != nil {
			return err
		}
	}
	return nil
}

type coderSocket struct {
	*coder.Conn
	pings      atomic.Int64
	unfinished io.WriteCloser
	ctx        context.Context // ends with abort
	cancel     context.CancelFunc
}

func dialCoder(ctx context.Context, url string, o wsOptions) (socket, *http.Response, error) {
	return dialCoderOver(ctx, &http.Client{Transport: o.transport}, url, o)
}

// dialCoderOver dials as client does.
func dialCoderOver(ctx context.Context, client *http.Client, url string, o wsOptions) (socket, *http.Response, error) {
	c, resp, err := coder.Dial(ctx, url, &coder.DialOptions{
		HTTPClient: client, HTTPHeader: o.header, Subprotocols: o.protocols, CompressionMode: coderDeflate(o.deflate),
		OnPingReceived: coderPing(o.onPing), OnPongReceived: coderPong(o.onPong),
	})
	if err != nil {
		return nil, resp, err
	}
	return newCoder(c), resp, nil
}

func acceptCoder(w http.ResponseWriter, r *http.Request, o wsOptions) (socket, error) {
	c, err := coder.Accept(w, r, &coder.AcceptOptions{
		Subprotocols: o.protocols, CompressionMode: coderDeflate(o.deflate),
		OnPingReceived: coderPing(o.onPing), OnPongReceived: coderPong(o.onPong),
	})
	if err != nil {
		return nil, err
	}
	return newCoder(c), nil
}

func coderDeflate(on bool) coder.CompressionMode {
	if on {
		return coder.CompressionContextTakeover
	}
	return coder.CompressionDisabled
}

func coderPing(f func(string) bool) func(context.Context, []byte) bool {
	if f == nil {
		return nil
	}
	return func(_ context.Context, payload []byte) bool { return f(string(payload)) }
}

func coderPong(f func(string)) func(context.Context, []byte) {
	if f == nil {
		return nil
	}
	return func(_ context.Context, payload []byte) { f(string(payload)) }
}

func newCoder(c *coder.Conn) socket {
	c.SetReadLimit(-1)
	s := &coderSocket{Conn: c}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

func (s *coderSocket) protocol() string { return s.Subprotocol() }

func (s *coderSocket) abort() {
	_ = s.CloseNow() // it may be closed
	s.cancel()
}

func (s *coderSocket) next() (int, io.Reader, error) {
	kind, r, err := s.Reader(s.ctx)
	return int(kind), r, err
}

func (s *coderSocket) write(kind int, data []byte) error {
	ctx, cancel := context.WithTimeout(s.ctx, patience)
	defer cancel()
	return s.Write(ctx, coder.MessageType(kind), data)
}

func (s *coderSocket) begin(kind int, between func() error, parts ...[]byte) (err error) {
	if s.unfinished, err = s.Writer(s.ctx, coder.MessageType(kind)); err != nil {
		return err
	}
	return writeParts(s.unfinished, between, parts)
}

func (s *coderSocket) end() error { return s.unfinished.Close() }

// ping cannot choose the payload: the library counts its pings.
func (s *coderSocket) ping(string) string {
	payload := fmt.Sprint(s.pings.Add(1))
	go s.Ping(s.ctx) //nolint:errcheck // it waits for the pong, which may never come
	return payload
}

func (s *coderSocket) shut(code int, reason string) error {
	return s.Close(coder.StatusCode(code), reason)
}
