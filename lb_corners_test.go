package lb_test

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// corner is one exchange that proxies commonly get wrong: what the client sends, what
// the backend does, and what both must see. It can be run against any handler.
type corner struct {
	name    string
	send    string // by the client, byte for byte
	backend lbtest.Behavior
	wrap    func(http.Handler) http.Handler // around the proxy; may be nil
	ok      func(seen) bool
}

// lockingCorner is the one for which the standard library's proxy waits with a lock held,
// so that virtual time stands still.
const lockingCorner = "an early answer does not wait for the upload"

// seen is what came of an exchange.
type seen struct {
	client   string // all that the client read
	received []lbtest.Received
	after    time.Duration // until the client had read it
	open     int           // connections to the backend that are open at the end
}

// fields is the header that the backend received with the first request.
func (s seen) fields() http.Header {
	if len(s.received) == 0 {
		return http.Header{}
	}
	return s.received[0].Header
}

func (s seen) target() string {
	if len(s.received) == 0 {
		return ""
	}
	return s.received[0].Target
}

// handle is a backend that is a function.
func handle(f http.HandlerFunc) lbtest.Behavior { return lbtest.Handle(f) }

// get is a GET of target with fields, on a connection for it alone.
func get(target string, fields ...string) string {
	return "GET " + target + " HTTP/1.1\r\nHost: x.test\r\nConnection: close\r\n" + strings.Join(append(fields, ""), "\r\n") + "\r\n"
}

// switches is a backend that switches to WebSocket and sends back what comes.
var switches = handle(func(w http.ResponseWriter, r *http.Request) {
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
	io.Copy(c, rw)
})

var hints = handle(func(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Link", "</x>")
	w.Header().Set("Keep-Alive", "timeout=5")
	w.WriteHeader(103)
	w.Header().Del("Link")
	w.Header().Del("Keep-Alive")
	io.WriteString(w, "done")
})

// plain is a writer that can do nothing but write.
type plain struct{ w http.ResponseWriter }

func (p plain) Header() http.Header         { return p.w.Header() }
func (p plain) Write(b []byte) (int, error) { return p.w.Write(b) }
func (p plain) WriteHeader(code int)        { p.w.WriteHeader(code) }

