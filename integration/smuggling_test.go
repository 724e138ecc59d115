package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Requests that one reader takes for one and another for two, and requests that are
// none: the gateway answers each with a clean refusal, or passes it on so that nginx,
// Node and a reader that forgives nothing read it alike.

// shape is what a client sends on a connection, all at once. NNN is the number of the
// row; it tells the requests apart, whose targets have it together with their role:
//
//	first     the request that the row is about
//	second    one that begins where the gateway sees the end of the first
//	next      one that is at the end of every row, and closes the connection
//	smuggled  one that nobody must take for a request
type shape struct {
	name, sent string
	want       string // the answers: of each the role, or the status of a refusal
	framed     string // if first is passed on: how its body is framed, and the body
	line       string // its request line, if that is not as it was sent
	fields     string // its fields, but for framing and those that all have
	refused    string // "nginx 400": instead of answering first, a kind of backend refuses it
	half       bool   // the client ends its side behind it
}

const (
	chunked = "Transfer-Encoding: chunked\r\n"
	hello   = "5\r\nhello\r\n0\r\n\r\n" // in chunks

	second   = "GET /NNN/second HTTP/1.1\r\nHost: front.test\r\n\r\n"
	next     = "GET /NNN/next HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n"
	smuggled = "GET /NNN/smuggled HTTP/1.1\r\nHost: front.test\r\n\r\n"
)

func length(body string) string { return fmt.Sprintf("Content-Length: %d\r\n", len(body)) }
func chunk(body string) string  { return fmt.Sprintf("%x\r\n%s\r\n", len(body), body) }

// number puts a row's number in.
func number(s string, row int) string { return strings.ReplaceAll(s, "NNN", fmt.Sprintf("%03d", row)) }

func TestNoRequestIsSmuggled(t *testing.T) {
	shapes := slices.Concat(framings(), chunkings(), heads(), targets(), methods(), sequences(), upgrades())
	for _, kind := range readers {
		t.Run(kind.name, func(t *testing.T) {
			backend := kind.start(t)
			g := startGateway(t, []string{"http://" + backend.addr})
			addr := strings.TrimPrefix(g.url, "http://")
			others := innocents{url: g.url}
			for row, s := range shapes {
				others.during(t, func() {
					if got, want := converse(addr, number(s.sent+next, row), row, s.half), s.wanted(kind.name); got != want {
						t.Errorf("%03d %s is answered with %q, want %q", row, s.name, got, want)
					}
				})
			}
			others.client.CloseIdleConnections()
			g.wantUnharmed(t)
			barrier(t, backend.addr)
			account(t, shapes, kind.name, backend)
		})
	}
}

// wanted are the answers if the backend is of that kind.
func (s *shape) wanted(kind string) string {
	for by := range strings.SplitSeq(s.refused, ", ") {
		if name, status, ok := strings.Cut(by, " "); ok && strings.HasSuffix(kind, name) {
			return strings.Replace(s.want, "first", status, 1)
		}
	}
	return s.want
}

// wantUnharmed checks that nothing that clients did counts against the backend, and ends
// the gateway.
func (g *gateway) wantUnharmed(t *testing.T) {
	t.Helper()
	var stats struct {
		Panics   int `json:"panics"`
		InFlight int `json:"in_flight"`
		Backends []struct {
			State     string `json:"state"`
			Failures  int    `json:"failures"`
			LastError string `json:"last_error"`
		} `json:"backends"`
	}
	if err := json.Unmarshal([]byte(curl(t, g.admin+"/stats")), &stats); err != nil {
		t.Fatal(err)
	}
	if b := stats.Backends[0]; stats.Panics != 0 || stats.InFlight != 0 || b.Failures != 0 || b.State != "healthy" {
		t.Errorf("the gateway counts %+v", stats)
	}
	if code := g.stop(t); code != 0 {
		t.Errorf("the gateway ended with %d", code)
	}
	if log := g.output.String(); strings.Contains(log, "panic") {
		t.Errorf("the gateway wrote %s", log)
	}
}

// account checks that each request that has arrived is one that was answered, and that
// the backend read of it what it should.
func account(t *testing.T, shapes []shape, kind string, backend reader) {
	t.Helper()
	whole := make([][]string, len(shapes))
	for _, a := range backend.arrivals(t) {
		if strings.HasPrefix(a.Line, "GET /healthz.txt ") || strings.HasPrefix(a.Line, "GET /barrier ") {
			continue
		}
		if a.Way != "127.0.0.1" && a.Whole || kind == "recorder" && a.Fault != "" {
			t.Errorf("what is no request of the pool's has arrived: %+v", a)
		}
		if strings.Contains(a.Line, " /innocent/") && a.Whole {
			continue
		}
		m := roleInTarget.FindStringSubmatch(a.Line)
		if m == nil {
			t.Errorf("what is no client's request has arrived: %+v", a)
			continue
		}
		row, _ := strconv.Atoi(m[1])
		if row >= len(shapes) {
			t.Errorf("what is of no row has arrived: %+v", a)
			continue
		}
		s := &shapes[row]
		switch role := m[2]; {
		case a.Whole:
			whole[row] = append(whole[row], role)
			if role == "first" {
				s.check(t, kind, backend.addr, row, a)
			}
		case role != "first" || slices.Contains(strings.Fields(s.wanted(kind)), "first"):
			t.Errorf("%03d %s: half a request has arrived: %+v", row, s.name, a)
		}
	}
	for row, s := range shapes {
		want := slices.DeleteFunc(strings.Fields(s.wanted(kind)), func(role string) bool { return role[0] <= '9' })
		slices.Sort(want)
		slices.Sort(whole[row])
		if !slices.Equal(whole[row], want) {
			t.Errorf("%03d %s: %q arrived, want %q", row, s.name, whole[row], want)
		}
	}
}

