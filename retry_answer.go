package lb

import (
	"context"
	"io"
	"iter"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// deliver makes the attempt the request's answer: from here on only the answer's
// body is to come.
func (a *attempt) deliver(resp *http.Response) *http.Response {
	resp.Request = a.call.in
	a.call.answering = a
	if a.body != nil {
		a.body.conclude()
	}
	body := &a.answer
	body.ReadCloser, body.attempt, body.status = resp.Body, a, resp.StatusCode
	rw, tunnel := resp.Body.(io.ReadWriteCloser)
	switch {
	case resp.Body == http.NoBody:
		body.done(io.EOF)
	case tunnel && resp.StatusCode == http.StatusSwitchingProtocols:
		resp.Body = &tunnelAnswer{answer: body, rw: rw}
	default:
		resp.Body = body
	}
	return resp
}

// answer is the body of a delivered answer. It tells the attempt how it ended.
type answer struct {
	io.ReadCloser
	attempt *attempt
	status  int
	read    atomic.Int64
}

func (b *answer) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.read.Add(int64(n))
	if err != nil {
		b.done(err)
	}
	return n, err
}

func (b *answer) Close() error {
	err := b.ReadCloser.Close()
	b.done(nil)
	return err
}

// abandon closes the body unless it has ended, because of cause.
func (b *answer) abandon(cause Cause) {
	if b.attempt.finished.Load() {
		return
	}
	b.ReadCloser.Close()
	if cause == CauseClientGone {
		b.ended(cause, errClientGone)
		return
	}
	b.done(nil)
}

// done ends the attempt: err is what ended the body, nil if its reader closed it.
func (b *answer) done(err error) {
	if !b.attempt.finished.Load() {
		b.ended(b.attempt.bodyCause(err), err)
	}
}

// ended ends the attempt because of cause.
func (b *answer) ended(cause Cause, err error) {
	a := b.attempt
	o := Outcome{Stage: StageBody, Status: b.status, Cause: cause}
	if err == io.EOF {
		o.Stage = StageDone
	}
	if o.Cause != CauseNone {
		o.Err = err
		if o.Err == nil {
			o.Err = context.Cause(a.Context)
		}
	}
	o.Blame = blameOf(o.Cause)
	if !a.backend.conns.owned {
		o.ReceivedBytes = b.read.Load()
	}
	if a.finish(&o) {
		a.call.pool.totals.bodyEnded(&o)
		a.call.over()
	}
}

// tunnelAnswer is the body of a 101 answer: the connection itself.
type tunnelAnswer struct {
	*answer
	rw io.ReadWriteCloser
}

// nested yields t, the answer within it if that is of a pool too, and so on.
func (t *tunnelAnswer) nested() iter.Seq[*tunnelAnswer] {
	return func(yield func(*tunnelAnswer) bool) {
		for ok := true; ok && yield(t); {
			t, ok = t.rw.(*tunnelAnswer)
		}
	}
}

// conn is the connection beneath, nil if it is not known.
func (t *tunnelAnswer) conn() net.Conn {
	if c, ok := t.rw.(interface{ NetConn() net.Conn }); ok {
		return c.NetConn()
	}
	if p := t.attempt.pooled; p != nil {
		if cc := p.conn(); cc != nil {
			return cc
		}
	}
	return nil
}

func (t *tunnelAnswer) Write(p []byte) (int, error) { return t.rw.Write(p) }

// CloseWrite passes on the half-close, if the transport's connection has one.
func (t *tunnelAnswer) CloseWrite() error { return closeWrite(t.rw) }

// Close ends the attempt. That the request's context has ended does not matter: it was
// for the handshake, and net/http's own transport does not look at it any more either.
func (t *tunnelAnswer) Close() error {
	err := t.rw.Close()
	switch {
	case t.attempt.finished.Load():
	case t.attempt.call.pool.closed():
		t.ended(CauseClosed, ErrClosed)
	default:
		t.ended(CauseNone, nil)
	}
	return err
}

// Read does not end the attempt at the end of one direction.
func (t *tunnelAnswer) Read(p []byte) (int, error) {
	n, err := t.rw.Read(p)
	t.read.Add(int64(n))
	return n, err
}

const (
	// discardBytes and discardTime bound the reading of an answer that is thrown
	// away, for the sake of keeping its connection.
	discardBytes = 64 << 10
	discardTime  = 50 * time.Millisecond
)

// discard reads the answer to its end, if that is near, and closes it.
func (a *attempt) discard(resp *http.Response) {
	a.end()
	final := Outcome{Stage: StageBody, Status: resp.StatusCode}
	if resp.ContentLength <= discardBytes && a.backend.conns.owned {
		t := time.AfterFunc(discardTime, func() { resp.Body.Close() })
		if _, err := io.CopyN(io.Discard, resp.Body, discardBytes+1); err == io.EOF {
			final.Stage = StageDone
		}
		t.Stop()
	}
	resp.Body.Close()
	a.finish(&final)
}
