package h1

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"
)

// body is the body of an answer. At its end the connection goes back to the pool; closed
// before, it is closed.
type body struct {
	x    *Exchange
	c    *conn
	from io.Reader

	mu   sync.Mutex // guards the following; held while reading
	over bool       // the end has come and was not told yet
	end  error      // what every Read returns from now on
}

func (b *body) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end != nil {
		return 0, b.end
	}
	if b.over {
		b.end = io.EOF
		b.x.answered()
		return 0, io.EOF
	}
	n, err := b.from.Read(p)
	switch {
	case err == nil:
	case err == io.EOF && n > 0 && b.x.uploading():
		b.over = true // what has come should not have to wait
		return n, nil
	case err == io.EOF:
		b.end = io.EOF
		b.x.answered()
	default:
		b.end = b.x.bodyError(err, b.c.readErr)
		err = b.end
	}
	return n, err
}

// bodyError ends an exchange in the middle of its answer because of err; readErr is what
// ended the reading of the connection, nil if nothing has.
func (x *Exchange) bodyError(err, readErr error) error {
	aborted := x.conn.Load() == nil
	x.drop(ReasonFailed)
	x.closeBody()
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case aborted && x.ctx.Err() != nil:
		return context.Cause(x.ctx)
	case x.failed != nil:
		return x.failed
	case readErr == nil: // all that was to be read could be: it is what it says
		return fmt.Errorf("%w: %w", ErrAnswer, err)
	}
	return err
}

var errBodyClosed = errors.New("read of a closed answer body")

// Close ends the exchange. It may be called while Read waits, which then returns.
func (b *body) Close() error {
	b.x.drop(ReasonFailed) // nothing, if the body has come to its end
	b.x.closeBody()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end == nil {
		b.end = errBodyClosed
		b.x.releaseReader()
	}
	return nil
}

// startUpload sends the body on a goroutine of its own.
func (x *Exchange) startUpload(c *conn) error {
	x.uploaded = make(chan struct{})
	x.mu.Lock()
	x.halves = 2
	x.mu.Unlock()
	if x.pool.cfg.Go(func() { x.upload(c) }) {
		return nil
	}
	x.mu.Lock()
	x.halves = 1
	x.mu.Unlock()
	return ErrClosed
}

// writeError is an error of the connection, not of the body.
type writeError struct{ error }

func (e writeError) Unwrap() error { return e.error }

// lateAnswer is how long an answer may still take once the rest of its request could not
// be sent: a server that refuses an upload says why before it closes.
const lateAnswer = time.Second

// upload sends the body.
func (x *Exchange) upload(c *conn) {
	defer close(x.uploaded)
	panicked := true
	defer func() {
		if panicked { // a hook has
			x.drop(ReasonFailed)
			x.closeBody()
		}
	}()
	x.uploadAll(c)
	panicked = false
}

func (x *Exchange) uploadAll(c *conn) {
	err := x.copyBody(c)
	x.closeBody()
	x.req.wrote(err)
	if err == nil {
		x.wholeSent(c)
	}
	x.mu.Lock()
	x.halves--
	done := x.halves == 0
	if err != nil {
		x.failed, x.keep = err, false
	}
	var write writeError
	switch {
	case err == nil:
	case !errors.As(err, &write):
		x.mu.Unlock()
		x.drop(ReasonFailed)
		return
	case !x.headed:
		x.awaitHeadLocked(c, lateAnswer)
	}
	x.mu.Unlock()
	if done {
		x.giveBack()
	}
}

// chunkRoom is what stands before and behind a chunk at most: its length in hexadecimal
// and two line ends.
const (
	chunkSize = 32 << 10
	chunkHead = len("8000\r\n")
	chunkTail = len("\r\n")
)

var chunks = sync.Pool{New: func() any { return new([chunkHead + chunkSize + chunkTail]byte) }}

// copyBody copies the body to c, and its trailer.
func (x *Exchange) copyBody(c *conn) error {
	buf := chunks.Get().(*[chunkHead + chunkSize + chunkTail]byte)
	defer chunks.Put(buf)
	left := x.req.Length
	for {
		room := buf[chunkHead : chunkHead+chunkSize]
		if left >= 0 {
			room = room[:min(int64(len(room)), max(left, 1))] // one byte more shows that there are more
		}
		n, errRead := x.req.Body.Read(room)
		switch {
		case n == 0:
		case left < 0:
			if err := writeChunk(c, buf, n); err != nil {
				return err
			}
		case int64(n) > left:
			return ErrBodyLength
		default:
			if _, err := c.Write(room[:n]); err != nil {
				return writeError{fmt.Errorf("sending the body: %w", err)}
			}
			left -= int64(n)
		}
		switch {
		case errRead == io.EOF && left > 0:
			return ErrBodyLength
		case errRead == io.EOF && left < 0:
			return x.endChunks(c)
		case errRead == io.EOF:
			return nil
		case errRead != nil:
			return errRead
		}
	}
}

// writeChunk writes the n bytes in the middle of buf as a chunk.
func writeChunk(c *conn, buf *[chunkHead + chunkSize + chunkTail]byte, n int) error {
	var size [chunkHead]byte
	head := append(strconv.AppendInt(size[:0], int64(n), 16), "\r\n"...)
	from := chunkHead - len(head)
	copy(buf[from:], head)
	copy(buf[chunkHead+n:], "\r\n")
	if _, err := c.Write(buf[from : chunkHead+n+chunkTail]); err != nil {
		return writeError{fmt.Errorf("sending the body: %w", err)}
	}
	return nil
}

// endChunks writes the last chunk and the trailer.
func (x *Exchange) endChunks(c *conn) error {
	b, err := appendFields([]byte("0\r\n"), x.req.Trailer)
	if err != nil {
		return err
	}
	if _, err := c.Write(append(b, "\r\n"...)); err != nil {
		return writeError{fmt.Errorf("sending the trailer: %w", err)}
	}
	return nil
}
