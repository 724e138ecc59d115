package h1

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Hints is told of the answers before the final one, on the goroutine that is in RoundTrip.
type Hints interface {
	// Informational must return soon; an error ends the exchange.
	Informational(code int, header textproto.MIMEHeader) error
}

// Exchange is one request and its answer. The zero value is ready for one RoundTrip. Its
// exported methods may be called concurrently.
type Exchange struct {
	pool  *Pool
	ctx   context.Context
	req   *Request
	hints Hints

	conn atomic.Pointer[conn] // nil before it is got and once it is given back
	stop func() bool          // ends the watching of ctx; nil if nobody does
	br   *bufio.Reader        // of the answer's half

	uploaded chan struct{} // closed when the upload has ended; nil without one

	mu         sync.Mutex // guards the following
	got        *wire      // of the connection, also when that was given back
	reused     bool       // it had carried another request
	sent, recv int64      // its counters when it was got; what was counted once it was given back
	back       bool       // it was given back, to carry other exchanges
	whole      bool       // the request is out
	headed     bool       // the answer's head has come
	halves     int        // of the exchange that are under way: the upload, the answer
	keep       bool       // the connection can carry another request
	failed     error      // why the upload ended early, or nobody waited any longer
	late       *time.Timer
}

// Reused tells whether the connection had carried another request before.
func (x *Exchange) Reused() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.reused
}

// Moved is how many bytes were sent and received for this exchange, as they are on the
// wire. Of TLS these are whole records.
func (x *Exchange) Moved() (sent, received int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.movedLocked()
}

func (x *Exchange) movedLocked() (sent, received int64) {
	switch {
	case x.got == nil:
		return 0, 0
	case x.back:
		return x.sent, x.recv
	}
	return x.got.sent.Load() - x.sent, x.got.received.Load() - x.recv
}

// Stage is how far the exchange came.
func (x *Exchange) Stage() Stage {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.got == nil:
		return StageConnect
	case x.headed:
		return StageBody
	case x.whole:
		return StageHead
	}
	return StageSend
}

// RoundTrip sends req and returns the answer, whose Request is in. It does not look at
// anything else of in but its method.
//
// An error wraps ErrRequest if the request cannot be sent, ErrAnswer if the server is to blame
// for what it said, the error of Config.Dial, that of reading Body, context.Cause of
// ctx, or what went wrong with the connection.
func (p *Pool) RoundTrip(ctx context.Context, x *Exchange, req *Request, hints Hints, in *http.Request) (*http.Response, error) {
	x.pool, x.ctx, x.req, x.hints = p, ctx, req, hints
	returns := false
	defer func() {
		if !returns { // a hook has panicked
			x.drop(ReasonFailed)
			x.closeBody()
		}
	}()
	resp, err := x.run(in)
	returns = true
	return resp, err
}

func (x *Exchange) run(in *http.Request) (*http.Response, error) {
	c, streams, err := x.send()
	if err == nil {
		var resp *http.Response
		if resp, err = x.receive(c, streams, in); err == nil {
			return resp, nil
		}
	}
	return nil, x.fail(err)
}

// send sends the head, and the body if that is at hand; streams tells that it is not.
func (x *Exchange) send() (c *conn, streams bool, err error) {
	req := x.req
	buf := buffers.Get().(*[]byte)
	head, err := req.appendHead((*buf)[:0])
	defer func() {
		if *buf = head; cap(head) <= mostKept {
			buffers.Put(buf)
		}
	}()
	if err != nil {
		return nil, false, err
	}
	if x.ctx.Err() != nil {
		return nil, false, context.Cause(x.ctx)
	}
	// Nothing of a body is read before there is a connection that wants it.
	if c, err = x.connect(); err != nil {
		return nil, false, err
	}
	streams = req.Body != nil
	if w, ok := req.Body.(Whole); ok && req.Length >= 0 && !req.expects() {
		before := int64(len(head))
		if head, ok = w.AppendTo(head, atHand); ok {
			streams = false
			if int64(len(head))-before != req.Length {
				return nil, false, ErrBodyLength
			}
		}
	}
	x.mu.Lock()
	x.halves, x.keep = 1, !req.wantsClose() && (!c.untimed || c.look != nil && !c.wire.secret)
	x.mu.Unlock()
	_, err = c.Write(head)
	req.traced(err)
	if err != nil {
		req.wrote(err)
		return nil, false, fmt.Errorf("sending the request: %w", err)
	}
	return c, streams, nil
}

