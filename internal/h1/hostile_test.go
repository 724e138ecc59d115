package h1_test

import (
	"bufio"
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

// sized is an answer whose head has size bytes.
func sized(size int) string {
	const start, end = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: ", "\r\n\r\n"
	return start + strings.Repeat("x", size-len(start)-len(end)) + end + "ok"
}

// TestMalformedAnswersAreRefused has what some servers, or what stands between, might
// read in another way.
func TestMalformedAnswersAreRefused(t *testing.T) {
	const s = "HTTP/1.1 200 OK\r\n"
	for _, c := range []struct{ name, answer string }{
		{"bare LF behind the status line", "HTTP/1.1 200 OK\nContent-Length: 2\r\n\r\nok"},
		{"bare LF behind a field", s + "A: b\nContent-Length: 2\r\n\r\nok"},
		{"bare LF at the end of the head", s + "Content-Length: 2\r\n\nok"},
		{"nothing but bare LF", "HTTP/1.1 200 OK\nContent-Length: 2\n\nok"},
		{"CR CR LF", s + "A: b\r\r\nContent-Length: 2\r\n\r\nok"},
		{"a field on two lines, with a blank", s + "A: b\r\n c\r\nContent-Length: 2\r\n\r\nok"},
		{"a field on two lines, with a tab", s + "A: b\r\n\tContent-Length: 2\r\n\r\nok"},
		{"a blank before the first field", s + " A: b\r\nContent-Length: 2\r\n\r\nok"},
		{"a blank before the colon", s + "Content-Length : 2\r\n\r\nok"},
		{"a tab before the colon", s + "Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n"},
		{"a field without a colon", s + "Content-Length 2\r\n\r\nok"},
		{"a field without a name", s + ": 2\r\n\r\nok"},
		{"two lengths that are equal", s + "Content-Length: 2\r\nContent-Length: 2\r\n\r\nok"},
		{"two lengths that differ", s + "Content-Length: 2\r\ncontent-length: 3\r\n\r\nokk"},
		{"two lengths in one field", s + "Content-Length: 2, 2\r\n\r\nok"},
		{"a length and chunks", s + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"chunks and a length", s + "transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n"},
		{"two codings", s + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"a coding of nobody's", s + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"},
		{"a coding that is no coding", s + "Transfer-Encoding: identity\r\nA: b\r\n\r\nok"},
		{"a coding with a control character", s + "Transfer-Encoding: \vchunked\r\n\r\n0\r\n\r\n"},
		{"chunks of HTTP/1.0", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"a length below zero", s + "Content-Length: -2\r\n\r\nok"},
		{"a length with a plus", s + "Content-Length: +2\r\n\r\nok"},
		{"a length in hexadecimal", s + "Content-Length: 0x2\r\n\r\nok"},
		{"a length that is too long", s + "Content-Length: 99999999999999999999\r\n\r\nok"},
		{"a length without a number", s + "Content-Length: \r\n\r\nok"},
		{"NUL in a value", s + "A: \x00\r\nContent-Length: 2\r\n\r\nok"},
		{"CR in a value", s + "A: b\rContent-Length: 3\r\nContent-Length: 2\r\n\r\nok"},
		{"DEL in a value", s + "A: \x7f\r\nContent-Length: 2\r\n\r\nok"},
		{"NUL in a name", s + "A\x00: b\r\nContent-Length: 2\r\n\r\nok"},
		{"NUL in the reason", "HTTP/1.1 200 O\x00K\r\nContent-Length: 2\r\n\r\nok"},
		{"a trailer that is a length", s + "Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n0\r\n\r\n"},
		{"a status of four digits", "HTTP/1.1 1000 x\r\n\r\n"},
		{"a status of two digits", "HTTP/1.1 20 OK\r\n\r\n"},
		{"a status below 100", "HTTP/1.1 099 x\r\n\r\n"},
		{"a status of letters", "HTTP/1.1 2OO OK\r\n\r\n"},
		{"a status with a sign", "HTTP/1.1 +20 OK\r\n\r\n"},
		{"a status without an end", "HTTP/1.1 200OK\r\n\r\n"},
		{"no status", "HTTP/1.1\r\n\r\n"},
		{"two blanks before the status", "HTTP/1.1  200 OK\r\n\r\n"},
		{"HTTP/2", "HTTP/2.0 200 OK\r\n\r\n"},
		{"HTTP/2 without a point", "HTTP/2 200\r\n\r\n"},
		{"HTTP/1.2", "HTTP/1.2 200 OK\r\n\r\n"},
		{"HTTP/0.9", "<html>hello</html>\r\n"},
		{"http in small letters", "http/1.1 200 OK\r\n\r\n"},
		{"an empty line in front", "\r\n" + ok},
		{"frames of HTTP/2", "\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64\n"},
		{"another protocol", "220 mail.test ESMTP\r\n"},
		{"a request", "GET / HTTP/1.1\r\n\r\n"},
		{"an informational answer that is malformed", "HTTP/1.1 103 Early Hints\r\nA : b\r\n\r\n" + ok},
		{"an answer that is malformed behind an informational one", "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nA : b\r\n\r\n"},
	} {
		bubble(t, c.name, h1.Config{}, once(c.answer), func(t *testing.T, r *rig) {
			_, err := r.get()
			if !errors.Is(err, h1.ErrAnswer) || errors.Is(err, h1.ErrHeadTooLarge) {
				t.Errorf("RoundTrip() = %v, want ErrAnswer", err)
			}
			r.wantClosed(h1.ReasonFailed, 1)
		})
	}
}

// TestMalformedBodiesAreRefused has what is read after the head was returned.
func TestMalformedBodiesAreRefused(t *testing.T) {
	for _, c := range []struct{ name, body string }{
		{"a chunk length that is none", "xyz\r\n"},
		{"a chunk length with a sign", "+2\r\nok\r\n0\r\n\r\n"},
		{"a chunk length that is too long", "fffffffffffffffff\r\nok\r\n0\r\n\r\n"},
		{"a chunk length that ends with a bare LF", "2\nok\r\n0\r\n\r\n"},
		{"a chunk that is longer than it says", "1\r\nok\r\n0\r\n\r\n"},
		{"a chunk that ends with a bare LF", "2\r\nok\n0\r\n\r\n"},
		{"an extension without end", "2;" + strings.Repeat("x", 5000) + "\r\nok\r\n0\r\n\r\n"},
		{"a trailer without a colon", "2\r\nok\r\n0\r\nA b\r\n\r\n"},
		{"a trailer of a megabyte", "2\r\nok\r\n0\r\nA: " + strings.Repeat("x", 1<<20) + "\r\n\r\n"},
		{"a trailer of many fields", "2\r\nok\r\n0\r\n" + repeated(100_000) + "\r\n"},
	} {
		serve := func(p *peer) {
			p.hear()
			p.say(chunkedHead + c.body)
			p.hear()
		}
		both(t, c.name, h1.Config{}, serve, func(t *testing.T, r *rig) {
			resp, body, err := r.swap(request(t, "GET", nil))
			if resp == nil || err == nil || len(body) > 2 {
				t.Errorf("body %q, %v, want an error", body, err)
			}
			if r.transport == nil && !errors.Is(err, h1.ErrAnswer) {
				t.Errorf("the body ends with %v, want ErrAnswer", err)
			}
		})
	}
}

// TestHeadsHaveALimit holds it exactly.
func TestHeadsHaveALimit(t *testing.T) {
	const limit = 1 << 20
	hints := func(n int, size int) string {
		hint := "HTTP/1.1 103 Early Hints\r\nX: " + strings.Repeat("x", size-len("HTTP/1.1 103 Early Hints\r\nX: \r\n\r\n")) + "\r\n\r\n"
		return strings.Repeat(hint, n)
	}
	for _, c := range []struct {
		name, answer string
		limit        int64 // zero: limit
		tooLarge     bool
	}{
		{name: "a head as large as the limit", answer: sized(limit)},
		{name: "a head a byte larger", answer: sized(limit + 1), tooLarge: true},
		{name: "a head of many fields", answer: "HTTP/1.1 200 OK\r\n" + repeated(80_000) + "Content-Length: 2\r\n\r\nok"},
		{name: "a head of more fields", answer: "HTTP/1.1 200 OK\r\n" + repeated(120_000) + "Content-Length: 2\r\n\r\nok", tooLarge: true},
		{name: "a status line without end", answer: "HTTP/1.1 200 " + strings.Repeat("x", 2<<20), tooLarge: true},
		{name: "a line without end", answer: strings.Repeat("x", 2<<20), tooLarge: true},
		{name: "hints that leave room for the answer", answer: hints(15, 1<<16) + sized(1<<16)},
		{name: "hints that leave a byte too little", answer: hints(15, 1<<16) + sized(1<<16+1), tooLarge: true},
		{name: "hints without end", answer: hints(20_000, 64), tooLarge: true},
		{name: "a small limit, and a head as large", answer: sized(100), limit: 100},
		{name: "a small limit, and a head a byte larger", answer: sized(101), limit: 100, tooLarge: true},
		{name: "a limit that counts no body", answer: fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", 2<<20, strings.Repeat("ok", 1<<20))},
	} {
		if c.limit == 0 {
			c.limit = limit
		}
		bubble(t, c.name, h1.Config{MaxHeaderBytes: c.limit}, always(c.answer), func(t *testing.T, r *rig) {
			_, body, err := r.swap(request(t, "GET", nil))
			switch {
			case c.tooLarge && (!errors.Is(err, h1.ErrHeadTooLarge) || !errors.Is(err, h1.ErrAnswer)):
				t.Errorf("RoundTrip() = %v, want ErrHeadTooLarge", err)
			case !c.tooLarge && (err != nil || strings.Trim(body, "ok") != ""):
				t.Errorf("body %.20q, %v, want ok", body, err)
			}
		})
	}
}

// TestAServerThatTricklesRunsIntoTheTimeOut counts the time-out from the request, not
// from what came last.
func TestAServerThatTricklesRunsIntoTheTimeOut(t *testing.T) {
	for _, c := range []struct{ name, piece string }{
		{"hints", "HTTP/1.1 103 Early Hints\r\n\r\n"},
		{"fields", "A: b\r\n"},
		{"nothing", ""},
	} {
		serve := func(p *peer) {
			p.hear()
			if c.name == "fields" {
				p.say("HTTP/1.1 200 OK\r\n")
			}
			for range 100 {
				p.say(c.piece)
				linger(time.Second)
			}
		}
		both(t, c.name, h1.Config{HeaderTimeout: 10*time.Second + time.Millisecond}, serve, func(t *testing.T, r *rig) {
			start := time.Now()
			_, err := r.get()
			if r.transport == nil && !errors.Is(err, h1.ErrHeaderTimeout) || err == nil {
				t.Errorf("RoundTrip() = %v, want ErrHeaderTimeout", err)
			}
			if got := time.Since(start); got != 10*time.Second+time.Millisecond {
				t.Errorf("after %v, want 10.001s", got)
			}
			linger(100 * time.Second)
		})
	}
}

// TestWhatIsLaxInNetHTTPIsTakenAsItIs has answers that are odd and not refused: all of
// them mean to h1 what they mean to net/http.
func TestWhatIsLaxInNetHTTPIsTakenAsItIs(t *testing.T) {
	for _, head := range []string{
		"HTTP/1.1 200 \r\n", "HTTP/1.1 200 \xff\r\n", "HTTP/1.1 200 a\tb\r\n", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n",
		"HTTP/1.1 200 OK\r\nA:b\r\nA:\t c \r\nB:\r\n", "HTTP/1.1 200 OK\r\nA B: c\r\n", "HTTP/1.1 200 OK\r\nA: \xff\r\n",
		"HTTP/1.1 200 OK\r\nCONTENT-length:   2  \r\n", "HTTP/1.1 200 OK\r\nConnection: Content-Length\r\n",
	} {
		answer := head + "Content-Length: 2\r\n\r\nok"
		if strings.Contains(head, "CONTENT") {
			answer = head + "\r\nok"
		}
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, h1.Config{}, always(answer))
			resp, body, err := r.swap(request(t, "GET", nil))
			want, wantErr := http.ReadResponse(bufio.NewReader(strings.NewReader(answer)), nil)
			if wantErr != nil {
				if err == nil {
					t.Errorf("%q: h1 takes it, net/http says %v", head, wantErr)
				}
				return
			}
			wantBody, _ := io.ReadAll(want.Body)
			if err != nil {
				t.Fatalf("%q: %v", head, err)
			}
			if got, want := fmt.Sprint(resp.Status, resp.Header, resp.Close, body), fmt.Sprint(want.Status, want.Header, want.Close, string(wantBody)); got != want {
				t.Errorf("%q: %s, want %s", head, got, want)
			}
		})
	}
}
