package h1_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// Half of a head is no word: the body is sent, and the wait for the rest has its end.
func TestHalfAHeadWhile100IsAwaited(t *testing.T) {
	both(t, "half", h1.Config{HeaderTimeout: 5 * time.Second}, func(p *peer) { http.ReadRequest(p.br); p.say("HTTP/1.1 1"); io.ReadAll(p.br) }, func(t *testing.T, r *rig) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := r.send(expecting(t, strings.NewReader("hello")).WithContext(ctx))
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
			t.Errorf("RoundTrip() = %v after an hour, want a time-out after 6s", err)
		}
	})
}

// A hook that panics leaves no connection behind.
func TestPanicInPutIdleConnLeavesNothingOpen(t *testing.T) {
	bubble(t, "204", h1.Config{}, always(noContent), func(t *testing.T, r *rig) {
		defer func() {
			recover()
			if s := r.pool.Stats(); s.Open != 0 {
				t.Errorf("Stats() = %+v, want none open", s)
				r.closeHeld()
			}
		}()
		req := request(t, "GET", nil)
		out := outgoing(req)
		out.Trace = &httptrace.ClientTrace{PutIdleConn: func(error) { panic("x") }}
		r.pool.RoundTrip(t.Context(), new(h1.Exchange), out, silent{}, req)
	})
}

// What went wrong in an upload can be asked for.
func TestUploadErrorsAreWrapped(t *testing.T) {
	bubble(t, "reset", h1.Config{}, func(p *peer) { http.ReadRequest(p.br); p.Reset() }, func(t *testing.T, r *rig) {
		_, err := r.send(request(t, "POST", unknown(strings.Repeat("x", 1<<20))))
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("RoundTrip() = %v, want one that wraps ECONNRESET", err)
		}
	})
}

// A request whose context has ended is not sent.
func TestContextThatHasEndedSendsNothing(t *testing.T) {
	came := 0
	both(t, "ended", h1.Config{}, func(p *peer) {
		for p.hear() != nil {
			came++
			p.say(ok)
		}
	}, func(t *testing.T, r *rig) {
		r.must()
		came = 0
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 200 {
			r.swap(request(t, "GET", nil).WithContext(ctx))
			synctest.Wait()
			r.must()
		}
		if came > 200 {
			t.Errorf("%d requests with an ended context reached the server", came-200)
		}
	})
}

// An answer that is malformed is that too if the connection ends with it, as over TLS.
func TestMalformedAnswerWithItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r *rig
		r = newRig(t, h1.Config{Dial: func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
			nc, err := r.network.DialContext(ctx, "tcp", addr)
			return &together{count(nc), iotest.DataErrReader(nc)}, err
		}}, once("HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n"))
		if _, err := r.get(); !errors.Is(err, h1.ErrAnswer) {
			t.Errorf("RoundTrip() = %v, want ErrAnswer", err)
		}
	})
}

type together struct {
	net.Conn
	r io.Reader
}

func (c *together) Read(p []byte) (int, error) { return c.r.Read(p) }

// A connection that this side has closed says nothing about the server's limit.
func TestOwnCloseTeachesNothing(t *testing.T) {
	bubble(t, "three", h1.Config{}, always(ok), func(t *testing.T, r *rig) {
		for range 3 {
			r.must()
			linger(10 * time.Second)
			r.closeHeld()
			synctest.Wait()
		}
		r.must()
		linger(30 * time.Second)
		r.must()
		if n := r.dialed(); n != 4 {
			t.Errorf("%d connections, want 4", n)
		}
	})
}

// WroteRequest is told also if the body was not wanted.
func TestWroteRequestWithoutBody(t *testing.T) {
	bubble(t, "417", h1.Config{}, func(p *peer) {
		http.ReadRequest(p.br)
		p.say("HTTP/1.1 417 x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
		p.Close()
	}, func(t *testing.T, r *rig) {
		var l trail
		if _, err := r.sendTraced(expecting(t, strings.NewReader("hello")), &l); err != nil {
			t.Fatal(err)
		}
		linger(time.Second)
		if !strings.Contains(strings.Join(l.heard, "|"), "WroteRequest") {
			t.Errorf("heard %q, want WroteRequest", l.heard)
		}
	})
}