// connect gets a connection.
func (x *Exchange) connect() (*conn, error) {
	t := x.req.Trace
	if t != nil && t.GetConn != nil {
		t.GetConn(x.req.Host)
	}
	c, err := x.pool.get(x)
	if err != nil {
		return nil, err
	}
	x.mu.Lock()
	x.got, x.reused = c.wire, c.used
	x.sent, x.recv = c.wire.sent.Load(), c.wire.received.Load()
	x.mu.Unlock()
	c.wire.begun.Store(false)
	x.conn.Store(c)
	if x.ctx.Done() != nil {
		x.stop = context.AfterFunc(x.ctx, func() {
			if c := x.conn.Swap(nil); c != nil {
				c.close(ReasonFailed)
			}
		})
	}
	if t != nil && t.GotConn != nil {
		info := httptrace.GotConnInfo{Conn: c.Conn, Reused: c.used, WasIdle: c.used}
		if c.used {
			info.IdleTime = time.Since(c.since)
		}
		t.GotConn(info)
	}
	c.used = true
	return c, nil
}

// receive reads the head of the answer, with the body going out beside it if it streams.
func (x *Exchange) receive(c *conn, streams bool, in *http.Request) (*http.Response, error) {
	waits := streams && x.req.expects()
	switch {
	case !streams:
		x.wholeSent(c)
		x.req.wrote(nil)
		x.closeBody()
	case !waits:
		if err := x.startUpload(c); err != nil {
			return nil, err
		}
	}
	c.room, c.readErr = x.pool.cfg.MaxHeaderBytes, nil
	x.br = readers.Get().(*bufio.Reader)
	x.br.Reset(c)
	resp, err := x.readHead(c, waits, in)
	if err == nil {
		err = x.begin(c, resp)
	}
	return resp, err
}

var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, readerSize) }}

// wholeSent begins the wait for the head, unless it has come.
func (x *Exchange) wholeSent(c *conn) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.whole = true
	if d := x.pool.cfg.HeaderTimeout; d > 0 && !x.headed && !x.req.NoHeaderTimeout {
		x.awaitHeadLocked(c, d)
	}
}

// awaitHeadLocked ends the wait for the head after d.
func (x *Exchange) awaitHeadLocked(c *conn, d time.Duration) {
	if !c.untimed {
		_ = c.SetReadDeadline(time.Now().Add(d)) // an error is the connection's end, as the Read will tell
		return
	}
	x.late = time.AfterFunc(d, func() {
		x.mu.Lock()
		headed := x.headed
		if !headed && x.failed == nil {
			x.failed = ErrHeaderTimeout
		}
		x.mu.Unlock()
		if !headed {
			x.drop(ReasonFailed)
		}
	})
}

// readHead reads heads until a final one comes. waits tells that the body is not to be
// sent before the server has asked for it, or has been silent for a while.
func (x *Exchange) readHead(c *conn, waits bool, in *http.Request) (resp *http.Response, err error) {
	t := x.req.Trace
	if waits && t != nil && t.Wait100Continue != nil {
		t.Wait100Continue()
	}
	var until time.Time
	if waits {
		until = time.Now().Add(x.pool.cfg.ContinueTimeout)
	}
	for first := true; ; first = false {
		if waits && !x.speaks(c, until) {
			waits = false
			if err := x.startUpload(c); err != nil {
				return nil, err
			}
		}
		if first && t != nil && t.GotFirstResponseByte != nil {
			if _, err := x.br.Peek(1); err == nil {
				t.GotFirstResponseByte()
			}
		}
		if x.br, err = c.checkHead(x.br); err != nil {
			return nil, x.headError(c, err)
		}
		if resp, err = http.ReadResponse(x.br, in); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrAnswer, err) // the head is there as a whole
		}
		switch code := resp.StatusCode; {
		case code == http.StatusSwitchingProtocols || code >= 200:
			return resp, nil
		case code == http.StatusContinue:
			if t != nil && t.Got100Continue != nil {
				t.Got100Continue()
			}
			if waits {
				waits = false
				if err := x.startUpload(c); err != nil {
					return nil, err
				}
			}
		}
		if err := x.hints.Informational(resp.StatusCode, textproto.MIMEHeader(resp.Header)); err != nil {
			return nil, err
		}
	}
}

// speaks waits for the server to say the whole of a head, or to leave, and tells whether
// it does in time.
func (x *Exchange) speaks(c *conn, until time.Time) bool {
	if c.untimed {
		return false // nobody could wait in time
	}
	if c.SetReadDeadline(until) != nil {
		return true // as reading will show
	}
	var err error
	x.br, err = c.checkHead(x.br)
	_ = c.SetReadDeadline(time.Time{}) // the same
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.readErr = nil
		return false
	}
	return true
}

