package lb_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Where a message ends: what is ambiguous from either side is refused or made
// unambiguous, and no byte of one exchange is taken for a part of another.

// pipelined follows each request of these tests on its connection.
const pipelined = "GET /pipelined HTTP/1.1\r\nHost: front.test\r\n\r\n"

// What tells its length in two ways, or in none that is valid, is refused by the server
// in front of the pool, and nothing that follows on the connection is a request.
func TestBadFramingIsRefused(t *testing.T) {
	chunked := "Transfer-Encoding: chunked\r\n"
	for _, tt := range []struct {
		name, rest string // after the Host field
		status     string
	}{
		{"two lengths that differ", "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", "400 Bad Request"},
		{"a list of equal lengths", "Content-Length: 5, 5\r\n\r\nhello", "400 Bad Request"},
		{"negative length", "Content-Length: -5\r\n\r\nhello", "400 Bad Request"},
		{"length with a plus sign", "Content-Length: +5\r\n\r\nhello", "400 Bad Request"},
		{"hexadecimal length", "Content-Length: 0x5\r\n\r\nhello", "400 Bad Request"},
		{"length with an underscore", "Content-Length: 0_5\r\n\r\nhello", "400 Bad Request"},
		{"empty length", "Content-Length:\r\n\r\nhello", "400 Bad Request"},
		{"length that overflows", "Content-Length: 18446744073709551621\r\n\r\nhello", "400 Bad Request"},
		{"length with a tab in it", "Content-Length: 5\t6\r\n\r\nhello", "400 Bad Request"},
		{"chunked on two lines", chunked + chunked + "\r\n5\r\nhello\r\n0\r\n\r\n", "501 Not Implemented"},
		{"chunked twice on a line", "Transfer-Encoding: chunked, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "501 Not Implemented"},
		{"xchunked", "Transfer-Encoding: xchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "501 Not Implemented"},
		{"xchunked and a length", "Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\nhello", "501 Not Implemented"},
		{"chunked in quotes", "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n", "501 Not Implemented"},
		{"chunked after gzip", "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "501 Not Implemented"},
		{"identity", "Transfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello", "501 Not Implemented"},
		{"empty coding", "Transfer-Encoding:\r\n\r\n0\r\n\r\n", "501 Not Implemented"},
		{"vertical tab before chunked", "Transfer-Encoding: \vchunked\r\n\r\n0\r\n\r\n", "400 Bad Request"},
		{"chunked and two lengths", chunked + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n0\r\n\r\n", "400 Bad Request"},
		{"space before the colon of a length", "Content-Length : 5\r\n\r\nhello", "400 Bad Request"},
		{"space before the colon of a coding", "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", "400 Bad Request"},
		{"space in a field's name", "Content Length: 5\r\n\r\nhello", "400 Bad Request"},
		{"NUL in a field's name", "X-\x00A: b\r\n\r\n", "400 Bad Request"},
		{"NUL in a field's value", "X-A: b\x00c\r\n\r\n", "400 Bad Request"},
		{"CR alone in a value", "X-A: b\rContent-Length: 5\r\n\r\nhello", "400 Bad Request"},
		{"line without a colon", "X-A\r\n\r\n", "400 Bad Request"},
		{"field without a name", ": b\r\n\r\n", "400 Bad Request"},
		{"name that is not ASCII", "X-ü: b\r\n\r\n", "400 Bad Request"},
		{"two Host fields", "Host: other.test\r\n\r\n", "400 Bad Request"},
		{"trailer that announces a length", chunked + "Trailer: Content-Length\r\n\r\n0\r\nContent-Length: 5\r\n\r\n", "400 Bad Request"},
		{"chunk size with a plus sign", chunked + "\r\n+5\r\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"chunk size with 0x", chunked + "\r\n0x5\r\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"negative chunk size", chunked + "\r\n-5\r\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"space before a chunk size", chunked + "\r\n 5\r\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"chunk size that overflows", chunked + "\r\n10000000000000005\r\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"chunk size that is empty", chunked + "\r\n\r\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"bare LF after a chunk size", chunked + "\r\n5\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"bare LF after a chunk extension", chunked + "\r\n5;a\nhello\r\n0\r\n\r\n", "400 Bad Request"},
		{"chunk longer than it says", chunked + "\r\n5\r\nhelloXX0\r\n\r\n", "400 Bad Request"},
		{"chunk without its end", chunked + "\r\n5\r\nhello0\r\n\r\n", "400 Bad Request"},
		{"trailer that is no field", chunked + "\r\n5\r\nhello\r\n0\r\nno field\r\n\r\n", "400 Bad Request"},
		{"folded Host field", " other.test\r\n\r\n", "400 Bad Request"},
		{"header over the server's limit", "X-A: " + text(20_000) + "\r\n\r\n", "431 Request Header Fields Too Large"},
	} {
		head := "POST /first HTTP/1.1\r\nHost: front.test\r\n" + tt.rest
		bubble(t, tt.name, func(t *testing.T) {
			r, w := newWireRig(t, "", always(okReply))
			r.server.MaxHeaderBytes = 4 << 10
			a, closed := r.say(head + pipelined)
			if !strings.HasPrefix(a, "HTTP/1.1 "+tt.status) || strings.Count(a, "HTTP/1.") != 1 || !closed {
				t.Errorf("answer = %q, closed %t; want %s alone", a, closed, tt.status)
			}
			for _, h := range w.heard() { // the head of one with a broken body may have gone out
				if h.whole || h.line != "POST /first HTTP/1.1" || !strings.Contains(head, "chunked") {
					t.Errorf("the backend got %v", h)
				}
			}
			r.wantFreshStart(w)
		})
	}
}

// wantFreshStart checks that the pool and the backend go on as if nothing had been.
func (r *rig) wantFreshStart(w *wire) {
	r.t.Helper()
	synctest.Wait()
	before := w.heard()
	a, _ := r.say("GET /after HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n")
	after := w.heard()
	if !strings.HasSuffix(a, "\r\n\r\nok") || len(after) != len(before)+1 || after[len(before)].line != "GET /after HTTP/1.1" {
		r.t.Errorf("the next client gets %q, the backend %v", a, after[len(before):])
	}
	for _, h := range before {
		if !h.whole && h.conn == after[len(before)].conn {
			r.t.Errorf("connection %d was used again after %v", h.conn, h)
		}
	}
	if r.errorLog.Len() > 0 {
		r.t.Errorf("the server logged %q", r.errorLog)
	}
	r.wantIdle()
	r.wantUnblamed()
}

// What net/http's server accepts although a strict one would not goes out in the one
// way that everybody reads alike, and the request after it is one of its own.
func TestLenientFramingGoesOutStrict(t *testing.T) {
	const chunked = "Transfer-Encoding: chunked"
	for _, tt := range []struct {
		name, rest string
		fields     []string
		body       string
	}{
		{"two lengths that are equal", "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", []string{"Content-Length: 5"}, "hello"},
		{"length with zeros in front", "Content-Length: 005\r\n\r\nhello", []string{"Content-Length: 5"}, "hello"},
		{"length with space around it", "Content-Length:\t 5 \r\n\r\nhello", []string{"Content-Length: 5"}, "hello"},
		// RFC 9112, section 6.3, lets a recipient go by the coding alone. The server has
		// taken the length away before the pool sees the request.
		{"chunked and a length", "Content-Length: 5\r\n" + chunked + "\r\n\r\n5\r\nhello\r\n0\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"a length and chunked", chunked + "\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"Chunked in capitals", "transfer-ENCODING: CHUNKED \r\n\r\n5\r\nhello\r\n0\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"coding on a folded line", "Transfer-Encoding:\r\n chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"folded value", "X-A: b\r\n\t c\r\nContent-Length: 5\r\n\r\nhello", []string{"Content-Length: 5", "X-A: b c"}, "hello"},
		{"folded line that looks like a coding", "X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
			[]string{"Content-Length: 5", "X-A: b Transfer-Encoding: chunked"}, "hello"},
		{"lines that end in LF", "X-A: b\nContent-Length: 5\n\nhello", []string{"Content-Length: 5", "X-A: b"}, "hello"},
		{"length named in Connection", "Connection: Content-Length\r\nContent-Length: 5\r\n\r\nhello", []string{"Content-Length: 5"}, "hello"},
		{"coding named in Connection", "Connection: Transfer-Encoding\r\n" + chunked + "\r\n\r\n5\r\nhello\r\n0\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"chunk extension", chunked + "\r\n\r\n5;a=\"b\"\r\nhello\r\n0;c\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"space after a chunk size", chunked + "\r\n\r\n5 \r\nhello\r\n00\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"framing in a trailer", chunked + "\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 9\r\nTransfer-Encoding: x\r\nHost: y\r\n\r\n", []string{chunked}, "5\r\nhello\r\n0\r\n\r\n"},
		{"body that is a request", fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(pipelined), pipelined),
			[]string{fmt.Sprintf("Content-Length: %d", len(pipelined))}, pipelined},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			r, w := newWireRig(t, "", always(okReply))
			for _, method := range []string{"POST", "GET"} {
				n := len(w.heard())
				a, closed := r.say(method + " /first HTTP/1.1\r\nHost: front.test\r\n" + tt.rest + pipelined)
				if strings.Count(a, "HTTP/1.1 200 OK\r\n") != 2 || closed {
					t.Errorf("%s: answers = %q, closed %t; want two and an open connection", method, a, closed)
				}
				got := w.heard()[n:]
				if len(got) != 2 || got[1].line != "GET /pipelined HTTP/1.1" || !got[1].whole {
					t.Fatalf("%s: the backend got %v, want two requests", method, got)
				}
				if first := got[0]; first.line != method+" /first HTTP/1.1" || !first.whole || first.body != tt.body || !slices.Equal(first.fields(t), tt.fields) {
					t.Errorf("%s: the backend got %v, want %q and %q", method, first, tt.fields, tt.body)
				}
			}
			r.wantFreshStart(w)
		})
	}
}

// HTTP/1.0 knows no codings: net/http's server drops the field before the pool sees it
// and goes by the length, which is 0 without one. What follows is no request.
func TestChunkedInHTTP10IsNoCoding(t *testing.T) {
	for length, want := range map[string]string{"": "", "Content-Length: 5\r\n": "5\r\nhe"} {
		bubble(t, length, func(t *testing.T) {
			r, w := newWireRig(t, "", always(okReply))
			a, closed := r.say("PUT /first HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n" + length + "\r\n5\r\nhello\r\n0\r\n\r\n" + pipelined)
			if !strings.HasPrefix(a, "HTTP/1.0 200 OK\r\n") || !strings.Contains(a, "HTTP/1.1 400 Bad Request\r\n") || !closed {
				t.Errorf("answer = %q, closed %t; want 200, then 400 for what is no request", a, closed)
			}
			if h := w.only(t); h.body != want || h.values("Transfer-Encoding") != nil {
				t.Errorf("the backend got %v, want the body %q", h, want)
			}
		})
	}
}

// A body that the backend does not wait for is not taken for requests, however late it
// comes, and after Connection: close nothing is.
func TestRestOfABodyIsNoRequest(t *testing.T) {
	for name, tt := range map[string]struct{ head, rest string }{
		"with a length":       {"Content-Length: 1000\r\n\r\nhello", pipelined},
		"in chunks":           {"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", pipelined},
		"whole but late":      {fmt.Sprintf("Content-Length: %d\r\n\r\n", len(pipelined)), pipelined},
		"after the last one":  {"Connection: close\r\nContent-Length: 5\r\n\r\nhello" + pipelined, pipelined},
		"with a broken chunk": {"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "zz\r\n" + pipelined},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{lbtest.Raw(okReply)}, noEjection(), lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
			c := r.dial()
			defer c.Close()
			io.WriteString(c, "POST /first HTTP/1.1\r\nHost: front.test\r\n"+tt.head)
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("answer = %v, %v", resp, err)
			}
			io.WriteString(c, tt.rest) // if nobody listens any more, so much the better
			if a, _ := r.listen(c); strings.Contains(a, "HTTP/1.") {
				t.Errorf("what followed was answered with %q", a)
			}
			if n := r.count(); n != 1 {
				t.Errorf("%d requests arrived, want 1: %v", n, r.backends[0].Received())
			}
		})
	}
}

