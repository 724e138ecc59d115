package h2

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// Exchange is one request and its answer. The zero value is ready for one RoundTrip. Its
// exported methods may be called concurrently.
type Exchange struct {
	connected atomic.Bool
	reused    atomic.Bool
	encoded   atomic.Bool // net/http has begun to write the head
	whole     atomic.Bool // the request is out
	flooded   atomic.Bool // there were too many informational answers
	unseen    atomic.Bool // the server says that it has not looked at the request
}

// Connected tells whether the exchange got a connection.
func (x *Exchange) Connected() bool { return x.connected.Load() }

// Reused tells whether the connection had carried another request.
func (x *Exchange) Reused() bool { return x.reused.Load() }

// Whole tells whether the request was sent to its end.
func (x *Exchange) Whole() bool { return x.whole.Load() }

// NeverLeft tells of an exchange that failed whether the server has provably not looked
// at the request: nothing was sent of it, the server has refused the stream (RFC 9113,
// section 8.7), or it has said that it goes away and which stream was its last (6.8).
func (x *Exchange) NeverLeft() bool { return !x.encoded.Load() || x.unseen.Load() }

// Options are what an exchange needs beside its request.
type Options struct {
	// NoHeaderTimeout waits for the answer's head for as long as it takes.
	NoHeaderTimeout bool
	// Trace is told of what happens, but for informational answers; nil: nobody is.
	Trace *httptrace.ClientTrace
	// Informational is told of answers before the final one; an error ends the exchange.
	// It is called on a goroutine of the connection.
	Informational func(code int, header textproto.MIMEHeader) error
}

type timeoutError string

func (e timeoutError) Error() string        { return string(e) }
func (e timeoutError) Timeout() bool        { return true }
func (e timeoutError) Is(target error) bool { return target == os.ErrDeadlineExceeded }

var (
	// ErrRequest wraps what is wrong with a request that cannot be sent to this server.
	ErrRequest = errors.New("request cannot be sent")
	// ErrHeadTooLarge is the error of informational answers without an end.
	ErrHeadTooLarge = errors.New("malformed answer: its head is too large")
)

// ErrHeaderTimeout is the error of an answer whose head did not come in time.
var ErrHeaderTimeout error = timeoutError("timeout awaiting response headers")

// RoundTrip sends req, whose URL has the scheme to tell the server and whose context has no
// client trace, and returns the answer. It closes req.Body, unless Config.Dial has found that the server speaks
// something else: then the error is ErrOther.
func (p *Pool) RoundTrip(x *Exchange, req *http.Request, o Options) (*http.Response, error) {
	c, err := p.connect(x, req, o.Trace)
	if err != nil {
		if req.Body != nil && !errors.Is(err, ErrOther) {
			req.Body.Close()
		}
		return nil, err
	}
	reserved := true
	defer func() {
		if reserved { // something has panicked
			c.Release()
		}
	}()
	before := c.received.Load()
	wait := &headWait{}
	if !o.NoHeaderTimeout {
		wait.limit = p.cfg.HeaderTimeout
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	wait.late = func() {
		c.doubt(before)
		cancel(ErrHeaderTimeout)
	}
	out := req.WithContext(httptrace.WithClientTrace(ctx, x.trace(wait, o, p.cfg.MaxHeaderBytes)))
	reserved = false
	resp, err := c.RoundTrip(out)
	wait.over()
	if err != nil {
		x.unseen.Store(refused(err))
		switch cause := context.Cause(ctx); {
		case cause != nil:
			err = cause
		case x.flooded.Load():
			err = ErrHeadTooLarge
		case strings.Contains(err.Error(), tooLarge):
			err = fmt.Errorf("%w: %w", ErrRequest, err)
		}
		cancel(err)
		return nil, err
	}
	if resp.Body == http.NoBody {
		cancel(nil)
		return resp, nil
	}
	resp.Body = &body{ReadCloser: resp.Body, cancel: cancel}
	return resp, nil
}

// body is an answer's. Its end lets go of the request's context.
type body struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.cancel(nil)
	}
	return n, err
}

func (b *body) Close() error {
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}

// connect gets a connection.
func (p *Pool) connect(x *Exchange, req *http.Request, t *httptrace.ClientTrace) (*conn, error) {
	if t != nil && t.GetConn != nil {
		t.GetConn(req.URL.Host)
	}
	c, err := p.get(req.Context())
	if err != nil {
		return nil, err
	}
	x.connected.Store(true)
	reused := c.used.Swap(true)
	x.reused.Store(reused)
	if t != nil && t.GotConn != nil {
		t.GotConn(httptrace.GotConnInfo{Conn: c.Conn, Reused: reused})
	}
	return c, nil
}

// headWait is the wait for the head of an answer, which begins when the request is out.
type headWait struct {
	limit time.Duration // zero: none
	late  func()
	timer atomic.Pointer[time.Timer]
	ended atomic.Bool
}

func (w *headWait) begin() {
	if w.limit <= 0 || w.ended.Load() {
		return
	}
	t := time.AfterFunc(w.limit, w.late)
	if w.timer.Store(t); w.ended.Load() {
		t.Stop()
	}
}

func (w *headWait) over() {
	w.ended.Store(true)
	if t := w.timer.Load(); t != nil {
		t.Stop()
	}
}

// trace returns what notes how far the exchange has come, and tells others of it.
func (x *Exchange) trace(wait *headWait, o Options, most int64) *httptrace.ClientTrace {
	var t httptrace.ClientTrace
	if o.Trace != nil {
		t = *o.Trace
	}
	t.Got1xxResponse = nil
	if o.Informational != nil {
		var hinted int64
		t.Got1xxResponse = func(code int, header textproto.MIMEHeader) error {
			for name, values := range header {
				for _, value := range values {
					hinted += int64(len(name) + len(value))
				}
			}
			if hinted += int64(len(":status") + 3); hinted > most {
				x.flooded.Store(true)
				return ErrHeadTooLarge // net/http leaves it to us to find an end
			}
			return o.Informational(code, header)
		}
	}
	field, wrote := t.WroteHeaderField, t.WroteRequest
	t.WroteHeaderField = func(name string, values []string) {
		x.encoded.Store(true)
		if field != nil {
			field(name, values)
		}
	}
	t.WroteRequest = func(info httptrace.WroteRequestInfo) {
		if info.Err == nil {
			x.whole.Store(true)
			wait.begin()
		}
		if wrote != nil {
			wrote(info)
		}
	}
	return &t
}

// streamError has the shape of net/http's, which is not exported; its As copies into
// any that has.
type streamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (streamError) Error() string { return "stream error" }

const refusedStream = 7 // RFC 9113, section 7

// goneAway is what net/http's error says if the server has gone away without having
// looked at the stream. It has neither a type nor a name, so that this is the one place
// where a text is compared; a test tells if it changes.
const goneAway = "http2: Transport received Server's graceful shutdown GOAWAY"

// tooLarge is what it says of a header that is larger than the server wants any to be;
// what is said of goneAway holds for this, too.
const tooLarge = "header list larger than peer's advertised limit"

// refused tells whether err is the server's word that it has not looked at the request.
func refused(err error) bool {
	var stream streamError
	if errors.As(err, &stream) {
		return stream.Code == refusedStream
	}
	return strings.Contains(err.Error(), goneAway)
}
