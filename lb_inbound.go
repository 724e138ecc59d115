package lb

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// inbound is the body of an HTTP/1.1 request as the server gives it, until the
// handler returns.
//
// A connection whose body was not read to its end must not carry another request.
// In full duplex the server looks for that end only after the handler has
// returned, and goes on to the next request whether it has found it or not: what
// is left of the body would be taken for requests, which a client could smuggle in
// that way. And when it does find the end, its watch for a client that leaves
// begins too late to be called off and collides with the reading of the next
// request.
type inbound struct {
	io.ReadCloser
	state atomic.Int32
	idle  chan struct{} // set by leave; closed by the Read that it has found under way
}

// What state is made of.
const (
	inboundReading = 1 << iota // a Read is under way
	inboundLeft                // the handler returns: no Read begins any more
	inboundEnded               // the body has been read to its end
)

func (b *inbound) Read(p []byte) (int, error) {
	if b.state.Or(inboundReading)&inboundLeft != 0 {
		return 0, http.ErrBodyReadAfterClose
	}
	defer b.stop()
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.state.Or(inboundEnded)
	}
	return n, err
}

// Close does nothing. The server closes the body itself when the handler has returned,
// and does so by reading from the client, for which nobody here wants to wait.
func (b *inbound) Close() error { return nil }

// ended tells whether the body has been read to its end.
func (b *inbound) ended() bool { return b.state.Load()&inboundEnded != 0 }

// stop ends a Read and tells leave, if that was called during it.
func (b *inbound) stop() {
	if b.state.And(^inboundReading)&inboundLeft != 0 {
		close(b.idle)
	}
}

// leave ends the reading as the handler returns. A Read that waits for the client
// is woken by a deadline, which the server would do too, but not for one that is
// just about to begin.
func (b *inbound) leave(w http.ResponseWriter) {
	idle := make(chan struct{})
	b.idle = idle
	state := b.state.Or(inboundLeft)
	if state&inboundReading == 0 {
		if state&inboundEnded == 0 {
			// The server would read on, from a client that may never send the rest.
			_ = http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0))
			closeConnection(w)
		}
		return
	}
	// The deadline cancels the connection's context, so that it is of no use any
	// more even if the Read came to the end of the body just now.
	if http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) == nil {
		t := time.NewTimer(closeGrace) // a middleware's body may not heed the deadline
		defer t.Stop()
		select {
		case <-idle:
		case <-t.C:
		}
	}
	closeConnection(w)
}

// closeConnection has the server close an HTTP/1.1 connection after the answer,
// also when its header has been written already. Nothing in net/http says so but
// a MaxBytesReader that is over its limit, and that waits a little, too, so that
// the client can read the answer before it sees the end.
func closeConnection(w http.ResponseWriter) {
	for w != nil {
		over := http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0)
		_, _ = over.Read(make([]byte, 1))
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return
		}
		w = u.Unwrap()
	}
}
