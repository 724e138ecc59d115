package h1_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// FuzzRequest asks h1 to send anything. Either it refuses, and not one byte leaves, or
// a server reads exactly one request, with the meaning that was meant.
func FuzzRequest(f *testing.F) {
	add := func(method, target, query, host, name, value, body, trailer, last string, kind byte) {
		f.Add(method, target, query, host, name, value, body, trailer, last, kind)
	}
	add("GET", "/", "", "a.test", "Accept", "*/*", "", "", "", 0)
	add("POST", "/x", "a=b", "a.test:80", "Content-Length", "5", "hello", "", "", 1)
	add("PUT", "/x", "", "[::1]:80", "transfer-encoding", "chunked", "hello", "X-Sum", "1", 2)
	add("PATCH", "*", "", "a.test", "hOsT", "b.test", "", "Trailer", "x", 2)
	add("", "/a b", "", "a.test", "X", "a\r\nb: c", "", "", "", 0)
	add("G ET", "/", "x y", "a.test/x", "X Y", "", "body", "A:", "b\n", 7)
	add("DELETE", "http://b.test/", "", "a.test", "Connection", "close", "x", "A", "b\r\n\r\nGET / HTTP/1.1", 2)
	add("HEAD", "/\x7f", "\x00", "", "User-Agent", "", "x", "Content-Length", "0", 3)
	add("OPTIONS", "*", "", "a.test", "Expect", "100-continue", "x", "", "", 1)
	f.Fuzz(func(t *testing.T, method, target, query, host, name, value, body, trailer, last string, kind byte) {
		if len(body) > 100_000 {
			return // longer than anything that is new
		}
		out := &h1.Request{
			Method: method, Target: target, Query: query, Host: host, ForceQuery: kind&4 != 0, Close: kind&8 != 0,
			Header: http.Header{name: {value}, "Accept": {"a", "b"}},
		}
		switch kind & 3 {
		case 1:
			out.Body, out.Length = io.NopCloser(strings.NewReader(body)), int64(len(body))
		case 2:
			out.Body, out.Length = io.NopCloser(strings.NewReader(body)), -1
			if trailer != "" {
				out.Trailer = http.Header{trailer: {last}}
			}
		case 3:
			out.Body, out.Length = &atHand{text: body}, int64(len(body))
		}
		synctest.Test(t, func(t *testing.T) { fuzzRequest(t, out, body) })
	})
}

func fuzzRequest(t *testing.T, out *h1.Request, body string) {
	wire := make(chan []byte, 1)
	r := newRig(t, h1.Config{}, func(p *peer) {
		answer := time.AfterFunc(time.Minute, func() { // in the bubble: when nothing more comes
			p.say("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
		})
		all, _ := io.ReadAll(p.Conn)
		answer.Stop()
		wire <- all
	})
	var x h1.Exchange
	resp, err := r.pool.RoundTrip(t.Context(), &x, out, silent{}, nil)
	sent, _ := x.Moved()
	if errors.Is(err, h1.ErrRequest) && sent == 0 {
		if r.dialed() > 0 {
			t.Fatal("h1 dialed for a request that it refuses")
		}
		return
	}
	synctest.Wait()
	all := <-wire
	if int64(len(all)) != sent {
		t.Errorf("Moved() = %d sent, the server got %d", sent, len(all))
	}
	if errors.Is(err, h1.ErrRequest) { // a trailer's value, which is not known before it is sent
		if req, _ := readSent(t, out, all); req != nil {
			t.Fatalf("h1 refused, with %v, a request that the server has whole: %q", err, all)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	req, got := readSent(t, out, all)
	if req == nil {
		t.Fatalf("a server cannot read %q", all)
	}
	checkMeaning(t, out, req)
	if out.Body != nil && got != body || out.Body == nil && got != "" {
		t.Fatalf("body %q, want %q", got, body)
	}
}

// readSent reads the one request that all must be; nil if it is none. net/http refuses
// targets of which it cannot make a URL: what became of the target is looked at here.
func readSent(t *testing.T, out *h1.Request, all []byte) (*http.Request, string) {
	t.Helper()
	line, rest, _ := bytes.Cut(all, []byte("\r\n"))
	method, target := out.Method, out.Target
	if method == "" {
		method = "GET"
	}
	if out.ForceQuery || out.Query != "" {
		target += "?" + out.Query
	}
	if want := method + " " + target + " HTTP/1.1"; string(line) != want || strings.Count(want, " ") != 2 {
		t.Fatalf("the first line is %q, want %q", line, want)
	}
	br := bufio.NewReader(io.MultiReader(strings.NewReader(method+" / HTTP/1.1\r\n"), bytes.NewReader(rest)))
	req, err := http.ReadRequest(br)
	if err != nil {
		return nil, ""
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, ""
	}
	if left, _ := io.ReadAll(br); len(left) > 0 {
		t.Fatalf("after the request comes %q", left)
	}
	return req, string(body)
}

// checkMeaning holds what a server has read to what was to be sent.
func checkMeaning(t *testing.T, out *h1.Request, req *http.Request) {
	t.Helper()
	if req.Host != out.Host {
		t.Errorf("host %q, want %q", req.Host, out.Host)
	}
	if out.Body != nil && req.ContentLength != out.Length {
		t.Errorf("length %d, want %d", req.ContentLength, out.Length)
	}
	got := req.Header.Clone()
	for _, name := range []string{"Content-Length", "Trailer"} { // net/http may leave them in
		got.Del(name)
	}
	if _, set := out.Header["User-Agent"]; !set && len(got["User-Agent"]) > 0 {
		if got["User-Agent"] = got["User-Agent"][1:]; len(got["User-Agent"]) == 0 {
			delete(got, "User-Agent")
		}
	}
	if _, set := out.Header["Connection"]; !set && out.Close && len(got["Connection"]) > 0 {
		if got["Connection"] = got["Connection"][1:]; len(got["Connection"]) == 0 {
			delete(got, "Connection")
		}
	}
	want := asRead(out.Header)
	// An empty User-Agent asks for none.
	want["User-Agent"] = slices.DeleteFunc(want["User-Agent"], func(v string) bool { return v == "" })
	if len(want["User-Agent"]) == 0 {
		delete(want, "User-Agent")
	}
	if !maps.EqualFunc(got, want, sameValues) {
		t.Errorf("header %q, want %q", got, want)
	}
	if want := asRead(out.Trailer); !maps.EqualFunc(req.Trailer, want, sameValues) {
		t.Errorf("trailer %q, want %q", req.Trailer, want)
	}
}

// asRead is how a server should see h. Names that differ in case only are one to it, and
// their order is not known.
func asRead(h http.Header) http.Header {
	seen := make(http.Header)
	for name, values := range h {
		for _, value := range values {
			seen.Add(name, strings.Trim(value, " \t"))
		}
	}
	for _, name := range []string{"Host", "Content-Length", "Transfer-Encoding", "Trailer"} {
		seen.Del(name)
	}
	return seen
}

func sameValues(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// atHand is a body that is there.
type atHand struct {
	text   string
	closed bool
}

func (b *atHand) Read(p []byte) (int, error) {
	if b.text == "" {
		return 0, io.EOF
	}
	n := copy(p, b.text)
	b.text = b.text[n:]
	return n, nil
}

func (b *atHand) Close() error { b.closed = true; return nil }

func (b *atHand) AppendTo(dst []byte, most int) ([]byte, bool) {
	if len(b.text) > most {
		return dst, false
	}
	return append(dst, b.text...), true
}
