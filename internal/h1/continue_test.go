package h1_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

const goOn = "HTTP/1.1 100 Continue\r\n\r\n"

// expecting is a POST that asks before it sends.
func expecting(t *testing.T, body io.Reader) *http.Request {
	t.Helper()
	req := request(t, "POST", body)
	req.Header.Set("Expect", "100-continue")
	return req
}

// TestABodyIsSentWhenTheServerAsksForIt has servers that are asked with Expect.
func TestABodyIsSentWhenTheServerAsksForIt(t *testing.T) {
	for _, c := range []struct {
		name  string
		say   func(*peer) // before the body
		then  string      // behind the body, if that comes
		sent  bool        // the body is read and sent
		after time.Duration
		code  int
		again bool // the connection carries another request
	}{
		{name: "100", say: func(p *peer) { p.say(goOn) }, then: ok, sent: true, code: 200, again: true},
		{name: "100 after a while", say: func(p *peer) { linger(900 * time.Millisecond); p.say(goOn) }, then: ok,
			sent: true, after: 900 * time.Millisecond, code: 200, again: true},
		{name: "silence", say: func(*peer) {}, then: ok, sent: true, after: time.Second, code: 200, again: true},
		{name: "100 twice", say: func(p *peer) { p.say(goOn + goOn) }, then: ok, sent: true, code: 200, again: true},
		{name: "an early hint and silence", say: func(p *peer) { p.say("HTTP/1.1 103 x\r\n\r\n") }, then: ok,
			sent: true, after: time.Second, code: 200, again: true},
		{name: "an early hint and 100", say: func(p *peer) {
			p.say("HTTP/1.1 103 x\r\n\r\n")
			linger(500 * time.Millisecond)
			p.say(goOn)
		}, then: ok, sent: true, after: 500 * time.Millisecond, code: 200, again: true},
		{name: "417", say: func(p *peer) { p.say("HTTP/1.1 417 x\r\nContent-Length: 0\r\n\r\n") }, code: 417},
		{name: "a final answer", say: func(p *peer) { p.say(ok) }, code: 200},
		{name: "a final answer without a body", say: func(p *peer) { p.say(noContent) }, code: 204},
		{name: "an early hint and a final answer", say: func(p *peer) { p.say("HTTP/1.1 103 x\r\n\r\n" + ok) }, code: 200},
		{name: "a final answer that closes", say: func(p *peer) { p.say("HTTP/1.1 401 x\r\n\r\nwho?"); p.Close() }, code: 401},
		{name: "a server that leaves", say: func(p *peer) { p.Close() }},
		{name: "a server that resets", say: func(p *peer) { p.Reset() }},
	} {
		serve := func(p *peer) {
			for first := true; ; first = false {
				req, err := http.ReadRequest(p.br)
				if err != nil {
					return
				}
				if first {
					c.say(p)
				}
				if _, err := io.ReadAll(req.Body); err != nil {
					return
				}
				p.say(c.then)
			}
		}
		both(t, c.name, h1.Config{}, serve, func(t *testing.T, r *rig) {
			body := newPipe()
			body.say("hello")
			body.end(io.EOF)
			start := time.Now()
			resp, _, err := r.swap(expecting(t, body))
			if got := time.Since(start); got != c.after {
				t.Errorf("answered after %v, want %v", got, c.after)
			}
			switch {
			case c.code == 0 && err == nil, c.code != 0 && (err != nil || resp.StatusCode != c.code):
				t.Fatalf("RoundTrip() = %v, %v, want status %d", resp, err, c.code)
			}
			synctest.Wait()
			if !body.isClosed() {
				t.Error("the body is not closed")
			}
			if r.transport != nil {
				return // net/http sends the body all the same, to keep the connection
			}
			if s := r.pool.Stats(); body.isRead() != c.sent || (s.Idle == 1) != c.again {
				t.Errorf("the body is read: %v, %+v, want %v, a connection to be kept: %v", body.isRead(), s, c.sent, c.again)
			}
		})
	}
}

func TestExpectWithoutABodyWaitsForNothing(t *testing.T) {
	both(t, "GET", h1.Config{}, always(ok), func(t *testing.T, r *rig) {
		start := time.Now()
		if _, body, err := r.swap(expecting(t, nil)); body != "ok" || err != nil || time.Since(start) != 0 {
			t.Errorf("%q, %v after %v", body, err, time.Since(start))
		}
	})
}

// TestTheHeaderTimeoutBeginsWithTheWholeRequest also holds that it does not begin with
// the wait for 100.
func TestTheHeaderTimeoutBeginsWithTheWholeRequest(t *testing.T) {
	for _, c := range []struct {
		name    string
		request func(t *testing.T) *http.Request
		want    time.Duration
	}{
		{name: "no body", request: func(t *testing.T) *http.Request { return request(t, "GET", nil) }, want: 10 * time.Second},
		{name: "a body", request: func(t *testing.T) *http.Request { return request(t, "POST", strings.NewReader("x")) }, want: 10 * time.Second},
		{name: "a body that takes a minute", request: func(t *testing.T) *http.Request {
			body := newPipe()
			time.AfterFunc(time.Minute, func() { body.end(io.EOF) })
			return request(t, "POST", body)
		}, want: 70 * time.Second},
		{name: "a body that is asked for", request: func(t *testing.T) *http.Request { return expecting(t, strings.NewReader("x")) }, want: 11 * time.Second},
	} {
		both(t, c.name, h1.Config{HeaderTimeout: 10 * time.Second}, mute, func(t *testing.T, r *rig) {
			start := time.Now()
			_, err := r.send(c.request(t))
			if got := time.Since(start); err == nil || got != c.want {
				t.Errorf("%v after %v, want %v", err, got, c.want)
			}
			if r.transport != nil {
				return
			}
			if timeout, ok := errors.AsType[interface {
				error
				Timeout() bool
			}](err); !errors.Is(err, h1.ErrHeaderTimeout) || !ok || !timeout.Timeout() {
				t.Errorf("RoundTrip() = %v, want ErrHeaderTimeout, a time-out", err)
			}
		})
	}
	patient := func(p *peer) { p.hear(); linger(time.Hour); p.say(ok) }
	bubble(t, "a request that waits for as long as it takes", h1.Config{HeaderTimeout: 10 * time.Second}, patient, func(t *testing.T, r *rig) {
		req := request(t, "GET", nil)
		out := outgoing(req)
		out.NoHeaderTimeout = true
		resp, err := r.pool.RoundTrip(t.Context(), new(h1.Exchange), out, silent{}, req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	})
	slow := func(p *peer) {
		for p.hear() != nil {
			p.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
			linger(time.Hour)
			p.say("k")
		}
	}
	both(t, "a body of the answer's may take its time", h1.Config{HeaderTimeout: 10 * time.Second}, slow, func(t *testing.T, r *rig) {
		r.must()
		r.must()
	})
}
