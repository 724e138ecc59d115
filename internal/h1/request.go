package h1

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Request is what goes out. It is not changed.
type Request struct {
	Method     string // empty: GET
	Target     string // path as it is to be written, or the whole that is, such as *
	Query      string // behind a question mark
	ForceQuery bool   // write the question mark of an empty query too
	Host       string
	// Header has all fields but Host, Content-Length, Transfer-Encoding and Trailer,
	// which are left out. Without User-Agent that of net/http is written; a value of nil
	// writes none.
	Header http.Header
	// Body is closed when it is no longer wanted, also by RoundTrip that fails. It may
	// be closed while it is read, and should then end the Read. A Body may have a method
	// AppendTo; see Whole.
	Body io.ReadCloser
	// Length is that of Body; below zero: unknown.
	Length int64
	// Trailer's names are announced; its values are sent when Body has ended.
	Trailer http.Header
	// Close asks the server to close the connection.
	Close bool
	// NoHeaderTimeout waits for the answer's head for as long as it takes.
	NoHeaderTimeout bool
	// Trace is told of what happens, but for informational answers; nil: nobody is.
	Trace *httptrace.ClientTrace
}

// Whole is what a Body may be that can be at hand.
type Whole interface {
	// AppendTo appends the whole of the body to dst, if it is at hand and has at most
	// most bytes, and tells whether it did. Body is not read then.
	AppendTo(dst []byte, most int) ([]byte, bool)
}

// atHand is the longest body that is sent with the head, on the caller's goroutine:
// whatever the server does, a socket takes that much.
const atHand = 8 << 10

// mostKept is the size of the largest buffer that is kept for other requests.
const mostKept = 16 << 10

// buffers are for heads, with bodies that are at hand.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 4<<10); return &b }}

// wantsClose tells whether the request says that it is the last on its connection.
func (r *Request) wantsClose() bool {
	if r.Close {
		return true
	}
	for _, line := range r.Header["Connection"] {
		for option := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.Trim(option, " \t"), "close") {
				return true
			}
		}
	}
	return false
}

// expects tells whether the server is to be asked before the body is sent.
func (r *Request) expects() bool {
	e := r.Header["Expect"]
	return r.Body != nil && len(e) > 0 && strings.EqualFold(e[0], "100-continue")
}

// Check returns what is wrong with the request if it cannot be sent.
func (r *Request) Check() error {
	buf := buffers.Get().(*[]byte)
	head, err := r.appendHead((*buf)[:0])
	if *buf = head; cap(head) <= mostKept {
		buffers.Put(buf)
	}
	return err
}

// appendHead appends the head to b, and tells what is wrong with the request: nothing
// must go out of a head that the server could read in another way.
func (r *Request) appendHead(b []byte) ([]byte, error) {
	method := r.Method
	if method == "" {
		method = http.MethodGet
	}
	switch {
	case r.Header == nil:
		return b, fmt.Errorf("%w: it has no header", ErrRequest)
	case r.Body == nil && r.Length > 0:
		return b, fmt.Errorf("%w: its length is %d and it has no body", ErrRequest, r.Length)
	case !isToken(method):
		return b, fmt.Errorf("%w: method %q", ErrRequest, method)
	case r.Target == "" || !isTarget(r.Target):
		return b, fmt.Errorf("%w: target %q", ErrRequest, r.Target)
	case !isTarget(r.Query):
		return b, fmt.Errorf("%w: query %q", ErrRequest, r.Query)
	case r.Host == "" || !isHost(r.Host):
		return b, fmt.Errorf("%w: host %q", ErrRequest, r.Host)
	}
	b = append(append(b, method...), ' ')
	b = append(b, r.Target...)
	if r.ForceQuery || r.Query != "" {
		b = append(append(b, '?'), r.Query...)
	}
	b = append(append(b, " HTTP/1.1\r\nHost: "...), r.Host...)
	b = append(b, "\r\n"...)
	if _, ok := r.Header["User-Agent"]; !ok {
		b = append(b, "User-Agent: Go-http-client/1.1\r\n"...)
	}
	if r.Close && len(r.Header["Connection"]) == 0 {
		b = append(b, "Connection: close\r\n"...)
	}
	b, err := r.appendFraming(b, method)
	if err == nil {
		b, err = appendFields(b, r.Header)
	}
	return append(b, "\r\n"...), err
}

