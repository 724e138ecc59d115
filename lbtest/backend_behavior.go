package lbtest

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

const (
	// missingBytes is how much an answer that ends in the middle owes.
	missingBytes = 1024

	// lingerTimeout bounds how long Raw waits for the client to close, so that
	// unread data does not turn the end of the connection into a reset.
	lingerTimeout = 500 * time.Millisecond
)

// Behavior is what a [Backend] does with a request. The functions that return
// one, from [Answer] to [Raw], are its only makers; the zero value is Answer.
// A Behavior is immutable and may be used by several backends at once.
//
// Each of them ends when the client closes its connection or the backend is
// closed. A client that closes only its writing side counts as gone too, as
// it does in net/http.
type Behavior struct {
	kind  behaviorKind
	serve func(*exchange) // nil is Answer
}

// behaviorKind tells what a behaviour does to connections, apart from serving
// requests.
type behaviorKind int

const (
	servesRequests behaviorKind = iota
	refuses
	closesReused
)

func (k behaviorKind) String() string {
	switch k {
	case refuses:
		return "Refuse"
	case closesReused:
		return "CloseReused"
	}
	return "a behavior of requests"
}

func (b Behavior) run(x *exchange) {
	if b.serve == nil {
		answer(x)
		return
	}
	b.serve(x)
}

// Answer reads the whole request and answers 200. The body is the request's
// [Received] as JSON, so that the client can compare what it sent with what
// arrived; BackendHeader has the backend's name. All behaviours below that
// answer set that header, except Raw. A body that cannot be read is answered
// with 400.
func Answer() Behavior {
	return Behavior{serve: answer}
}

// AnswerStatus reads the whole request and answers with code and body, as
// plain text. It panics if code is not a final status, or if body is not
// empty and code is one that has no body.
func AnswerStatus(code int, body string) Behavior {
	checkStatus("AnswerStatus", code, len(body))
	return Behavior{serve: func(x *exchange) {
		if x.readBody() {
			x.write(code, "text/plain; charset=utf-8", []byte(body))
		}
	}}
}

// Delay is Answer, sent d after the whole request has arrived.
func Delay(d time.Duration) Behavior {
	return Behavior{serve: func(x *exchange) {
		if x.readBody() {
			x.wait(d)
			x.answerReceived()
		}
	}}
}

// Hang reads the whole request and never answers.
func Hang() Behavior {
	return Behavior{serve: func(x *exchange) {
		if x.readBody() {
			<-x.r.Context().Done()
			panic(http.ErrAbortHandler)
		}
	}}
}

// Refuse closes the listener, so that dials are refused, and resets the
// connections that are open. Setting another behaviour listens again on the
// same address; if another process has taken it meanwhile, the test fails.
func Refuse() Behavior {
	return Behavior{kind: refuses}
}

// Reset reads the whole request and resets the connection instead of an
// answer.
func Reset() Behavior {
	return Behavior{serve: func(x *exchange) {
		if x.readBody() {
			x.reset()
		}
	}}
}

// ResetAfter resets the connection when it has read that many bytes of the
// request's body, or all of a shorter one; with 0 as soon as the header has
// arrived. It panics if bodyBytes is negative.
func ResetAfter(bodyBytes int64) Behavior {
	checkBytes("ResetAfter", bodyBytes)
	return Behavior{serve: func(x *exchange) {
		// Reset whatever came of it.
		_, _ = io.CopyN(io.Discard, x.r.Body, bodyBytes)
		x.reset()
	}}
}

// ResetMid reads the whole request, answers 200 with a Content-Length above
// n, sends n bytes of body and resets the connection. On a [Network] the
// client has taken these bytes before the reset; a kernel may lose the last
// of them if the client reads slowly. It panics if n is negative.
func ResetMid(n int) Behavior {
	checkBytes("ResetMid", int64(n))
	return Behavior{serve: func(x *exchange) {
		x.w.Header().Set("Content-Length", strconv.Itoa(n+missingBytes))
		x.resetMid(n)
	}}
}

