package h1_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"example.com/lb/internal/h1"
)

// errAny stands for an error that nobody names.
var errAny = errors.New("any error")

// TestAnswersAreReadAsNetHTTPDoes has answers after each of which the server closes.
func TestAnswersAreReadAsNetHTTPDoes(t *testing.T) {
	const l5 = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
	long := strings.Repeat("0123456789", 30_000)
	for _, c := range []struct {
		name    string
		method  string // empty: GET
		answer  string
		status  int // zero: 200
		length  int64
		body    string
		trailer http.Header
		err     error // of the body
	}{
		{name: "a length", answer: ok, length: 2, body: "ok"},
		{name: "a length of zero", answer: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"},
		{name: "a long body", answer: fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(long), long), length: 300_000, body: long},
		{name: "a body until the end", answer: "HTTP/1.1 200 OK\r\n\r\nhello", length: -1, body: "hello"},
		{name: "no body until the end", answer: "HTTP/1.1 200 OK\r\n\r\n", length: -1},
		{name: "a body of HTTP/1.0 until the end", answer: "HTTP/1.0 200 OK\r\n\r\nhello", length: -1, body: "hello"},
		{name: "chunks", answer: chunkedHead + "3\r\nhel\r\n2;x=\"y\"\r\nlo\r\n0\r\n\r\n", length: -1, body: "hello"},
		{name: "chunks with lengths in capitals and zeros in front", answer: chunkedHead + "0A\r\n0123456789\r\n0\r\n\r\n", length: -1, body: "0123456789"},
		{name: "no chunks", answer: chunkedHead + "0\r\n\r\n", length: -1},
		{name: "a trailer that is announced", answer: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: A, b\r\n\r\n2\r\nok\r\n0\r\nA: 1\r\n\r\n",
			length: -1, body: "ok", trailer: http.Header{"A": {"1"}, "B": nil}},
		{name: "a trailer that is not announced", answer: chunkedHead + "2\r\nok\r\n0\r\nA: 1\r\nA: 2\r\n\r\n", length: -1, body: "ok", trailer: http.Header{"A": {"1", "2"}}},
		{name: "HEAD with a length", method: "HEAD", answer: l5, length: 5},
		{name: "HEAD with chunks to come", method: "HEAD", answer: chunkedHead, length: -1},
		{name: "HEAD without a length", method: "HEAD", answer: "HTTP/1.1 200 OK\r\n\r\n", length: -1},
		{name: "204", answer: noContent, status: 204},
		{name: "204 with a length", answer: "HTTP/1.1 204 x\r\nContent-Length: 5\r\n\r\n", status: 204},
		{name: "304", answer: "HTTP/1.1 304 x\r\n\r\n", status: 304},
		{name: "304 with a length", answer: "HTTP/1.1 304 x\r\nContent-Length: 5\r\n\r\n", status: 304},
		{name: "205 with a length of zero", answer: "HTTP/1.1 205 x\r\nContent-Length: 0\r\n\r\n", status: 205},
		{name: "a status of nobody's", answer: "HTTP/1.1 999 x\r\nContent-Length: 2\r\n\r\nok", status: 999, length: 2, body: "ok"},
		{name: "a status without a reason", answer: "HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", length: 2, body: "ok"},
		{name: "a status with an empty reason", answer: "HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok", length: 2, body: "ok"},
		{name: "more than the length says", answer: l5 + "hello, world", length: 5, body: "hello"},
		{name: "less than the length says", answer: l5 + "hel", length: 5, body: "hel", err: io.ErrUnexpectedEOF},
		{name: "nothing of what the length says", answer: l5, length: 5, err: io.ErrUnexpectedEOF},
		{name: "an end in a chunk", answer: chunkedHead + "5\r\nhel", length: -1, body: "hel", err: io.ErrUnexpectedEOF},
		{name: "an end before a chunk", answer: chunkedHead, length: -1, err: io.ErrUnexpectedEOF},
		{name: "an end after a chunk", answer: chunkedHead + "5\r\nhello\r\n", length: -1, body: "hello", err: io.ErrUnexpectedEOF},
		{name: "an end in the last chunk", answer: chunkedHead + "5\r\nhello\r\n0\r\n", length: -1, body: "hello", err: errAny},
	} {
		both(t, c.name, h1.Config{}, once(c.answer), func(t *testing.T, r *rig) {
			req := request(t, "GET", nil)
			if c.method != "" {
				req.Method = c.method
			}
			resp, body, err := r.swap(req)
			if resp == nil {
				t.Fatal(err)
			}
			if c.status == 0 {
				c.status = 200
			}
			if resp.StatusCode != c.status || resp.ContentLength != c.length || body != c.body ||
				!errors.Is(err, c.err) && (err == nil || c.err != errAny) {
				t.Errorf("status %d, length %d, body %.20q, %v, want %d, %d, %.20q, %v",
					resp.StatusCode, resp.ContentLength, body, err, c.status, c.length, c.body, c.err)
			}
			if !maps.EqualFunc(resp.Trailer, c.trailer, slices.Equal) {
				t.Errorf("trailer %v, want %v", resp.Trailer, c.trailer)
			}
			if resp.Request != req {
				t.Error("Request is not what was sent")
			}
		})
	}
}

