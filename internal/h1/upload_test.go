package h1_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// tracked is a body that knows whether it was closed. Close goes through to its reader.
type tracked struct {
	io.Reader
	times atomic.Int32
}

func (b *tracked) Close() error {
	b.times.Add(1)
	if c, ok := b.Reader.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

func (b *tracked) closed() bool { return b.times.Load() > 0 }

// TestTheRequestsBodyIsClosedOnEveryPath is what http.RoundTripper promises. That of
// cancellation and of requests that are refused have tests of their own.
func TestTheRequestsBodyIsClosedOnEveryPath(t *testing.T) {
	errBody := errors.New("the client has gone")
	big := strings.Repeat("x", 1<<20)
	for _, c := range []struct {
		name   string
		serve  func(*peer)
		body   io.Reader
		length int64 // zero: unknown
		err    error // of RoundTrip
	}{
		{name: "when all goes well", serve: always(ok), body: strings.NewReader("hello"), length: 5},
		{name: "when its length is unknown", serve: always(ok), body: strings.NewReader("hello")},
		{name: "when it is longer than any buffer", serve: always(ok), body: strings.NewReader(big), length: 1 << 20},
		{name: "when it is empty", serve: always(ok), body: strings.NewReader("")},
		{name: "when reading it fails at once", serve: always(ok), body: failing{"", errBody}, err: errBody},
		{name: "when reading it fails later", serve: always(ok), body: failing{"some", errBody}, length: 9, err: errBody},
		{name: "when it is too short", serve: always(ok), body: strings.NewReader("hell"), length: 5, err: h1.ErrBodyLength},
		{name: "when it is too long", serve: mute, body: strings.NewReader("hello!"), length: 5, err: h1.ErrBodyLength},
		{name: "when it is much too long", serve: mute, body: strings.NewReader(big), length: 5, err: h1.ErrBodyLength},
		{name: "when the server leaves before", serve: func(p *peer) { p.Close() }, body: strings.NewReader(big), err: errAny},
		{name: "when the server leaves in the middle", serve: func(p *peer) { http.ReadRequest(p.br); p.Reset() }, body: strings.NewReader(big), err: errAny},
		{name: "when the server says nothing of use", serve: once("hello\r\n"), body: strings.NewReader("hello"), err: h1.ErrAnswer},
		{name: "when the head does not come in time", serve: mute, body: strings.NewReader("hello"), err: h1.ErrHeaderTimeout},
	} {
		bubble(t, c.name, h1.Config{HeaderTimeout: 10 * time.Second}, c.serve, func(t *testing.T, r *rig) {
			body := &tracked{Reader: c.body}
			req := request(t, "POST", body)
			out := outgoing(req)
			if out.Length = -1; c.length > 0 {
				out.Length = c.length
			}
			resp, err := r.pool.RoundTrip(t.Context(), new(h1.Exchange), out, silent{}, req)
			if !errors.Is(err, c.err) && (err == nil || c.err != errAny) {
				t.Errorf("RoundTrip() = %v, want %v", err, c.err)
			}
			if err == nil {
				io.ReadAll(resp.Body)
				resp.Body.Close()
			}
			synctest.Wait()
			if !body.closed() {
				t.Error("the body is not closed")
			}
			if s := r.pool.Stats(); (s.Idle == 1) != (c.err == nil) {
				t.Errorf("Stats() = %+v after %v", s, err)
			}
		})
	}
}

// failing is a body that ends with an error.
type failing struct {
	text string
	err  error
}

func (b failing) Read(p []byte) (int, error) { return copy(p, b.text), b.err }

// TestABodyThatFailsEndsTheRequestShort holds that no server takes it for whole.
func TestABodyThatFailsEndsTheRequestShort(t *testing.T) {
	for _, length := range []int64{-1, 9} {
		heardAs := make(chan error, 1)
		serve := func(p *peer) {
			req, err := http.ReadRequest(p.br)
			if err == nil {
				_, err = io.ReadAll(req.Body)
			}
			heardAs <- err
		}
		bubble(t, fmt.Sprintf("of length %d", length), h1.Config{}, serve, func(t *testing.T, r *rig) {
			req := request(t, "POST", failing{"some", errors.New("broken")})
			out := outgoing(req)
			out.Length = length
			if _, err := r.pool.RoundTrip(t.Context(), new(h1.Exchange), out, silent{}, req); err == nil {
				t.Error("RoundTrip() = nil")
			}
			if err := <-heardAs; err == nil {
				t.Error("the server has heard a whole request")
			}
		})
	}
}

// TestARefusalIsReadThoughTheUploadFails has a server that says why before it closes.
func TestARefusalIsReadThoughTheUploadFails(t *testing.T) {
	serve := func(p *peer) {
		http.ReadRequest(p.br)
		p.say("HTTP/1.1 413 x\r\nConnection: close\r\nContent-Length: 5\r\n\r\nlarge")
		p.CloseWrite()
		linger(time.Second)
		p.Close()
	}
	both(t, "413", h1.Config{}, serve, func(t *testing.T, r *rig) {
		resp, body, err := r.swap(request(t, "POST", unknown(strings.Repeat("x", 1<<20))))
		if err != nil || resp.StatusCode != 413 || body != "large" {
			t.Errorf("%v, %q, %v, want 413", resp, body, err)
		}
		linger(2 * time.Second)
	})
}

// deaf is a connection over which nothing can be sent after the first write, and from
// which nothing comes.
type deaf struct {
	net.Conn
	writes int
}

func (d *deaf) Write(p []byte) (int, error) {
	if d.writes++; d.writes > 1 {
		return 0, syscall.ENOBUFS
	}
	return d.Conn.Write(p)
}

func TestAnAnswerToAnUploadThatFailsIsAwaitedForASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r *rig
		r = newRig(t, h1.Config{Dial: func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
			nc, err := r.network.DialContext(ctx, "tcp", addr)
			return &deaf{Conn: count(nc)}, err
		}}, func(p *peer) { p.hear() })
		start := time.Now()
		_, err := r.send(request(t, "POST", strings.NewReader("hello")))
		if got := time.Since(start); err == nil || errors.Is(err, h1.ErrHeaderTimeout) || got != time.Second {
			t.Errorf("RoundTrip() = %v after %v, want why the upload failed, after 1s", err, got)
		}
	})
}