func corners() []corner {
	return []corner{
		{"a path goes out byte for byte", get(`/a%2fb"^[c]`), lbtest.Answer(), nil,
			func(s seen) bool { return s.target() == `/a%2fb"^[c]` }},
		{"a query that cannot be parsed goes out as it is", get("/?a=%zz&b=1;c"), lbtest.Answer(), nil,
			func(s seen) bool { return s.target() == "/?a=%zz&b=1;c" }},
		{"an empty query keeps its mark", get("/x?"), lbtest.Answer(), nil,
			func(s seen) bool { return s.target() == "/x?" }},
		{"fields that any Connection line names stay here", get("/", "Connection:", "Connection: X-Secret", "X-Secret: 1"), lbtest.Answer(), nil,
			func(s seen) bool { return s.target() == "/" && s.fields()["X-Secret"] == nil }},
		{"only trailers is left of TE", get("/", "TE: gzip, trailers"), lbtest.Answer(), nil,
			func(s seen) bool { return strings.Join(s.fields()["Te"], ",") == "trailers" }},
		{"X_Forwarded_For does not pass for the field with hyphens", get("/", "X_Forwarded_For: 6.6.6.6"), lbtest.Answer(), nil,
			func(s seen) bool {
				return s.target() == "/" && s.fields()[http.CanonicalHeaderKey("X_Forwarded_For")] == nil
			}},
		{"X-Real-Ip and X-Forwarded-Port of clients are not believed", get("/", "X-Real-Ip: 6.6.6.6", "X-Forwarded-Port: 1"), lbtest.Answer(), nil,
			func(s seen) bool {
				return s.target() == "/" && s.fields()["X-Real-Ip"] == nil && s.fields()["X-Forwarded-Port"] == nil
			}},
		{"no User-Agent is invented", get("/"), lbtest.Answer(), nil,
			func(s seen) bool { _, ok := s.fields()["User-Agent"]; return s.target() == "/" && !ok }},
		{"no Content-Type is guessed", get("/"), lbtest.Raw("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"), nil,
			func(s seen) bool {
				return strings.Contains(s.client, "<html>") && !strings.Contains(s.client, "Content-Type")
			}},
		{"request trailers arrive", "PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Sum: 12\r\n\r\n",
			trailerOf("X-Sum"), nil, func(s seen) bool { return strings.Contains(s.client, "trailer 12") }},
		{"also those that were not announced", "PUT / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Sum: 12\r\n\r\n",
			trailerOf("X-Sum"), nil, func(s seen) bool { return strings.Contains(s.client, "trailer 12") }},
		{"trailers of answers arrive, not announced and without a body", get("/", "TE: trailers"),
			handle(func(w http.ResponseWriter, _ *http.Request) {
				http.NewResponseController(w).Flush()
				w.Header().Set(http.TrailerPrefix+"X-Sum", "12")
			}), nil, func(s seen) bool { return strings.Contains(s.client, "X-Sum: 12") }},
		{"early hints are passed on", get("/"), hints, nil,
			func(s seen) bool {
				return strings.Contains(s.client, "103 Early Hints") && strings.Contains(s.client, "Link: </x>")
			}},
		{"without fields that are for one connection", get("/"), hints, nil,
			func(s seen) bool {
				return strings.Contains(s.client, "103 Early Hints") && !strings.Contains(s.client, "Keep-Alive")
			}},
		{"but not to a client of HTTP/1.0", "GET / HTTP/1.0\r\n\r\n", hints, nil,
			func(s seen) bool { return strings.Contains(s.client, "done") && !strings.Contains(s.client, "103") }},
		{"and leave the fields of a middleware alone", get("/"), hints,
			func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("X-Outer", "1")
					h.ServeHTTP(w, r)
				})
			},
			func(s seen) bool {
				_, final, _ := strings.Cut(s.client, "200 OK")
				return strings.Contains(final, "X-Outer: 1")
			}},
		{"a header that the backend has flushed is there at once", get("/"),
			handle(func(w http.ResponseWriter, r *http.Request) {
				http.NewResponseController(w).Flush()
				select {
				case <-time.After(time.Hour):
				case <-r.Context().Done():
				}
			}), nil, func(s seen) bool { return strings.HasPrefix(s.client, "HTTP/1.1 200 OK") }},
		{lockingCorner, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nbegin", lbtest.Early(403, 10), nil,
			func(s seen) bool { return strings.HasPrefix(s.client, "HTTP/1.1 403") }},
		{"a refused Expect gets no 100", "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", lbtest.Raw("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), nil,
			func(s seen) bool { return strings.HasPrefix(s.client, "HTTP/1.1 401") }},
		{"an upgrade becomes a tunnel, and no byte behind the request is lost", "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nfirst bytes", switches, nil,
			func(s seen) bool {
				return strings.HasPrefix(s.client, "HTTP/1.1 101") && strings.HasSuffix(s.client, "first bytes")
			}},
		{"h2c is not asked for on behalf of a client", "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n", switches, nil,
			func(s seen) bool {
				return len(s.received) == 1 && s.fields()["Upgrade"] == nil && s.fields()["Http2-Settings"] == nil
			}},
		{"an upgrade that nobody asked for is no tunnel", get("/"), lbtest.Raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: evil\r\n\r\nbytes"), nil,
			func(s seen) bool { return strings.HasPrefix(s.client, "HTTP/1.1 502") }},
		{"a writer that cannot be taken over leaves no tunnel open", "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", switches,
			func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.ServeHTTP(plain{w}, r) })
			},
			func(s seen) bool { return strings.Contains(s.client, "HTTP/1.1 50") && s.open == 0 }},
		{"a redirect to the backend's own address leads through the proxy", get("/"),
			handle(func(w http.ResponseWriter, r *http.Request) {
				addr := r.Context().Value(http.LocalAddrContextKey).(fmt.Stringer).String()
				http.Redirect(w, r, "http://"+addr+"/next", http.StatusFound)
			}), nil, func(s seen) bool { return strings.Contains(s.client, "Location: /next\r\n") }},
		{"an answer that breaks off is seen as a cut", get("/"), lbtest.ResetMidChunked(10), nil,
			func(s seen) bool {
				return strings.Contains(s.client, "xxx") && !strings.HasSuffix(s.client, "0\r\n\r\n")
			}},
	}
}