// TestBodiesMayBeReadInAnyWay reads byte by byte, past the end, and after Close.
func TestBodiesMayBeReadInAnyWay(t *testing.T) {
	for _, answer := range []string{ok, chunkedHead + "1\r\no\r\n1\r\nk\r\n0\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\nok"} {
		serve := func(p *peer) {
			for p.hear() != nil {
				for _, b := range []byte(answer) {
					p.say(string(b))
				}
				if !strings.Contains(answer, ": ") {
					p.Close()
				}
			}
		}
		both(t, fmt.Sprintf("%q", answer), h1.Config{}, serve, func(t *testing.T, r *rig) {
			resp, err := r.get()
			if err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(iotest.OneByteReader(resp.Body)); string(b) != "ok" || err != nil {
				t.Errorf("body %q, %v, want ok", b, err)
			}
			for range 2 {
				if n, err := resp.Body.Read(make([]byte, 1)); n != 0 || err != io.EOF {
					t.Errorf("Read() at the end = %d, %v, want io.EOF", n, err)
				}
			}
			for range 2 {
				if err := resp.Body.Close(); err != nil {
					t.Errorf("Close() = %v", err)
				}
			}
			if resp, err = r.get(); err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if n, err := resp.Body.Read(make([]byte, 1)); n != 0 || err == nil || err == io.EOF {
				t.Errorf("Read() after Close = %d, %v, want an error", n, err)
			}
		})
	}
}

func TestCloseEndsAReadThatWaits(t *testing.T) {
	both(t, "in the middle of a body", h1.Config{}, always("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"), func(t *testing.T, r *rig) {
		resp, err := r.get()
		if err != nil {
			t.Fatal(err)
		}
		read := make(chan error)
		go func() {
			_, err := io.ReadAll(resp.Body)
			read <- err
		}()
		synctest.Wait()
		resp.Body.Close()
		if err := <-read; err == nil {
			t.Error("a body closed in the middle was read to its end")
		}
		if p := r.peer(1); p.hear() != nil {
			t.Error("the connection is not closed")
		}
	})
}

// TestClosedForTheReason counts the connections of one exchange by why they ended.
func TestClosedForTheReason(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer string
		want   h1.Reason
	}{
		{name: "the answer said close", answer: "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", want: h1.ReasonAnswer},
		{name: "the answer went until the end", answer: "HTTP/1.1 200 OK\r\n\r\nhello", want: h1.ReasonAnswer},
		{name: "there were bytes beyond", answer: ok + "x", want: h1.ReasonAnswer},
		{name: "the answer ended early", answer: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", want: h1.ReasonFailed},
		{name: "the answer was none", answer: "hello\r\n", want: h1.ReasonFailed},
		{name: "the server left while it was idle", answer: ok, want: h1.ReasonLeft},
	} {
		bubble(t, c.name, h1.Config{}, once(c.answer), func(t *testing.T, r *rig) {
			_, _, _ = r.swap(request(t, "GET", nil)) // an error is another test's
			r.wantClosed(c.want, 1)
		})
	}
}