// TestAnUploadThatEndsLateSetsNoTimeOut has an answer whose body comes long after.
func TestAnUploadThatEndsLateSetsNoTimeOut(t *testing.T) {
	serve := func(p *peer) {
		req, err := http.ReadRequest(p.br)
		if err != nil {
			return
		}
		p.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
		io.Copy(io.Discard, req.Body)
		linger(time.Hour)
		p.say("ok")
		p.hear()
	}
	both(t, "behind the head of the answer", h1.Config{HeaderTimeout: time.Second}, serve, func(t *testing.T, r *rig) {
		body := newPipe()
		time.AfterFunc(500*time.Millisecond, func() { body.end(io.EOF) })
		if _, got, err := r.swap(request(t, "POST", body)); got != "ok" || err != nil {
			t.Errorf("%q, %v, want ok", got, err)
		}
	})
}

// TestABodyAtHandIsSentWithTheHead tells by what is left of the body: it is not read.
func TestABodyAtHandIsSentWithTheHead(t *testing.T) {
	for _, c := range []struct {
		name  string
		size  int
		ask   bool
		short bool // it is shorter than it says
		whole bool
	}{
		{name: "a short one", size: 5, whole: true},
		{name: "an empty one", size: 0, whole: true},
		{name: "the longest", size: 8 << 10, whole: true},
		{name: "one that is too long", size: 8<<10 + 1},
		{name: "one that the server is asked for", size: 5, ask: true},
		{name: "one that is not as long as it says", size: 5, short: true},
	} {
		bubble(t, c.name, h1.Config{}, always(ok), func(t *testing.T, r *rig) {
			body := &atHand{text: strings.Repeat("x", c.size)}
			req := request(t, "POST", nil)
			if c.ask {
				req.Header.Set("Expect", "100-continue")
			}
			out := outgoing(req)
			if out.Body, out.Length = body, int64(c.size); c.short {
				out.Length++
			}
			var x h1.Exchange
			resp, err := r.pool.RoundTrip(t.Context(), &x, out, silent{}, req)
			if c.short {
				if sent, _ := x.Moved(); !errors.Is(err, h1.ErrBodyLength) || sent != 0 || !body.closed {
					t.Errorf("RoundTrip() = %v with %d sent, want ErrBodyLength", err, sent)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			io.ReadAll(resp.Body)
			if untouched := len(body.text) == c.size; !body.closed || c.size > 0 && untouched != c.whole {
				t.Errorf("closed %v, sent whole: %v, want %v", body.closed, untouched, c.whole)
			}
		})
	}
}