// appendFraming appends how long the body is.
func (r *Request) appendFraming(b []byte, method string) ([]byte, error) {
	switch {
	case r.Body == nil:
		if method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch {
			b = append(b, "Content-Length: 0\r\n"...)
		}
		return b, nil
	case r.Length >= 0:
		b = strconv.AppendInt(append(b, "Content-Length: "...), r.Length, 10)
		return append(b, "\r\n"...), nil
	}
	b = append(b, "Transfer-Encoding: chunked\r\n"...)
	if len(r.Trailer) == 0 {
		return b, nil
	}
	names := make([]string, 0, len(r.Trailer))
	for name := range r.Trailer {
		if !isToken(name) || framing(name) {
			return b, fmt.Errorf("%w: trailer %q", ErrRequest, name)
		}
		names = append(names, name)
	}
	slices.Sort(names)
	b = append(b, "Trailer: "...)
	b = append(b, strings.Join(names, ",")...)
	return append(b, "\r\n"...), nil
}

// framing tells whether the field of that name says how long a body is, or is written
// for another reason from what is beside the header.
func framing(name string) bool {
	switch len(name) {
	case len("Host"):
		return strings.EqualFold(name, "Host")
	case len("Trailer"):
		return strings.EqualFold(name, "Trailer")
	case len("Content-Length"):
		return strings.EqualFold(name, "Content-Length")
	case len("Transfer-Encoding"):
		return strings.EqualFold(name, "Transfer-Encoding")
	}
	return false
}

// appendFields appends h but for what frames, sorted by name: what is sent should not
// differ for no reason.
func appendFields(b []byte, h http.Header) ([]byte, error) {
	var room [32]string
	names := room[:0]
	for name := range h {
		if !framing(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		if !isToken(name) {
			return b, fmt.Errorf("%w: field name %q", ErrRequest, name)
		}
		for _, value := range h[name] {
			if value == "" && name == "User-Agent" {
				continue // net/http's way to ask for none
			}
			if !isValue(value) {
				return b, fmt.Errorf("%w: value of field %s: %q", ErrRequest, name, value)
			}
			b = append(append(b, name...), ": "...)
			b = append(append(b, strings.Trim(value, " \t")...), "\r\n"...)
		}
	}
	return b, nil
}

// traced tells of what was written of the head.
func (r *Request) traced(write error) {
	t := r.Trace
	if t == nil || write != nil {
		return
	}
	if t.WroteHeaderField != nil {
		for name, values := range r.Header {
			t.WroteHeaderField(name, values)
		}
	}
	if t.WroteHeaders != nil {
		t.WroteHeaders()
	}
}

func (r *Request) wrote(err error) {
	if r.Trace != nil && r.Trace.WroteRequest != nil {
		r.Trace.WroteRequest(httptrace.WroteRequestInfo{Err: err})
	}
}

// The tables of RFC 9110 and RFC 3986 as far as they matter here: what no server may
// take for the end of a word, a line or a head.
var (
	tokenBytes = byteSet("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
	hostBytes  = byteSet("!$%&'()*+,-.:;=[]_~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
)

func byteSet(s string) (set [256]bool) {
	for i := range len(s) {
		set[s[i]] = true
	}
	return set
}

func isToken(s string) bool {
	for i := range len(s) {
		if !tokenBytes[s[i]] {
			return false
		}
	}
	return s != ""
}

func isHost(s string) bool {
	for i := range len(s) {
		if !hostBytes[s[i]] {
			return false
		}
	}
	return true
}

// isTarget tells whether s holds no space and no control character.
func isTarget(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] == 0x7f {
			return false
		}
	}
	return true
}

// isValue tells whether s holds no control character but the tab.
func isValue(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' && s[i] != '\t' || s[i] == 0x7f {
			return false
		}
	}
	return true
}

// keepAliveLimit reads "timeout" of a Keep-Alive field; zero without.
func keepAliveLimit(lines []string) time.Duration {
	for _, line := range lines {
		for part := range strings.SplitSeq(line, ",") {
			name, value, _ := strings.Cut(strings.Trim(part, " \t"), "=")
			if !strings.EqualFold(name, "timeout") {
				continue
			}
			if n, err := strconv.Atoi(value); err == nil && n > 0 && n <= 24*60*60 {
				return time.Duration(n) * time.Second
			}
		}
	}
	return 0
}