// trailerOf is a backend that answers with a trailer of the request.
func trailerOf(name string) lbtest.Behavior {
	return handle(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "trailer %s", r.Trailer.Get(name))
	})
}

// run carries the exchange out through the handler that proxy returns. What goes on has
// that long to end.
func (c *corner) run(t *testing.T, proxy func(r *rig) http.Handler, after time.Duration) seen {
	r := newBackends(t, 1)
	b := r.backends[0]
	b.Set(c.backend)
	h := proxy(r)
	if c.wrap != nil {
		h = c.wrap(h)
	}
	ln, err := r.net.Listen(frontAddr)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: h, ErrorLog: log.New(io.Discard, "", 0)}
	go server.Serve(ln)
	if after > 0 {
		defer linger(after)
	}
	defer server.Close()
	conn := r.dial()
	defer conn.Close()
	began := time.Now()
	fmt.Fprint(conn, c.send)
	conn.SetReadDeadline(began.Add(500 * time.Millisecond)) // before net/http sends the body of an Expect by itself
	var got bytes.Buffer
	io.Copy(&got, conn)
	if after > 0 {
		synctest.Wait()
	}
	return seen{client: got.String(), received: b.Received(), after: time.Since(began), open: b.OpenConns()}
}

func cornerThroughPool(r *rig) http.Handler {
	pool, err := lb.New(r.targets(), over(r.net))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { pool.Close() })
	return pool
}

// cornerThroughBare is httputil.ReverseProxy as its documentation recommends it.
func cornerThroughBare(r *rig) http.Handler {
	target, err := url.Parse(r.backends[0].URL())
	if err != nil {
		r.t.Fatal(err)
	}
	transport := r.net.Transport()
	transport.ExpectContinueTimeout = time.Second // as http.DefaultTransport has it
	r.t.Cleanup(transport.CloseIdleConnections)
	return &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(target)
			p.SetXForwarded()
		},
		Transport: transport,
		ErrorLog:  log.New(io.Discard, "", 0),
	}
}

// TestCorners holds the pool to every corner, and the table in README.md to what came
// of them for it and for the standard library's proxy.
func TestCorners(t *testing.T) {
	inReadme := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\| (.+) \| (yes|no) \| (yes|no) \|$`).FindAllStringSubmatch(readme(t), -1) {
		inReadme[m[1]] = m[2] + " " + m[3]
	}
	word := map[bool]string{true: "yes", false: "no"}
	var table strings.Builder
	for _, c := range corners() {
		var pool, bare seen
		bubble(t, "lb: "+c.name, func(t *testing.T) { pool = c.run(t, cornerThroughPool, time.Minute) })
		if c.name == lockingCorner {
			bare = c.run(t, cornerThroughBare, 0)
		} else {
			bubble(t, "httputil.ReverseProxy: "+c.name, func(t *testing.T) { bare = c.run(t, cornerThroughBare, time.Minute) })
		}
		if !c.ok(pool) {
			t.Errorf("%s: the client read %q, the backend received %+v; open: %d", c.name, pool.client, pool.received, pool.open)
		}
		fmt.Fprintf(&table, "| %s | %s | %s |\n", c.name, word[c.ok(pool)], word[c.ok(bare)])
		if got, want := inReadme[c.name], word[c.ok(pool)]+" "+word[c.ok(bare)]; got != want {
			t.Errorf("README.md says of %q: %q, want %q", c.name, got, want)
		}
	}
	if t.Failed() {
		t.Logf("the table is\n%s", &table)
	}
}