// headError is what err, of the reading of a head, is to the caller.
func (x *Exchange) headError(c *conn, err error) error {
	switch {
	case errors.Is(err, ErrAnswer):
		return err
	case errors.Is(c.readErr, os.ErrDeadlineExceeded):
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.failed != nil {
			return x.failed
		}
		return ErrHeaderTimeout
	}
	return fmt.Errorf("connection ended before the answer: %w", c.readErr)
}

// begin makes resp the answer: its body is to come.
func (x *Exchange) begin(c *conn, resp *http.Response) error {
	x.mu.Lock()
	x.headed = true
	if x.late != nil {
		x.late.Stop()
	}
	_ = c.SetReadDeadline(time.Time{}) // an error is the connection's end, as the Read will tell
	whole, uploading := x.whole, x.halves == 2
	if resp.Close || !whole && !uploading { // refused before the body went out
		x.keep = false
	}
	x.mu.Unlock()
	if !whole && !uploading {
		x.req.wrote(nil)
		x.closeBody()
	}
	c.room = math.MaxInt64
	if limit := keepAliveLimit(resp.Header["Keep-Alive"]); limit > 0 {
		x.pool.told(limit)
	}
	switch {
	case resp.StatusCode == http.StatusSwitchingProtocols:
		if !whole {
			return fmt.Errorf("%w: it switched protocols before it had the whole request", ErrAnswer)
		}
		if x.stop != nil {
			x.stop() // ctx was for the handshake
		}
		resp.Body = &tunnel{x: x, c: c, br: x.br}
	case resp.Body == http.NoBody:
		x.answered()
	default:
		resp.Body = &body{x: x, c: c, from: resp.Body}
	}
	return nil
}

// fail ends an exchange that gets no answer because of err.
func (x *Exchange) fail(err error) error {
	aborted := x.conn.Load() == nil
	x.drop(ReasonFailed)
	x.closeBody()
	x.releaseReader()
	x.mu.Lock()
	failed := x.failed
	x.mu.Unlock()
	switch {
	case x.ctx.Err() != nil && aborted:
		return context.Cause(x.ctx)
	case failed != nil && !errors.Is(err, ErrAnswer):
		return failed
	}
	return err
}

// drop closes the connection because of why, unless it was given back.
func (x *Exchange) drop(why Reason) {
	if c := x.conn.Swap(nil); c != nil {
		c.close(why)
		if x.stop != nil {
			x.stop()
		}
	}
}

// giveBack ends a whole exchange: the connection goes back to the idle ones if it can.
func (x *Exchange) giveBack() {
	c := x.conn.Swap(nil)
	if c == nil {
		return // dropped
	}
	if x.stop != nil {
		x.stop()
	}
	x.mu.Lock()
	keep := x.keep && c.readErr == nil && x.br.Buffered() == 0
	x.sent, x.recv = x.movedLocked()
	x.back = true
	x.mu.Unlock()
	x.releaseReader()
	if !keep {
		c.close(ReasonAnswer)
		return
	}
	idle := false
	defer func() {
		if !idle { // the hook has panicked
			c.close(ReasonFailed)
		}
	}()
	if t := x.req.Trace; t != nil && t.PutIdleConn != nil {
		t.PutIdleConn(nil)
	}
	idle = true
	x.pool.put(c)
}

// releaseReader lets others have the reader. Nobody reads from it any more.
func (x *Exchange) releaseReader() {
	if x.br != nil && x.br.Size() == readerSize {
		x.br.Reset(nil)
		readers.Put(x.br)
	}
	x.br = nil
}

// uploadPatience is how long the upload may go on once the answer has ended: its last
// bytes may be on their way, and then the connections on both sides can be used again.
const uploadPatience = 50 * time.Millisecond

// uploading tells whether the body is still going out.
func (x *Exchange) uploading() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.halves == 2
}

// answered is told that the answer has come to its end. It waits a little for the end of
// the upload.
func (x *Exchange) answered() {
	x.mu.Lock()
	x.halves--
	done := x.halves == 0
	x.mu.Unlock()
	if done {
		x.giveBack()
		return
	}
	t := time.NewTimer(uploadPatience)
	defer t.Stop()
	select {
	case <-x.uploaded:
	case <-t.C:
		x.drop(ReasonFailed)
		x.closeBody()
	}
}

func (x *Exchange) closeBody() {
	if x.req.Body != nil {
		x.req.Body.Close()
	}
}
