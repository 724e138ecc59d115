package lb_test

import (
	"bufio"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// take returns what has come and forgets it.
func (w *wire) take() []heard {
	w.mu.Lock()
	defer w.mu.Unlock()
	got := w.got
	w.got = nil
	return got
}

// What a backend reads of a request that comes through a pool is what it would read
// through a bare httputil.ReverseProxy with a Rewrite, but for the differences that
// asWanted lists.
func FuzzForwardLikeReverseProxy(f *testing.F) {
	for _, s := range forwardSeeds() {
		f.Add(s.method, s.target, s.fields, s.body)
	}
	const prefix = "/base"
	pool, proxy, w := poolAndProxy(f, prefix)
	f.Fuzz(func(t *testing.T, method, target, fields, body string) {
		raw := method + " " + target + " HTTP/1.1\r\nHost: front.test\r\n" + strings.ReplaceAll(fields+"\n", "\n", "\r\n") + "\r\n" + body
		in := parsed(raw)
		if in == nil {
			return // no request for a handler
		}
		status, ours := through(pool, parsed(raw), w)
		if in.Method == "CONNECT" { // a way to anywhere is not what a pool is for
			if ours != nil || status != 405 {
				t.Errorf("status %d, the backend got %v; want 405", status, ours)
			}
			return
		}
		if in.URL.Opaque != "" || in.URL.Path == "*" && in.Method != "OPTIONS" { // no path, of which they make one
			if ours != nil || status != 400 {
				t.Errorf("status %d, the backend got %v; want 400", status, ours)
			}
			return
		}
		_, theirs := through(proxy, parsed(raw), w)
		if theirs == nil && strings.ContainsFunc(in.Header.Get("Upgrade"), func(r rune) bool { return r < ' ' || r > '~' }) {
			return // an error for them; here it is a protocol that is not allowed, like others
		}
		if (ours == nil) != (theirs == nil) {
			t.Fatalf("%q\narrives as %v, status %d\nwant         %v", raw, ours, status, theirs)
		}
		if ours == nil {
			return
		}
		want := asWanted(in, *theirs)
		if path := pathOf(ours.line); strings.HasPrefix(target, "/") && path != prefix+pathOf("GET "+target+" HTTP/1.1") {
			t.Errorf("%q\narrives with the path %q", raw, path)
		}
		if got := meaning(*ours); got != meaning(want) {
			t.Errorf("%q\narrives as %s\nwant       %s", raw, got, meaning(want))
		}
	})
}

// forwardSeed is a request in parts: fields are lines without CR.
type forwardSeed struct{ method, target, fields, body string }

func forwardSeeds() []forwardSeed {
	return []forwardSeed{
		{"GET", "/a%2fb?q=1", "User-Agent: x\nAccept: */*\nX-A: b\nx-a: c\nX-Empty:", ""},
		{"POST", "/", "Content-Length: 2", "hi"},
		{"PUT", "http://other.test/x", "Transfer-Encoding: chunked\nExpect: 100-continue", "2\r\nhi\r\n0\r\n\r\n"},
		{"DELETE", "/x", "Connection:\nConnection: X-A, close\nX-A: b\nKeep-Alive: 5\nTE: trailers\nProxy-Authorization: x", ""},
		{"GET", "/", "X-Forwarded-For: 1.2.3.4\nForwarded: for=x\nX-Forwarded-Host: x", ""},
		// One for each difference.
		{"CONNECT", "x:80", "", ""},
		{"GET", "/a\"b[1]|ü/%7e", "", ""},
		{"GET", "http://other.test?q", "", ""},
		{"OPTIONS", "*", "", ""},
		{"GET", "foo:bar", "", ""},
		{"GET", "foo:x://y/admin", "", ""},
		{"GET", "/?a=%x&b=1;c", "", ""},
		{"GET", "/", "X-Real-Ip: 1.2.3.4\nX-Forwarded-Port: 1\nX-Forwarded-Prefix: /x\nX-Forwarded-Server: x\nX-Forwarded-Ssl: on\nX_Forwarded_For: 1.2.3.4", ""},
		{"GET", "/", "HTTP2-Settings: x\nUpgrade: h2c", ""},
		{"GET", "/", "Connection: Upgrade\nUpgrade: h2c, WebSocket/13\nUpgrade: websocket", ""},
		{"GET", "/", "Connection: Upgrade\nUpgrade: ü", ""},
		{"GET", "/", "Connection: close, Keep-Alive\nClose: x", ""},
		{"GET", "/", "User-Agent:\nUser-Agent: a\nUser-Agent: b", ""},
		{"PUT", "/", "Transfer-Encoding: chunked\nTrailer: X-T", "2\r\nhi\r\n0\r\nX-T: x\r\n\r\n"},
	}
}

// poolAndProxy returns the two to compare, before one backend under that prefix.
func poolAndProxy(f *testing.F, prefix string) (*lb.Pool, *httputil.ReverseProxy, *wire) {
	f.Helper()
	network := lbtest.NewNetwork()
	w := startWire(f, network, "wire.test:80", always(okReply))
	transport := network.Transport()
	transport.ExpectContinueTimeout = time.Nanosecond
	f.Cleanup(transport.CloseIdleConnections)
	pool, err := lb.New(lb.Targets("http://wire.test"+prefix), over(network), noEjection(), lb.WithRetry(lb.RetryPolicy{Attempts: 1}))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { pool.Close() })
	proxy := &httputil.ReverseProxy{Transport: transport, ErrorLog: log.New(io.Discard, "", 0), Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(&url.URL{Scheme: "http", Host: "wire.test", Path: prefix})
		r.Out.Host = r.In.Host
		r.SetXForwarded()
	}}
	return pool, proxy, w
}