// ResetMidChunked is [ResetMid] with a chunked answer: the reset comes in
// place of the next chunk.
func ResetMidChunked(n int) Behavior {
	checkBytes("ResetMidChunked", int64(n))
	return Behavior{serve: func(x *exchange) { x.resetMid(n) }}
}

// Early sends its whole answer, bodyBytes of body, before it reads any of the
// request's body, which it then reads and discards. It panics on a bad status
// as AnswerStatus does, or if bodyBytes is negative.
func Early(status int, bodyBytes int) Behavior {
	checkBytes("Early", int64(bodyBytes))
	checkStatus("Early", status, bodyBytes)
	return Behavior{serve: func(x *exchange) {
		c := http.NewResponseController(x.w)
		_ = c.EnableFullDuplex() // never fails for HTTP/1
		x.write(status, "text/plain; charset=utf-8", filler(bodyBytes))
		// Errors mean that the client has gone; the answer is out in any case.
		_ = c.Flush()
		_, _ = io.Copy(io.Discard, x.r.Body)
	}}
}

// CloseReused is Answer for the first request of each connection, which then
// stays open. As soon as the first byte of a further request arrives on it,
// the backend closes it without a byte in answer, as one whose idle timeout
// has just run out. The further request is not recorded.
//
// A connection whose first request was answered by another behaviour is
// treated the same.
func CloseReused() Behavior {
	return Behavior{kind: closesReused, serve: answer}
}

// Stream reads the whole request and answers 200 with chunks, the first at
// once and each further one after every. Each is a line, "chunk 1" and so on,
// and is flushed.
func Stream(chunks int, every time.Duration) Behavior {
	return Behavior{serve: func(x *exchange) {
		if !x.readBody() {
			return
		}
		c := http.NewResponseController(x.w)
		x.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_ = c.Flush() // the header goes out even without chunks
		for i := range chunks {
			if i > 0 {
				x.wait(every)
			}
			fmt.Fprintf(x.w, "chunk %d\n", i+1)
			if err := c.Flush(); err != nil {
				panic(http.ErrAbortHandler)
			}
		}
	}}
}

// Handle lets h serve the request. The request's body is recorded as h reads
// it. h is called concurrently, in the goroutine of the connection; it must
// return when the context of its request ends, because Close waits for it.
// net/http notices that the client has left only once h has read the body.
// Handle panics if h is nil.
func Handle(h http.Handler) Behavior {
	if h == nil {
		panic("lbtest: Handle needs a handler")
	}
	return Behavior{serve: func(x *exchange) { h.ServeHTTP(x.w, x.r) }}
}

// When chooses for each request: yes if match returns true, otherwise if not.
// match is called concurrently, must not keep the request and must leave its
// body alone. To treat a health probe apart from all traffic, and to record it
// apart, see [Backend.SetProbe].
//
// It panics if match is nil or if yes or otherwise is Refuse or CloseReused,
// which act on connections before there is a request to look at.
func When(match func(*http.Request) bool, yes, otherwise Behavior) Behavior {
	if match == nil {
		panic("lbtest: When needs a function")
	}
	checkServesRequests("When", yes)
	checkServesRequests("When", otherwise)
	return Behavior{serve: func(x *exchange) {
		if match(x.r) {
			yes.run(x)
			return
		}
		otherwise.run(x)
	}}
}

// Raw reads the request's header, writes reply byte for byte and closes the
// connection. Nothing is added, not even the backend's name. What still
// arrives of the request is discarded, for at most half a second.
func Raw(reply string) Behavior {
	return Behavior{serve: func(x *exchange) {
		gone := x.r.Context().Err() != nil
		nc, _, err := http.NewResponseController(x.w).Hijack()
		if err != nil {
			panic(http.ErrAbortHandler) // only a closed connection cannot be hijacked
		}
		defer x.conn.Close()
		// Errors mean that the client has gone or the backend is being closed.
		if _, err := io.WriteString(nc, reply); err != nil {
			return
		}
		x.answered = !gone
		if err := x.conn.CloseWrite(); err != nil {
			return
		}
		_ = nc.SetReadDeadline(time.Now().Add(lingerTimeout))
		_, _ = io.Copy(io.Discard, nc)
	}}
}

