package h1_test

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"example.com/lb/internal/h1"
)

// heard returns what a server hears of req, whose answer ends the connection.
func heard(t *testing.T, name string, run func(*testing.T, string, h1.Config, func(*peer), func(*testing.T, *rig)), send func(t *testing.T, r *rig) error, check func(t *testing.T, wire string)) {
	t.Helper()
	wire := make(chan string, 1)
	serve := func(p *peer) {
		var b strings.Builder
		p.br.Reset(io.TeeReader(p.Conn, &b))
		p.hear() // nil of a target of which net/http cannot make a URL
		p.say("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
		io.Copy(io.Discard, p.br)
		wire <- b.String()
	}
	run(t, name, h1.Config{}, serve, func(t *testing.T, r *rig) {
		if err := send(t, r); err != nil {
			t.Fatal(err)
		}
		check(t, <-wire)
	})
}

// TestRequestsAreFramedAsNetHTTPDoes has what is to be on the wire after the first line
// and the Host, with the fields sorted.
func TestRequestsAreFramedAsNetHTTPDoes(t *testing.T) {
	const chunked = "transfer-encoding: chunked|"
	known := func() io.Reader { return strings.NewReader("hello") }
	none := func() io.Reader { return http.NoBody }
	of := func(s string) func() io.Reader { return func() io.Reader { return unknown(s) } }
	for _, c := range []struct {
		name    string
		method  string
		body    func() io.Reader
		header  http.Header
		trailer http.Header
		close   bool
		fields  string // in lower case, sorted, each with a bar behind it
		sent    string // behind the head
		ours    bool   // net/http differs
	}{
		{name: "GET without a body has no length", method: "GET"},
		{name: "HEAD without a body has no length", method: "HEAD"},
		{name: "DELETE without a body has no length", method: "DELETE"},
		{name: "OPTIONS without a body has no length", method: "OPTIONS"},
		{name: "a method of its own without a body has no length", method: "BREW"},
		{name: "POST without a body has a length of zero", method: "POST", fields: "content-length: 0|"},
		{name: "PUT without a body has a length of zero", method: "PUT", fields: "content-length: 0|"},
		{name: "PATCH without a body has a length of zero", method: "PATCH", fields: "content-length: 0|"},
		{name: "GET with http.NoBody has no length", method: "GET", body: none},
		{name: "POST with http.NoBody has a length of zero", method: "POST", body: none, fields: "content-length: 0|"},
		{name: "POST with a body of known length", method: "POST", body: known, fields: "content-length: 5|", sent: "hello"},
		{name: "GET with a body of known length", method: "GET", body: known, fields: "content-length: 5|", sent: "hello"},
		{name: "DELETE with a body of known length", method: "DELETE", body: known, fields: "content-length: 5|", sent: "hello"},
		{name: "POST with a body of unknown length", method: "POST", body: of("hello"), fields: chunked, sent: "5\r\nhello\r\n0\r\n\r\n"},
		{name: "PUT with a body of unknown length that is empty", method: "PUT", body: of(""), fields: chunked, sent: "0\r\n\r\n", ours: true},
		{name: "a trailer is announced and sent", method: "POST", body: of("hello"), trailer: http.Header{"B": {"2"}, "A": {"1", "3"}},
			fields: "trailer: a,b|" + chunked, sent: "5\r\nhello\r\n0\r\nA: 1\r\nA: 3\r\nB: 2\r\n\r\n"},
		{name: "a trailer without a value is announced", method: "POST", body: of("x"), trailer: http.Header{"A": nil},
			fields: "trailer: a|" + chunked, sent: "1\r\nx\r\n0\r\n\r\n"},
		{name: "a trailer of a body of known length is left out", method: "POST", body: known, trailer: http.Header{"A": {"1"}},
			fields: "content-length: 5|", sent: "hello"},
		{name: "Close says so", method: "GET", close: true, fields: "connection: close|"},
		{name: "Connection of the caller's is written", method: "GET", header: http.Header{"Connection": {"close, x"}}, fields: "connection: close, x|"},
		{name: "Connection of the caller's stands in place of Close", method: "GET", close: true, header: http.Header{"Connection": {"x"}}, fields: "connection: x|", ours: true},
		{name: "Content-Length of the caller's is left out", method: "GET", header: http.Header{"Content-Length": {"5"}}},
		{name: "Content-Length beside a body is left out", method: "POST", body: known, header: http.Header{"Content-Length": {"9"}}, fields: "content-length: 5|", sent: "hello"},
		{name: "Transfer-Encoding of the caller's is left out", method: "GET", header: http.Header{"Transfer-Encoding": {"chunked"}}},
		{name: "Trailer of the caller's is left out", method: "GET", header: http.Header{"Trailer": {"A"}}},
		{name: "Host of the caller's is left out", method: "GET", header: http.Header{"Host": {"b.test"}}},
		{name: "framing in odd case is left out", method: "POST", body: known, ours: true, header: http.Header{
			"content-length": {"9"}, "TRANSFER-ENCODING": {"chunked"}, "tRAILER": {"A"}, "hOsT": {"b.test"}, "content-Length": {"1"},
		}, fields: "content-length: 5|", sent: "hello"},
		{name: "names that only look like framing are written", method: "GET", header: http.Header{"Content_length": {"9"}, "Hosts": {"x"}},
			fields: "content_length: 9|hosts: x|"},
		{name: "values lose the blanks around them", method: "GET", header: http.Header{"A": {" \tb c\t "}}, fields: "a: b c|"},
		{name: "values may be empty", method: "GET", header: http.Header{"A": {""}}, fields: "a: |"},
		{name: "values keep bytes beyond ASCII", method: "GET", header: http.Header{"A": {"\xff\u00e4"}}, fields: "a: \xff\u00e4|"},
		{name: "a field of two values has two lines", method: "GET", header: http.Header{"A": {"1", "2"}}, fields: "a: 1|a: 2|"},
	} {
		run := both
		if c.ours {
			run = bubble
		}
		send := func(t *testing.T, r *rig) error {
			var body io.Reader
			if c.body != nil {
				body = c.body()
			}
			req := request(t, c.method, body)
			if req.Close, req.Trailer = c.close, c.trailer; c.header != nil {
				req.Header = c.header.Clone()
			}
			req.Header["User-Agent"] = nil
			_, err := r.send(req)
			return err
		}
		heard(t, c.name, run, send, func(t *testing.T, wire string) {
			first := c.method + " /x?y HTTP/1.1\r\nHost: a.test\r\n"
			head, sent, _ := strings.Cut(wire, "\r\n\r\n")
			if !strings.HasPrefix(wire, first) {
				t.Fatalf("the server heard %q, want it to begin %q", wire, first)
			}
			if got := sorted(strings.TrimPrefix(head+"\r\n", first)); got != c.fields || sent != c.sent {
				t.Errorf("fields %q, behind them %q, want %q, %q", got, sent, c.fields, c.sent)
			}
		})
	}
}

// sorted returns the lines of a header in lower case, in their order, with bars behind.
func sorted(header string) string {
	fields := strings.Split(strings.TrimSuffix(header, "\r\n"), "\r\n")
	if header == "" || header == "\r\n" {
		return ""
	}
	for i, field := range fields {
		name, value, _ := strings.Cut(field, ":")
		if fields[i] = strings.ToLower(name) + ":" + value; strings.EqualFold(name, "Trailer") {
			fields[i] = strings.ToLower(field)
		}
	}
	slices.Sort(fields)
	return strings.Join(fields, "|") + "|"
}

func TestUserAgentIsThatOfTheCallerOrOfNetHTTP(t *testing.T) {
	for _, c := range []struct {
		name   string
		header http.Header
		want   string
	}{
		{name: "without one it is that of net/http", header: http.Header{}, want: "User-Agent: Go-http-client/1.1\r\n"},
		{name: "nil writes none", header: http.Header{"User-Agent": nil}},
		{name: "one is written as it is", header: http.Header{"User-Agent": {"curl/8"}}, want: "User-Agent: curl/8\r\n"},
	} {
		send := func(t *testing.T, r *rig) error {
			req := request(t, "GET", nil)
			req.Header = c.header
			_, err := r.send(req)
			return err
		}
		heard(t, c.name, both, send, func(t *testing.T, wire string) {
			if want := "GET /x?y HTTP/1.1\r\nHost: a.test\r\n" + c.want + "\r\n"; wire != want {
				t.Errorf("the server heard %q, want %q", wire, want)
			}
		})
	}
}

func TestTheFirstLineAndHostAreWrittenAsTheyAre(t *testing.T) {
	for _, c := range []struct {
		name string
		out  h1.Request
		want string
	}{
		{name: "no method is GET", out: h1.Request{Target: "/", Host: "a"}, want: "GET / HTTP/1.1\r\nHost: a\r\n"},
		{name: "a query", out: h1.Request{Target: "/x", Query: "a=b&c", Host: "a"}, want: "GET /x?a=b&c HTTP/1.1\r\nHost: a\r\n"},
		{name: "an empty query that is to be there", out: h1.Request{Target: "/x", ForceQuery: true, Host: "a"}, want: "GET /x? HTTP/1.1\r\nHost: a\r\n"},
		{name: "the whole server", out: h1.Request{Method: "OPTIONS", Target: "*", Host: "a"}, want: "OPTIONS * HTTP/1.1\r\nHost: a\r\n"},
		{name: "what a URL would clean", out: h1.Request{Target: "//a/../%2f%zz;x", Host: "a"}, want: "GET //a/../%2f%zz;x HTTP/1.1\r\nHost: a\r\n"},
		{name: "bytes beyond ASCII", out: h1.Request{Target: "/\xff", Host: "a"}, want: "GET /\xff HTTP/1.1\r\nHost: a\r\n"},
		{name: "a host with a port", out: h1.Request{Target: "/", Host: "a.test:8080"}, want: "GET / HTTP/1.1\r\nHost: a.test:8080\r\n"},
		{name: "a host of IPv6", out: h1.Request{Target: "/", Host: "[::1]:80"}, want: "GET / HTTP/1.1\r\nHost: [::1]:80\r\n"},
	} {
		send := func(t *testing.T, r *rig) error {
			c.out.Header = http.Header{"User-Agent": nil}
			_, err := r.pool.RoundTrip(t.Context(), new(h1.Exchange), &c.out, silent{}, nil)
			return err
		}
		heard(t, c.name, bubble, send, func(t *testing.T, wire string) {
			if wire != c.want+"\r\n" {
				t.Errorf("the server heard %q, want %q", wire, c.want+"\r\n")
			}
		})
	}
}

// TestARequestThatCouldBeReadInAnotherWayIsNotSent also holds that nothing is dialed for
// it, and that its body is closed.
func TestARequestThatCouldBeReadInAnotherWayIsNotSent(t *testing.T) {
	field := func(name, value string) func(*h1.Request) {
		return func(r *h1.Request) { r.Header = http.Header{name: {value}} }
	}
	trailer := func(name string) func(*h1.Request) {
		return func(r *h1.Request) { r.Length, r.Trailer = -1, http.Header{name: nil} }
	}
	for name, c := range map[string]func(*h1.Request){
		"without a header":                    func(r *h1.Request) { r.Header = nil },
		"a method with a blank":               func(r *h1.Request) { r.Method = "GET /" },
		"a method with a line end":            func(r *h1.Request) { r.Method = "GET\r\n" },
		"no target":                           func(r *h1.Request) { r.Target = "" },
		"a target with a blank":               func(r *h1.Request) { r.Target = "/ HTTP/1.1" },
		"a target with a line end":            func(r *h1.Request) { r.Target = "/\r\nA: b" },
		"a target with a tab":                 func(r *h1.Request) { r.Target = "/\t" },
		"a target with a DEL":                 func(r *h1.Request) { r.Target = "/\x7f" },
		"a query with a blank":                func(r *h1.Request) { r.Query = "a b" },
		"a query with a NUL":                  func(r *h1.Request) { r.Query = "\x00" },
		"no host":                             func(r *h1.Request) { r.Host = "" },
		"a host with a path":                  func(r *h1.Request) { r.Host = "a/b" },
		"a host with a user":                  func(r *h1.Request) { r.Host = "a@b" },
		"a host with a line end":              func(r *h1.Request) { r.Host = "a\r\nb: c" },
		"a host that is not ASCII":            func(r *h1.Request) { r.Host = "\u00e4.test" },
		"a field without a name":              field("", "x"),
		"a field whose name has a blank":      field("A ", "x"),
		"a field whose name has a colon":      field("A:", "x"),
		"a field whose name has a line end":   field("A\r\nB", "x"),
		"a value with CR and LF":              field("A", "x\r\nB: c"),
		"a value with a bare LF":              field("A", "x\nB: c"),
		"a value with a bare CR":              field("A", "x\rB: c"),
		"a value with a NUL":                  field("A", "x\x00"),
		"a trailer whose name has a line end": trailer("A\r\nB"),
		"a trailer without a name":            trailer(""),
		"a trailer that is a length":          trailer("content-length"),
		"a trailer that is a coding":          trailer("Transfer-Encoding"),
		"a trailer that is a Host":            trailer("HOST"),
		"a trailer that is a Trailer":         trailer("Trailer"),
	} {
		bubble(t, name, h1.Config{}, always(ok), func(t *testing.T, r *rig) {
			body := newPipe()
			out := &h1.Request{Method: "POST", Target: "/", Host: "a", Header: http.Header{}, Body: body, Length: 5}
			c(out)
			var x h1.Exchange
			_, err := r.pool.RoundTrip(t.Context(), &x, out, silent{}, nil)
			if !errors.Is(err, h1.ErrRequest) {
				t.Errorf("RoundTrip() = %v, want ErrRequest", err)
			}
			if !body.isClosed() || body.isRead() || r.dialed() != 0 || x.Stage() != h1.StageConnect {
				t.Errorf("closed %v, read %v, %d dialed, stage %d", body.isClosed(), body.isRead(), r.dialed(), x.Stage())
			}
		})
	}
	bubble(t, "a length without a body", h1.Config{}, always(ok), func(t *testing.T, r *rig) {
		out := &h1.Request{Method: "POST", Target: "/", Host: "a", Header: http.Header{}, Length: 5}
		if _, err := r.pool.RoundTrip(t.Context(), new(h1.Exchange), out, silent{}, nil); !errors.Is(err, h1.ErrRequest) {
			t.Errorf("RoundTrip() = %v, want ErrRequest", err)
		}
	})
}