// parsed is the request in raw as net/http's server would give it to a handler, nil if it
// would not, or if its body is broken: how much of that arrives is a matter of chance.
func parsed(raw string) *http.Request {
	read := func() (*http.Request, error) { return http.ReadRequest(bufio.NewReader(strings.NewReader(raw))) }
	r, err := read()
	if err == nil && strings.Trim(r.Host, "!$%&'()*+,-.:;=[]_~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" {
		return nil // which the server answers with 400
	}
	if err != nil {
		return nil
	}
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return nil
	}
	r, _ = read()
	for name := range r.Header {
		if strings.ContainsAny(name, " \t") {
			return nil
		}
	}
	r.RemoteAddr = "198.18.0.1:1234"
	return r
}

// through gives r to h and returns the status and what has come to w, nil if nothing
// has.
func through(h http.Handler, r *http.Request, w *wire) (status int, got *heard) {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, r)
	if all := w.take(); len(all) > 0 {
		got = &all[len(all)-1]
	}
	return rec.Code, got
}

// asWanted is what a backend should read where it reads theirs through an
// httputil.ReverseProxy.
func asWanted(in *http.Request, theirs heard) heard {
	want := theirs
	method, rest, _ := strings.Cut(theirs.line, " ")
	target := strings.TrimSuffix(rest, " HTTP/1.1")
	path, _, _ := strings.Cut(target, "?")
	switch {
	case in.URL.Path == "*" && in.Method == http.MethodOptions: // they make a path of it
		path = "*"
	case in.URL.Path == "": // they put a slash in its place
		path = "/base"
	}
	// They drop parameters that net/url does not understand.
	if query := in.URL.RawQuery; query != "" || in.URL.ForceQuery {
		path += "?" + query
	}
	want.line = method + " " + path + " HTTP/1.1"
	want.lines = nil
	for _, line := range theirs.lines {
		name, _, _ := strings.Cut(line, ": ")
		switch strings.ReplaceAll(strings.ToLower(name), "_", "-") {
		case "user-agent":
			if name == "User-Agent" && !*pooled {
				continue // see below
			}
		case "forwarded", "x-forwarded-port", "x-forwarded-prefix", "x-forwarded-server", "x-forwarded-ssl", "x-real-ip":
			continue // they know three of these fields
		case "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto":
			if strings.Contains(name, "_") {
				continue // they let look-alikes pass
			}
		case "http2-settings":
			continue // for an upgrade of the connection to HTTP/2
		case "connection":
			if allowedUpgrade(in) == "" {
				continue // they pass on every upgrade
			}
		case "upgrade":
			allowed := allowedUpgrade(in)
			if allowed == "" {
				continue // the same
			}
			line = name + ": " + allowed
		}
		want.lines = append(want.lines, line)
	}
	// They send the first of these alone, and none that is empty.
	if !*pooled {
		for _, v := range in.Header["User-Agent"] {
			if v == "" {
				continue
			}
			want.lines = append(want.lines, "User-Agent: "+v)
		}
	}
	// They take this for a field that Connection names.
	if values := in.Header["Close"]; hasOption(in, "close") {
		for _, v := range values {
			want.lines = append(want.lines, "Close: "+v)
		}
	}
	return want
}

// hasOption tells whether Connection names option.
func hasOption(r *http.Request, option string) bool {
	for name := range strings.SplitSeq(strings.Join(r.Header["Connection"], ","), ",") {
		if strings.EqualFold(strings.Trim(name, " \t"), option) {
			return true
		}
	}
	return false
}

// allowedUpgrade is what of r's Upgrade fields a pool without WithUpgrades asks for.
func allowedUpgrade(r *http.Request) string {
	var allowed []string
	for protocol := range strings.SplitSeq(strings.Join(r.Header["Upgrade"], ","), ",") {
		protocol = strings.Trim(protocol, " \t")
		if name, _, _ := strings.Cut(protocol, "/"); len(name) == len("websocket") && strings.EqualFold(name, "websocket") {
			allowed = append(allowed, protocol)
		}
	}
	return strings.Join(allowed, ", ")
}

func pathOf(line string) string {
	_, rest, _ := strings.Cut(line, " ")
	path, _, _ := strings.Cut(strings.TrimSuffix(rest, " HTTP/1.1"), "?")
	return path
}

// meaning is h in a form that is equal for two requests that mean the same: the path
// unescaped, because they escape it anew, chunks put together, trailers left out, of
// which they send the names alone.
func meaning(h heard) string {
	method, _, _ := strings.Cut(h.line, " ")
	_, query, asked := strings.Cut(h.line, "?")
	path, err := url.PathUnescape(pathOf(h.line))
	if err != nil {
		path = pathOf(h.line)
	}
	lines := slices.DeleteFunc(slices.Clone(h.lines), func(line string) bool { return strings.HasPrefix(line, "Trailer: ") })
	slices.SortStableFunc(lines, func(a, b string) int {
		nameA, _, _ := strings.Cut(a, ":")
		nameB, _, _ := strings.Cut(b, ":")
		return strings.Compare(nameA, nameB)
	})
	body := h.body
	if len(h.values("Transfer-Encoding")) > 0 {
		all, _ := io.ReadAll(httputil.NewChunkedReader(strings.NewReader(body)))
		body = string(all)
	}
	return fmt.Sprintf("%q %q %q %t\n%q\n%q", method, path, query, asked, lines, body)
}