// Answers that are broken are a clean 502 or a cut that the client sees, their
// connection carries nothing any more, and the next request gets its own answer.
func TestBadAnswersAreContained(t *testing.T) {
	const (
		ok      = "HTTP/1.1 200 OK\r\n"
		chunked = "Transfer-Encoding: chunked\r\n"
		evil    = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"
		bad     = "502 Bad Gateway"
		cut     = "cut"
	)
	for _, tt := range []struct{ name, reply, want string }{
		{"two lengths that differ", ok + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", bad},
		{"a list of equal lengths", ok + "Content-Length: 5, 5\r\n\r\nhello", bad},
		{"negative length", ok + "Content-Length: -5\r\n\r\nhello", bad},
		{"length with a plus sign", ok + "Content-Length: +5\r\n\r\nhello", bad},
		{"empty length", ok + "Content-Length:\r\n\r\nhello", bad},
		{"chunked twice", ok + chunked + chunked + "\r\n5\r\nhello\r\n0\r\n\r\n", bad},
		{"xchunked", ok + "Transfer-Encoding: xchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", bad},
		{"header over the transport's limit", ok + "X-A: " + text(20_000) + "\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"informational header over it", "HTTP/1.1 103 Early Hints\r\nLink: " + text(20_000) + "\r\n\r\n" + evil, bad},
		{"NUL in a field", ok + "X-A: b\x00c\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"CR alone in a field", ok + "X-A: b\rSet-Cookie: c=d\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"line without a colon", ok + "X-A\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"field folded before the first", ok + " X-A: b\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"status 99", "HTTP/1.1 99 Odd\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"status 099", "HTTP/1.1 099 Odd\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"status 000", "HTTP/1.1 000 Odd\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"status 1000", "HTTP/1.1 1000 Odd\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"status -10", "HTTP/1.1 -10 Odd\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"status +20", "HTTP/1.1 +20 Odd\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"no status", "HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"HTTP/0.9", "hello, this is a body\r\n" + hangUp, bad},
		{"another protocol", "ICY 200 OK\r\nContent-Length: 5\r\n\r\nhello", bad},
		{"empty lines", "\r\n\r\n" + evil, bad},
		{"nothing", hangUp, bad},
		{"101 that nobody asked for", "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + evil, bad},
		{"101 that names nothing", "HTTP/1.1 101 Switching Protocols\r\n\r\n" + evil, bad},

		{"chunk size that is none", ok + chunked + "\r\n5\r\nhello\r\nzz\r\n", cut},
		{"first chunk size that is none", ok + chunked + "\r\nzz\r\n", cut},
		{"chunk longer than it says", ok + chunked + "\r\n5\r\nhelloXX\r\n0\r\n\r\n", cut},
		{"chunk size that overflows", ok + chunked + "\r\n10000000000000005\r\nhello\r\n0\r\n\r\n", cut},
		{"chunks without their end", ok + chunked + "\r\n5\r\nhello\r\n" + hangUp, cut},
		{"trailer that is no field", ok + chunked + "\r\n5\r\nhello\r\n0\r\nno field\r\n\r\n", cut},
		{"length larger than the body", ok + "Content-Length: 50\r\n\r\nhello" + hangUp, cut},

		{"length smaller than the body", ok + "Content-Length: 5\r\n\r\nhello" + evil, "hello"},
		{"more after the last chunk", ok + chunked + "\r\n5\r\nhello\r\n0\r\n\r\n" + evil, "hello"},
		{"more after no body", ok + "Content-Length: 0\r\n\r\n" + evil, ""},
		{"body with 204", "HTTP/1.1 204 No Content\r\nContent-Length: 48\r\n\r\n" + evil, ""},
		{"body with HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + evil, ""},
		{"chunks with 204", "HTTP/1.1 204 No Content\r\n" + chunked + "\r\n5\r\nhello\r\n0\r\n\r\n", ""},
		{"body with 304", "HTTP/1.1 304 Not Modified\r\nContent-Length: 48\r\n\r\n" + evil, ""},
		{"end at the end of the connection", ok + "\r\nhello" + hangUp, "hello"},
		// net/http takes it for a field of another name, so the body has no length.
		{"space before the colon of the length", ok + "Content-Length : 2\r\n\r\nhello" + hangUp, "hello"},
		// HTTP/1.0 knows no codings.
		{"chunks of HTTP/1.0", "HTTP/1.0 200 OK\r\n" + chunked + "\r\n5\r\nhello\r\n0\r\n\r\n" + hangUp, "5\r\nhello\r\n0\r\n\r\n"},
	} {
		for warm := range 2 {
			bubble(t, fmt.Sprintf("%s, after %d good ones", tt.name, warm), func(t *testing.T) {
				r := newContainedRig(t, replyTo(warm+1, tt.reply))
				for i := range warm {
					r.wantOwnAnswer(i + 1)
				}
				method := "GET"
				if strings.HasSuffix(tt.name, "HEAD") {
					method = "HEAD"
				}
				status, body, err := r.ask(method)
				switch tt.want {
				case bad:
					if status != bad || err != nil || strings.TrimSpace(body) != "Bad Gateway" {
						t.Errorf("answer = %q with %q, %v; want a clean 502", status, body, err)
					}
				case cut:
					if status != "200 OK" || err == nil || !strings.HasPrefix("hello", body) {
						t.Errorf("answer = %q with %q, %v; want a cut", status, body, err)
					}
				default:
					if status[0] > '3' || err != nil || body != tt.want {
						t.Errorf("answer = %q with %q, %v; want %q", status, body, err, tt.want)
					}
				}
				synctest.Wait() // net/http drops a connection with something left on it
				r.wantOwnAnswer(warm + 2)
				r.wantOwnAnswer(warm + 3)
				got := r.backend.heard()
				if len(got) != warm+3 || got[warm+1].conn == got[warm].conn || got[warm+2].conn != got[warm+1].conn {
					t.Errorf("the backend got %v, want the connection dropped and the next one kept", got)
				}
				r.wantIdle()
				if r.errorLog.Len() > 0 {
					t.Errorf("the server logged %q", r.errorLog)
				}
			})
		}
	}
}

// contained is a rig with one such backend, and a client that keeps its connection for
// as long as the server does.
type contained struct {
	*rig
	backend *wire
	conn    net.Conn
	br      *bufio.Reader
}

func newContainedRig(t *testing.T, reply func(int) string) *contained {
	t.Helper()
	log.SetOutput(io.Discard) // net/http tells about what is left on a connection
	t.Cleanup(func() { log.SetOutput(os.Stderr) })
	r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
	w := startWire(t, r.net, "wire.test:80", reply)
	limited := r.net.Transport()
	limited.MaxResponseHeaderBytes = 4 << 10
	r.start(lb.Targets("http://wire.test"), noEjection(), lb.WithTransport(limited), lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
	return &contained{rig: r, backend: w}
}

// ask sends a request and returns its final answer, and what is wrong with its body.
func (c *contained) ask(method string) (status, body string, err error) {
	c.t.Helper()
	if c.conn == nil {
		c.conn = c.dial()
		c.t.Cleanup(func() { c.conn.Close() })
		c.br = bufio.NewReader(c.conn)
	}
	io.WriteString(c.conn, method+" / HTTP/1.1\r\nHost: front.test\r\n\r\n")
	c.conn.SetReadDeadline(time.Now().Add(3 * time.Second)) // virtual
	resp, err := http.ReadResponse(c.br, &http.Request{Method: method})
	if err != nil {
		c.t.Fatalf("no answer: %v", err)
	}
	b, err := io.ReadAll(resp.Body)
	if resp.Close || err != nil {
		c.conn.Close()
		c.conn = nil
	}
	return resp.Status, string(b), err
}

// wantOwnAnswer asks for the n-th time and wants the answer to that.
func (c *contained) wantOwnAnswer(n int) {
	c.t.Helper()
	status, body, err := c.ask("GET")
	if want := fmt.Sprintf("answer %02d", n); status != "200 OK" || err != nil || body != want {
		c.t.Errorf("request %d is answered with %q, %q, %v; want %q", n, status, body, err, want)
	}
}

// Odd answers that can only be read in one way are passed on, and their connection
// serves the next request.
func TestOddAnswersArePassedOn(t *testing.T) {
	for _, tt := range []struct{ name, reply, status, body string }{
		{"status without a reason", "HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", "200 OK", "hello"},
		{"status with an empty reason", "HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\nhello", "200 OK", "hello"},
		{"reason of its own", "HTTP/1.1 404 Gone fishing\r\nContent-Length: 5\r\n\r\nhello", "404 Not Found", "hello"},
		{"status that nobody knows", "HTTP/1.1 999 Odd\r\nContent-Length: 5\r\n\r\nhello", "999 status code 999", "hello"},
		{"two lengths that are equal", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "200 OK", "hello"},
		// RFC 9112, section 6.3, lets a proxy go by the coding alone; net/http keeps the
		// connection although it had better not.
		{"chunked and a length", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "200 OK", "hello"},
		{"chunk extension", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\n\r\n", "200 OK", "hello"},
		{"lines that end in LF", "HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", "200 OK", "hello"},
		{"folded field", "HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nContent-Length: 5\r\n\r\nhello", "200 OK", "hello"},
		{"204 with a length and no body", "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", "204 No Content", ""},
		{"304 with a length and no body", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", "304 Not Modified", ""},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			r := newContainedRig(t, replyTo(1, tt.reply))
			if status, body, err := r.ask("GET"); status != tt.status || body != tt.body || err != nil {
				t.Errorf("answer = %q with %q, %v; want %q with %q", status, body, err, tt.status, tt.body)
			}
			r.wantOwnAnswer(2)
			if got := r.backend.heard(); len(got) != 2 || got[0].conn != got[1].conn {
				t.Errorf("the backend got %v, want two requests on one connection", got)
			}
			r.wantIdle()
			r.wantUnblamed()
		})
	}
}
