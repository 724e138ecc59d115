package h1_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// TestAContextEndsAnExchangeAtEveryStage cancels a second after the start and wants its
// cause, at once.
func TestAContextEndsAnExchangeAtEveryStage(t *testing.T) {
	errGone := errors.New("the client has gone")
	long := func() io.Reader { return strings.NewReader(strings.Repeat("x", 1<<20)) }
	for _, c := range []struct {
		name  string
		hole  bool // nobody answers the dial
		serve func(*peer)
		body  func() io.Reader // nil: GET
		ask   bool             // with Expect
		stage h1.Stage
		head  bool // the answer's head comes
	}{
		{name: "dialing", hole: true, serve: func(*peer) {}, stage: h1.StageConnect},
		{name: "dialing with a body", hole: true, serve: func(*peer) {}, body: long, stage: h1.StageConnect},
		{name: "sending a body that the server does not read", serve: func(*peer) {}, body: long, stage: h1.StageSend},
		{name: "reading a body that does not come", serve: func(p *peer) { p.hear() }, body: func() io.Reader { return newPipe() }, stage: h1.StageSend},
		{name: "waiting for 100", serve: func(p *peer) { http.ReadRequest(p.br) }, body: long, ask: true, stage: h1.StageSend},
		{name: "waiting for the head", serve: func(p *peer) { p.hear() }, stage: h1.StageHead},
		{name: "waiting for the head after a body", serve: func(p *peer) { p.hear() }, body: func() io.Reader { return strings.NewReader("x") }, stage: h1.StageHead},
		{name: "waiting for the rest of the head", serve: func(p *peer) { p.hear(); p.say("HTTP/1.1 200 OK\r\nA:") }, stage: h1.StageHead},
		{name: "waiting after an early hint", serve: func(p *peer) { p.hear(); p.say("HTTP/1.1 103 x\r\n\r\n") }, stage: h1.StageHead},
		{name: "reading the answer", serve: func(p *peer) { p.hear(); p.say("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok") }, stage: h1.StageBody, head: true},
		{name: "reading an answer until the end", serve: func(p *peer) { p.hear(); p.say("HTTP/1.1 200 OK\r\n\r\nok") }, stage: h1.StageBody, head: true},
		{name: "reading chunks", serve: func(p *peer) { p.hear(); p.say(chunkedHead + "2\r\nok\r\n") }, stage: h1.StageBody, head: true},
		{name: "reading the answer beside an upload", serve: func(p *peer) { http.ReadRequest(p.br); p.say("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok") },
			body: func() io.Reader { return newPipe() }, stage: h1.StageBody, head: true},
	} {
		for _, deadline := range []bool{false, true} {
			name, want := c.name, errGone
			if deadline {
				name, want = c.name+", by a deadline", context.DeadlineExceeded
			}
			cfg := h1.Config{ContinueTimeout: time.Minute}
			bubble(t, name, cfg, c.serve, func(t *testing.T, r *rig) {
				r.network.Blackhole(addr, c.hole)
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				if deadline {
					var stop context.CancelFunc
					ctx, stop = context.WithTimeout(ctx, time.Second)
					defer stop()
				} else {
					time.AfterFunc(time.Second, func() { cancel(errGone) })
				}
				var sent *tracked
				req := request(t, "GET", nil)
				if c.body != nil {
					sent = &tracked{Reader: c.body()}
					req = request(t, "POST", sent)
				}
				if c.ask {
					req.Header.Set("Expect", "100-continue")
				}
				start := time.Now()
				var x h1.Exchange
				resp, err := r.pool.RoundTrip(ctx, &x, outgoing(req), silent{}, req)
				if (err == nil) != c.head {
					t.Fatalf("RoundTrip() = %v", err)
				}
				if c.head {
					var b []byte
					if b, err = io.ReadAll(resp.Body); string(b) != "ok" {
						t.Errorf("body %q, want ok", b)
					}
					resp.Body.Close()
				}
				if err != want && !errors.Is(err, want) {
					t.Errorf("err = %v, want %v", err, want)
				}
				if got := time.Since(start); got != time.Second || x.Stage() != c.stage {
					t.Errorf("after %v at stage %d, want 1s, %d", got, x.Stage(), c.stage)
				}
				synctest.Wait()
				if sent != nil && !sent.closed() {
					t.Error("the body is not closed")
				}
				if !c.hole {
					r.wantClosed(h1.ReasonFailed, 1)
				}
			})
		}
	}
}

// TestAContextThatEndsAfterwardsEndsNothing also holds that nothing waits for it.
func TestAContextThatEndsAfterwardsEndsNothing(t *testing.T) {
	both(t, "when the answer was read", h1.Config{}, always(ok), func(t *testing.T, r *rig) {
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			if _, body, err := r.swap(request(t, "GET", nil).WithContext(ctx)); body != "ok" || err != nil {
				t.Fatalf("%q, %v, want ok", body, err)
			}
			cancel()
			synctest.Wait()
		}
		if r.dialed() != 1 {
			t.Errorf("%d connections, want 1", r.dialed())
		}
	})
}

func TestDialErrorsArePassedOnAsTheyAre(t *testing.T) {
	errDial := errors.New("no route")
	for _, c := range []struct {
		name string
		dial error
		is   error
	}{
		{name: "an error of its own", dial: errDial, is: errDial},
		{name: "an error of the network's", dial: &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, is: syscall.ECONNREFUSED},
		{name: "a time-out of the dial's own", dial: context.DeadlineExceeded, is: context.DeadlineExceeded},
	} {
		cfg := h1.Config{Dial: func(context.Context, func(net.Conn) net.Conn) (net.Conn, error) { return nil, c.dial }}
		bubble(t, c.name, cfg, nil, func(t *testing.T, r *rig) {
			body := newPipe()
			req := request(t, "POST", body)
			var x h1.Exchange
			_, err := r.pool.RoundTrip(t.Context(), &x, outgoing(req), silent{}, req)
			if err != c.dial || !errors.Is(err, c.is) || !body.isClosed() || body.isRead() || x.Stage() != h1.StageConnect {
				t.Errorf("RoundTrip() = %v, body closed %v, read %v, stage %d", err, body.isClosed(), body.isRead(), x.Stage())
			}
			if sent, received := x.Moved(); sent != 0 || received != 0 || r.pool.Stats() != (h1.Stats{}) {
				t.Errorf("Moved() = %d, %d, %+v, want nothing", sent, received, r.pool.Stats())
			}
		})
	}
}
