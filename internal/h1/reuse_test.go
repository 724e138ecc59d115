package h1_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

const chunkedHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

// TestConnectionsAreUsedAgainOnlyWhenTheyCanBe sends two requests, one after the other,
// and counts the connections.
func TestConnectionsAreUsedAgainOnlyWhenTheyCanBe(t *testing.T) {
	plain := func(t *testing.T) *http.Request { return request(t, "GET", nil) }
	method := func(m string) func(t *testing.T) *http.Request {
		return func(t *testing.T) *http.Request { return request(t, m, nil) }
	}
	head := method("HEAD")
	with := func(name, value string) func(t *testing.T) *http.Request {
		return func(t *testing.T) *http.Request {
			req := request(t, "GET", nil)
			req.Header.Set(name, value)
			return req
		}
	}
	closing := func(t *testing.T) *http.Request {
		req := request(t, "GET", nil)
		req.Close = true
		return req
	}
	for _, c := range []struct {
		name    string
		request func(t *testing.T) *http.Request
		answer  string
		early   bool // close the answer after one byte
		again   bool // the connection carries the next request too
		ours    bool // net/http leaves it to the server
	}{
		{name: "after a length", request: plain, answer: ok, again: true},
		{name: "after a length of zero", request: plain, answer: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", again: true},
		{name: "after chunks", request: plain, answer: chunkedHead + "2\r\nok\r\n0\r\n\r\n", again: true},
		{name: "after no chunks", request: plain, answer: chunkedHead + "0\r\n\r\n", again: true},
		{name: "after chunks with a trailer", request: plain, answer: chunkedHead + "2\r\nok\r\n0\r\nA: b\r\n\r\n", again: true},
		{name: "after HEAD with a length", request: head, answer: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", again: true},
		{name: "after HEAD with chunks to come", request: head, answer: chunkedHead, again: true},
		{name: "after HEAD without either", request: head, answer: "HTTP/1.1 200 OK\r\n\r\n", again: true},
		{name: "after 204", request: plain, answer: noContent, again: true},
		{name: "after 304 with a length", request: plain, answer: "HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n", again: true},
		{name: "after an early hint", request: plain, answer: "HTTP/1.1 103 Early Hints\r\n\r\n" + ok, again: true},
		{name: "after 500", request: plain, answer: "HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\nok", again: true},
		{name: "after a status without a reason", request: plain, answer: "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", again: true},
		{name: "after OPTIONS", request: method("OPTIONS"), answer: ok, again: true},
		{name: "after HTTP/1.0 that keeps alive", request: plain, answer: "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", again: true},
		{name: "after HTTP/1.0", request: plain, answer: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"},
		{name: "after an answer that says close", request: plain, answer: "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"},
		{name: "after an answer that says close among other things", request: plain, answer: "HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 2\r\n\r\nok"},
		{name: "after 204 that says close", request: plain, answer: "HTTP/1.1 204 x\r\nConnection: close\r\n\r\n"},
		{name: "after a request that is the last", request: closing, answer: ok},
		{name: "after a request that says close", request: with("Connection", "close"), answer: ok, ours: true},
		{name: "after a request that says close among other things", request: with("Connection", "x, CLOSE"), answer: ok, ours: true},
		{name: "after an answer closed early", request: plain, answer: ok, early: true},
		{name: "after chunks closed early", request: plain, answer: chunkedHead + "2\r\nok\r\n0\r\n\r\n", early: true},
		{name: "after bytes beyond a length", request: plain, answer: ok + "x"},
		{name: "after another answer beyond", request: plain, answer: ok + ok},
		{name: "after bytes beyond chunks", request: plain, answer: chunkedHead + "0\r\n\r\nx"},
		{name: "after bytes beyond 204", request: plain, answer: noContent + "x"},
		{name: "after a body of 304", request: plain, answer: "HTTP/1.1 304 x\r\nContent-Length: 2\r\n\r\nok"},
		{name: "after a body of HEAD", request: head, answer: ok},
	} {
		serve := func(p *peer) {
			for p.hear() != nil {
				p.say(c.answer)
			}
		}
		run := both
		if c.ours {
			run = bubble
		}
		run(t, c.name, h1.Config{}, serve, func(t *testing.T, r *rig) {
			resp, err := r.send(c.request(t))
			if err != nil {
				t.Fatal(err)
			}
			if c.early {
				_, err = io.ReadFull(resp.Body, make([]byte, 1))
			} else {
				_, err = io.ReadAll(resp.Body)
			}
			if err != nil {
				t.Error(err)
			}
			resp.Body.Close()
			synctest.Wait()
			if resp, err = r.send(c.request(t)); err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if got, want := r.dialed() == 1, c.again; got != want {
				t.Errorf("the connection is used again: %v, want %v", got, want)
			}
		})
	}
}

func TestTheConnectionUsedLastIsUsedFirst(t *testing.T) {
	serve := func(p *peer) {
		for p.hear() != nil {
			p.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nNumber: %d\r\nContent-Length: 2\r\n\r\nok", p.number))
		}
	}
	both(t, "of three", h1.Config{}, serve, func(t *testing.T, r *rig) {
		three := func() (got [3]*http.Response) {
			for i := range got {
				resp, err := r.get()
				if err != nil {
					t.Fatal(err)
				}
				got[i] = resp
			}
			return got
		}
		open := three()
		for _, i := range []int{1, 2, 0} {
			io.ReadAll(open[i].Body)
			synctest.Wait()
		}
		var order strings.Builder
		for _, resp := range three() {
			order.WriteString(resp.Header.Get("Number"))
			resp.Body.Close()
		}
		if order.String() != "132" || r.dialed() != 3 {
			t.Errorf("the connections were used in the order %s of %d, want 132 of 3", order.String(), r.dialed())
		}
	})
}

// TestAnAnswerBeforeTheUploadIsDoneEndsTheConnection waits a little for the upload.
func TestAnAnswerBeforeTheUploadIsDoneEndsTheConnection(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer string
		ends   time.Duration // after which the upload ends; zero: never
		again  bool
	}{
		{name: "an upload that never ends", answer: ok},
		{name: "an upload that never ends, and no body", answer: noContent},
		{name: "an upload that ends late", answer: ok, ends: time.Second},
		{name: "an upload that ends soon after", answer: ok, ends: 10 * time.Millisecond, again: true},
		{name: "an upload that ends soon after no body", answer: noContent, ends: 10 * time.Millisecond, again: true},
	} {
		serve := func(p *peer) {
			for {
				req, err := http.ReadRequest(p.br)
				if err != nil {
					return
				}
				p.say(c.answer)
				io.Copy(io.Discard, req.Body)
			}
		}
		both(t, c.name, h1.Config{}, serve, func(t *testing.T, r *rig) {
			upload := newPipe()
			defer upload.end(io.EOF)
			upload.say("some")
			if c.ends > 0 {
				time.AfterFunc(c.ends, func() { upload.end(io.EOF) })
			}
			if _, _, err := r.swap(request(t, "POST", upload)); err != nil {
				t.Error(err)
			}
			linger(100 * time.Millisecond)
			if r.transport == nil && !upload.isClosed() { // net/http lets it go on
				t.Error("the upload is not closed")
			}
			if _, _, err := r.swap(request(t, "GET", nil)); err != nil {
				t.Error(err)
			}
			if got := r.dialed() == 1; got != c.again {
				t.Errorf("the connection is used again: %v, want %v", got, c.again)
			}
		})
	}
}

// TestNothingIsSentTwice is where h1 differs from http.Transport on purpose.
func TestNothingIsSentTwice(t *testing.T) {
	serve := func(p *peer) {
		if p.hear() != nil {
			p.say(ok)
		}
		p.hear()
		p.Close() // without an answer to the second
	}
	bubble(t, "when the server closes instead of answering", h1.Config{}, serve, func(t *testing.T, r *rig) {
		r.must()
		_, _, err := r.swap(request(t, "GET", nil))
		if !errors.Is(err, io.EOF) || errors.Is(err, h1.ErrAnswer) || r.dialed() != 1 {
			t.Errorf("err = %v with %d connections, want the end of the first", err, r.dialed())
		}
		r.wantClosed(h1.ReasonFailed, 1)
	})
}

func TestAConnectionRefusedByItsOwnerIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, h1.Config{}, always(ok))
		cfg := r.settings(h1.Config{})
		cfg.Opened = func(io.Closer) bool { return false }
		pool := h1.New(cfg)
		req := request(t, "GET", nil)
		if _, err := pool.RoundTrip(context.Background(), new(h1.Exchange), outgoing(req), silent{}, req); !errors.Is(err, h1.ErrClosed) {
			t.Errorf("RoundTrip() = %v, want ErrClosed", err)
		}
		if s := pool.Stats(); s != (h1.Stats{}) {
			t.Errorf("Stats() = %+v, want none", s)
		}
		if p := r.peer(1); p.hear() != nil {
			t.Error("a request came")
		}
	})
}
