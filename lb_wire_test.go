package lb_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// wire is a backend that keeps requests and sends answers byte for byte. Its
// connections stay open until their peer closes them, or an answer ends in hangUp.
type wire struct {
	reply func(n int) string // the answer to the n-th request, from 1

	mu    sync.Mutex // guards the following
	conns int
	got   []heard
}

const (
	// hangUp at the end of an answer closes the connection after it, and silence within it
	// is a second of silence.
	hangUp  = "\x00hang up"
	silence = "\x00silence"

	okReply = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
)

// heard is one request as it came.
type heard struct {
	conn  int    // number of its connection, from 1
	line  string // the request line
	lines []string
	body  string // chunks as they were sent
	whole bool   // both head and body came to their end
}

// startWire starts a backend at addr.
func startWire(tb testing.TB, n *lbtest.Network, addr string, reply func(n int) string) *wire {
	tb.Helper()
	ln, err := n.Listen(addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { ln.Close() })
	w := &wire{reply: reply}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			w.mu.Lock()
			w.conns++
			conn := w.conns
			w.mu.Unlock()
			go w.serve(c, conn)
		}
	}()
	return w
}

func (w *wire) serve(c net.Conn, conn int) {
	defer c.Close()
	br := bufio.NewReader(c)
	for {
		h := heard{conn: conn}
		head, ok := linesOf(br)
		if len(head) == 0 {
			return
		}
		h.line, h.lines = head[0], head[1:]
		if ok {
			h.body, h.whole = bodyOf(br, h)
		}
		w.mu.Lock()
		w.got = append(w.got, h)
		n := len(w.got)
		w.mu.Unlock()
		if !h.whole {
			return
		}
		s, hang := strings.CutSuffix(w.reply(n), hangUp)
		for i, part := range strings.Split(s, silence) {
			if i > 0 {
				linger(time.Second)
			}
			if _, err := io.WriteString(c, part); err != nil {
				return
			}
		}
		if hang {
			return
		}
	}
}

// linesOf reads to an empty line, which it does not return.
func linesOf(br *bufio.Reader) (lines []string, ok bool) {
	for {
		line, err := br.ReadString('\n')
		switch {
		case line == "\r\n":
			return lines, true
		case line != "":
			lines = append(lines, strings.TrimSuffix(line, "\r\n"))
		}
		if err != nil {
			return lines, false
		}
	}
}

// bodyOf reads the body of h.
func bodyOf(br *bufio.Reader, h heard) (body string, whole bool) {
	var b strings.Builder
	if n := h.values("Content-Length"); len(n) > 0 {
		length, _ := strconv.ParseInt(n[0], 10, 64)
		_, err := io.CopyN(&b, br, length)
		return b.String(), err == nil
	}
	if len(h.values("Transfer-Encoding")) == 0 {
		return "", true
	}
	for {
		size, err := br.ReadString('\n')
		b.WriteString(size)
		n, errSize := strconv.ParseInt(strings.TrimSuffix(size, "\r\n"), 16, 64)
		if err != nil || errSize != nil {
			return b.String(), false
		}
		if n == 0 {
			trailer, ok := linesOf(br)
			for _, line := range trailer {
				b.WriteString(line + "\r\n")
			}
			b.WriteString("\r\n")
			return b.String(), ok
		}
		if _, err := io.CopyN(&b, br, n+2); err != nil {
			return b.String(), false
		}
	}
}

func (h heard) String() string {
	return fmt.Sprintf("{connection %d: %q %q %q, whole: %t}", h.conn, h.line, h.lines, h.body, h.whole)
}

// bytes is the request as it came.
func (h heard) bytes() string {
	return h.line + "\r\n" + strings.Join(h.lines, "\r\n") + "\r\n\r\n" + h.body
}

// values returns the values of the field lines called name, in any case, in order.
func (h heard) values(name string) (values []string) {
	for _, line := range h.lines {
		if n, v, _ := strings.Cut(line, ":"); strings.EqualFold(n, name) {
			values = append(values, strings.TrimPrefix(v, " "))
		}
	}
	return values
}

// fields returns the field lines without Host and without what the pool says about the
// client, which it wants to be as known.
func (h heard) fields(t *testing.T) (rest []string) {
	t.Helper()
	for _, name := range []string{"X-Forwarded-For: 198.18.0.1", "X-Forwarded-Proto: http"} {
		if !slices.Contains(h.lines, name) {
			t.Errorf("the backend does not see %q, but %q", name, h.lines)
		}
	}
	for _, line := range h.lines {
		if !strings.HasPrefix(line, "X-Forwarded-") && !strings.HasPrefix(line, "Host: ") {
			rest = append(rest, line)
		}
	}
	return rest
}

// heard returns what has come so far.
func (w *wire) heard() []heard {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.got)
}

// only returns the one request that came.
func (w *wire) only(t *testing.T) heard {
	t.Helper()
	got := w.heard()
	if len(got) != 1 || !got[0].whole {
		t.Fatalf("the backend got %v, want one whole request", got)
	}
	return got[0]
}

// newWireRig starts a pool over one such backend, whose URL has prefix as its path. It
// tries each request once and forgives the backend.
func newWireRig(t *testing.T, prefix string, reply func(n int) string, opts ...lb.Option) (*rig, *wire) {
	t.Helper()
	r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
	w := startWire(t, r.net, "wire.test:80", reply)
	opts = append([]lb.Option{noEjection(), lb.WithRetry(lb.RetryPolicy{Attempts: 1})}, opts...)
	r.start(lb.Targets("http://wire.test"+prefix), opts...)
	return r, w
}

func always(reply string) func(int) string { return func(int) string { return reply } }

// replyTo is reply to the n-th request, and to all others an answer of their own.
func replyTo(n int, reply string) func(int) string {
	return func(i int) string {
		if i == n {
			return reply
		}
		return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nanswer %02d", i)
	}
}

// say sends bytes on a connection of their own and returns all that comes back, until
// the server closes or has nothing more to say.
func (r *rig) say(s string) (answer string, closed bool) {
	r.t.Helper()
	c := r.dial()
	defer c.Close()
	if _, err := io.WriteString(c, s); err != nil {
		r.t.Fatal(err)
	}
	return r.listen(c)
}

func (r *rig) listen(c net.Conn) (answer string, closed bool) {
	r.t.Helper()
	c.SetReadDeadline(time.Now().Add(3 * time.Second)) // virtual
	b, err := io.ReadAll(c)
	return string(b), !errors.Is(err, os.ErrDeadlineExceeded)
}