func answer(x *exchange) {
	if x.readBody() {
		x.answerReceived()
	}
}

// readBody reads the rest of the request. If that fails it answers 400, which
// a client that is still there can see, and returns false.
func (x *exchange) readBody() bool {
	if _, err := io.Copy(io.Discard, x.r.Body); err != nil {
		http.Error(x.w, "lbtest: read body: "+err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}

func (x *exchange) answerReceived() {
	x.backend.mu.Lock()
	received := x.received.clone()
	x.backend.mu.Unlock()
	text, err := json.Marshal(received)
	if err != nil {
		panic(err) // all fields can be marshalled
	}
	x.write(http.StatusOK, "application/json", text)
}

// write sends an answer of known length. That the client may be gone is no
// concern of the backend.
func (x *exchange) write(status int, contentType string, body []byte) {
	gone := x.r.Context().Err() != nil
	if len(body) > 0 {
		x.w.Header().Set("Content-Type", contentType)
	}
	if bodyAllowed(status) {
		x.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	}
	x.w.WriteHeader(status)
	_, err := x.w.Write(body)
	x.answered = err == nil && !gone
}

// wait waits for d, or abandons the request when the client leaves or the
// backend is closed.
func (x *exchange) wait(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-x.r.Context().Done():
		panic(http.ErrAbortHandler)
	}
}

// reset ends the request with a TCP reset.
func (x *exchange) reset() {
	x.conn.reset()
	panic(http.ErrAbortHandler)
}

func (x *exchange) resetMid(n int) {
	if !x.readBody() {
		return
	}
	x.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = x.w.Write(filler(n)) // Flush has the error
	if err := http.NewResponseController(x.w).Flush(); err == nil {
		x.conn.flushed()
	}
	x.reset()
}

// filler returns n bytes of body.
func filler(n int) []byte {
	return bytes.Repeat([]byte{'x'}, n)
}

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified
}

func checkServesRequests(user string, b Behavior) {
	if b.kind != servesRequests {
		panic(fmt.Sprintf("lbtest: %v acts on connections and cannot be used in %s", b.kind, user))
	}
}

func checkStatus(maker string, status, bodyBytes int) {
	if status < 200 || status > 999 {
		panic(fmt.Sprintf("lbtest: %s: status %d is not final", maker, status))
	}
	if bodyBytes > 0 && !bodyAllowed(status) {
		panic(fmt.Sprintf("lbtest: %s: status %d has no body", maker, status))
	}
}

func checkBytes(maker string, n int64) {
	if n < 0 {
		panic(fmt.Sprintf("lbtest: %s: %d bytes", maker, n))
	}
}

// exchange is one request in service.
type exchange struct {
	backend  *Backend
	conn     *conn
	w        http.ResponseWriter
	r        *http.Request
	probe    bool      // for the path of SetProbe
	received *Received // the backend's lock guards what it points to
	answered bool      // all of the answer was written to a client still there
}

// body notes what is read of a request's body.
type body struct {
	io.ReadCloser
	exchange *exchange
	hash     hash.Hash
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.hash.Write(p[:n]) // a hash.Hash never returns an error
	backend := b.exchange.backend
	backend.mu.Lock()
	defer backend.mu.Unlock()
	r := b.exchange.received
	r.BodyBytes += int64(n)
	switch {
	case err == io.EOF:
		r.BodySHA256 = hexSum(b.hash)
	// A handler's own mistake is not an error of the body.
	case err != nil && r.BodyErr == nil && !errors.Is(err, http.ErrBodyReadAfterClose):
		r.BodyErr = err
	}
	return n, err
}

func hexSum(h hash.Hash) string {
	return hex.EncodeToString(h.Sum(nil))
}

// connectionLost reports whether err means that the client's data ended early.
func connectionLost(err error) bool {
	_, isNet := errors.AsType[net.Error](err)
	return isNet || errors.Is(err, io.ErrUnexpectedEOF)
}