// check checks what the backend has read of the first request.
func (s *shape) check(t *testing.T, kind, addr string, row int, a arrival) {
	t.Helper()
	if got, want := a.framed(), number(s.framed, row); got != want {
		t.Errorf("%03d %s: the backend read %q, want %q", row, s.name, got, want)
	}
	if kind != "recorder" {
		return
	}
	line, _, _ := strings.Cut(s.sent, "\r\n")
	if s.line != "" {
		line = s.line
	}
	if got, want := a.Line, number(line, row); got != want {
		t.Errorf("%03d %s: the backend read %q, want %q", row, s.name, got, want)
	}
	if got, want := a.fields(), strings.ReplaceAll(s.fields, "BACKEND", addr); got != want {
		t.Errorf("%03d %s: the backend read the fields %q, want %q", row, s.name, got, want)
	}
}

// converse writes bytes on a connection to addr and returns what is answered until the
// server closes it: of each answer the role of its request if it tells that, else its
// status; and what is wrong at the end.
func converse(addr, sent string, row int, half bool) string {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	var writing sync.WaitGroup
	writing.Go(func() {
		_, _ = io.WriteString(c, sent) // who refuses may close before it has all
		if half {
			_ = c.(*net.TCPConn).CloseWrite()
		}
	})
	defer writing.Wait()
	method, _, _ := strings.Cut(sent, " ")
	var answers []string
	for br := bufio.NewReader(c); ; {
		if _, err := br.Peek(1); err == io.EOF {
			return strings.Join(answers, " ")
		} else if err != nil {
			return strings.Join(append(answers, err.Error()), " ")
		}
		resp, err := http.ReadResponse(br, &http.Request{Method: method})
		if err != nil {
			return strings.Join(append(answers, err.Error()), " ")
		}
		body, err := io.ReadAll(resp.Body)
		switch {
		case err != nil:
			answers = append(answers, "cut")
		case resp.StatusCode == 200 && method == "HEAD":
			answers = append(answers, "first")
		case resp.StatusCode != 200 || len(body) == 0:
			answers = append(answers, fmt.Sprint(resp.StatusCode))
		default:
			answers = append(answers, roleOf(string(body), row))
		}
		if resp.StatusCode >= 200 {
			method = "GET"
		}
	}
}

// What tells which request of which row it is: a part of the target.
var roleInTarget = regexp.MustCompile(`(\d{3})/([a-z0-9]+)`)

// roleOf finds the role in what tells of a request, which must be of the row.
func roleOf(s string, row int) string {
	m := roleInTarget.FindStringSubmatch(s)
	switch {
	case m == nil:
		return fmt.Sprintf("%q", s)
	case m[1] != fmt.Sprintf("%03d", row):
		return fmt.Sprintf("another's %q", s)
	}
	return m[2]
}

// innocents are clients whose requests share the connections to the backends with those
// of others.
type innocents struct {
	url     string
	client  http.Client
	count   atomic.Int64
	refused bool // a clean 502 is an answer of their own too
}

// ask sends n requests, each of which must get its own answer.
func (i *innocents) ask(t *testing.T, n int) {
	for range n {
		id := i.count.Add(1)
		method, body := "GET", ""
		if id%2 == 0 {
			method, body = "POST", fmt.Sprintf("GET /innocent/body/%d HTTP/1.1\r\n\r\n", id)
		}
		target := fmt.Sprintf("/innocent/%d", id)
		req, err := http.NewRequestWithContext(t.Context(), method, i.url+target, strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		resp, err := i.client.Do(req)
		if err != nil {
			t.Errorf("%s %s: %v", method, target, err)
			continue
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if i.refused && resp.StatusCode == 502 && string(got) == "Bad Gateway\n" && resp.Header["Evil"] == nil {
			continue
		}
		if want := method + " " + target + "\n"; string(got) != want || err != nil || resp.StatusCode != 200 || resp.Header["Evil"] != nil {
			t.Errorf("%s %s is answered with %s, %v, %q, %v", method, target, resp.Status, resp.Header, got, err)
		}
	}
}

// during runs f while others ask, and lets them ask once more after it.
func (i *innocents) during(t *testing.T, f func()) {
	t.Helper()
	var asking sync.WaitGroup
	asking.Go(func() { i.ask(t, 2) })
	f()
	asking.Wait()
	i.ask(t, 1)
}
