package lb_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// What a backend and a client read of each other, byte for byte.

// Each field of a request reaches the backend as the client wrote it, but for those
// that are for the client's connection alone and for what it claims about its way.
func TestFieldsOfARequest(t *testing.T) {
	for _, tt := range []struct {
		name string
		sent string // lines after Host, without CR
		want []string
	}{
		// All Connection fields count, also after an empty one (golang/go#46313).
		{"empty Connection before another", "Connection:\nConnection: X-Secret, keep-alive\nX-Secret: a\nx-secret: b\nX-A: c", []string{"X-A: c"}},
		{"several Connection fields", "Connection: X-One\nX-One: a\nConnection: close\nX-Two: b\nConnection: , x-TWO ,,\tX-Three,\nX-Three: c", nil},
		{"Connection that names itself", "Connection: Connection, close\nX-A: b", []string{"X-A: b"}},

		// A client cannot remove what the pool sets (golang/go#50580, golang/vulndb#3143,
		// traefik/traefik PR#11077, kube-rbac-proxy/kube-rbac-proxy PR#324).
		{"forwarded fields named in Connection", "Connection: X-Forwarded-For, X-Forwarded-Host\nConnection: x-forwarded-proto, X-Real-Ip, Host\nX-Forwarded-For: 1.2.3.4\nX-Real-Ip: 1.2.3.4", nil},

		// What a stranger says about its way is not passed on (golang/go PR#36678,
		// golang/go#50465, golang/vulndb#3299).
		{"forwarded fields", "X-Forwarded-For: 1.2.3.4\nX-Forwarded-For: 5.6.7.8\nX-Forwarded-Host: evil.test\nX-Forwarded-Proto: https\nX-Forwarded-Port: 1\nX-Forwarded-Prefix: /evil\n" +
			"X-Forwarded-Server: evil\nX-Forwarded-Ssl: on\nX-Real-Ip: 1.2.3.4\nForwarded: for=1.2.3.4;host=evil.test\nX-Forwarded: kept", []string{"X-Forwarded: kept"}},
		{"look-alikes of forwarded fields", "X_Forwarded_For: 1.2.3.4\nx-forwarded_for: 1.2.3.4\nX_FORWARDED-HOST: evil.test\nX_Real_IP: 1.2.3.4\nX_Other: kept", []string{"X_other: kept"}},

		// Nothing that is for one connection alone is relayed (golang/go#16875,
		// golang/go#14174, elazarl/goproxy#78).
		{"fields for one connection", "Connection: keep-alive\nKeep-Alive: timeout=5\nProxy-Connection: keep-alive\nProxy-Authenticate: Basic\nProxy-Authorization: Basic eA==\n" +
			"TE: gzip\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAAQAAP__\nTrailer: X-T\nX-A: b", []string{"X-A: b"}},
		{"an upgrade that is not allowed", "Connection: Upgrade, HTTP2-Settings\nUpgrade: h2c, TLS/1.2\nHTTP2-Settings: AAMAAABkAAQAAP__", nil},
		{"an upgrade that Connection does not name", "Upgrade: websocket", nil},

		// Of TE only trailers is kept (golang/go#21096).
		{"trailers among others", "TE: gzip;q=0.5, Trailers\nConnection: TE", []string{"Te: trailers"}},
		{"trailers on a second line", "TE: gzip\nTE: trailers", []string{"Te: trailers"}},
		{"no trailers", "TE: deflate, xtrailers", nil},
		{"letters that only Unicode takes for others", "TE: trailerſ\nConnection: Upgrade\nUpgrade: webſocket", nil},

		// Nothing is put in their place (golang/go#15524, knative/pkg PR#2007).
		{"no field at all", "", nil},
		{"User-Agent of the client", "User-Agent: curl/8.5 (x; y)", []string{"User-Agent: curl/8.5 (x; y)"}},
		{"Accept-Encoding of the client", "Accept-Encoding: br;q=1.0, gzip", []string{"Accept-Encoding: br;q=1.0, gzip"}},

		{"fields on several lines keep their order", "X-A: 2\nX-B: 0\nx-a: 1\nX-A: 2, 3", []string{"X-A: 2", "X-A: 1", "X-A: 2, 3", "X-B: 0"}},
		{"values that are empty", "X-A:\nX-B: \t \nX-A: b", []string{"X-A: ", "X-A: b", "X-B: "}},
		{"bytes that are not ASCII", "X-A: ü\xff\tb", []string{"X-A: ü\xff\tb"}},
		{"cookies and quotes", "Cookie: a=b; c=\"d, e\"\nCookie: f=g", []string{`Cookie: a=b; c="d, e"`, "Cookie: f=g"}},
		// net/http writes names in canonical form, and its transport sends the first
		// User-Agent alone, none if that is empty.
		{"names in any case", "x-lower: a\nX-UPPER: b\nsec-WebSocket-Key: c\n~odd.name!: d", []string{"Sec-Websocket-Key: c", "X-Lower: a", "X-Upper: b", "~odd.name!: d"}},
		{"two User-Agents", "User-Agent: a\nUser-Agent: b", byTransport([]string{"User-Agent: a", "User-Agent: b"}, []string{"User-Agent: a"})},
		{"empty User-Agent", "User-Agent:", nil},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			r, w := newWireRig(t, "", always(okReply))
			sent := strings.ReplaceAll("GET / HTTP/1.1\nHost: front.test\n"+tt.sent+"\n", "\n", "\r\n")
			if tt.sent != "" {
				sent += "\r\n"
			}
			if a, _ := r.say(sent); !strings.HasPrefix(a, "HTTP/1.1 200 OK\r\n") {
				t.Fatalf("answer = %q", a)
			}
			got := w.only(t)
			if fields := got.fields(t); !slices.Equal(fields, tt.want) {
				t.Errorf("the backend sees\n%q, want\n%q", fields, tt.want)
			}
			for name, want := range map[string]string{"Host": "front.test", "X-Forwarded-For": "198.18.0.1", "X-Forwarded-Host": "front.test", "X-Forwarded-Proto": "http"} {
				if values := got.values(name); len(values) != 1 || values[0] != want {
					t.Errorf("%s = %q, want %q", name, values, want)
				}
			}
		})
	}
}

// The same for answers, informational ones too.
func TestFieldsOfAnAnswer(t *testing.T) {
	hops := "Connection:\nConnection: X-Secret, keep-alive\nX-Secret: a\nKeep-Alive: timeout=5\nProxy-Connection: close\nProxy-Authenticate: Basic\nProxy-Authorization: Basic eA==\n" +
		"TE: trailers\nUpgrade: h2c\nHTTP2-Settings: x\n"
	for _, tt := range []struct {
		name string
		sent string // lines of the head
		body string
		want []string // without the status line and Date
	}{
		{"fields for one connection", "HTTP/1.1 200 OK\n" + hops + "Content-Length: 2\nX-A: b", "ok", []string{"Content-Length: 2", "X-A: b"}},
		{"fields for one connection, in an informational answer", "HTTP/1.1 103 Early Hints\n" + hops + "Link: <a>\nlink: <b>\nContent-Length: 9\n\nHTTP/1.1 200 OK\nX-A: b\nContent-Length: 2", "ok",
			[]string{"Link: <a>", "Link: <b>", "HTTP/1.1 200 OK", "Content-Length: 2", "X-A: b"}},
		// net/http takes Connection away if it says close, with all that it names beside.
		{"a field named beside close", "HTTP/1.1 200 OK\nConnection: X-Secret, close\nX-Secret: a\nContent-Length: 2", "ok", []string{"Content-Length: 2", "X-Secret: a"}},
		{"a field named in Connection of an informational answer only", "HTTP/1.1 103 Early Hints\nConnection: X-A\nX-A: a\n\nHTTP/1.1 200 OK\nX-A: b\nContent-Length: 2", "ok",
			[]string{"HTTP/1.1 200 OK", "Content-Length: 2", "X-A: b"}},
		{"cookies and other fields on several lines", "HTTP/1.1 200 OK\nSet-Cookie: b=1; Path=/\nX-A: 2\nSet-Cookie: a=\"x, y\"\nx-a: 1\nX-A:\nSet-Cookie: b=1; Path=/\nContent-Length: 2", "ok",
			[]string{"Content-Length: 2", "Set-Cookie: b=1; Path=/", "Set-Cookie: a=\"x, y\"", "Set-Cookie: b=1; Path=/", "X-A: 2", "X-A: 1", "X-A: "}},
		{"no type, whatever it looks like", "HTTP/1.1 200 OK\nContent-Length: 13", "<html></html>", []string{"Content-Length: 13"}},
		{"no type for an error", "HTTP/1.1 500 Internal Server Error\nContent-Length: 2", "no", []string{"Content-Length: 2"}},
		{"type and names of servers as they are", "HTTP/1.1 200 OK\nContent-Type: Text/HTML;charset=UTF-8\nServer: nginx\nVia: 1.1 x\nContent-Length: 2", "ok",
			[]string{"Content-Length: 2", "Content-Type: Text/HTML;charset=UTF-8", "Server: nginx", "Via: 1.1 x"}},
		{"nothing but a status", "HTTP/1.1 200 OK\nContent-Length: 0", "", []string{"Content-Length: 0"}},
		// net/http writes names in canonical form, leaves out those that are none, and
		// the length and the type of what has no body.
		{"names in any case", "HTTP/1.1 200 OK\nx-lower: a\nETag: \"b\"\nWWW-Authenticate: c\nX Odd: d\ncontent-LENGTH: 2", "ok",
			[]string{"Content-Length: 2", "Etag: \"b\"", "Www-Authenticate: c", "X-Lower: a"}},
		{"304", "HTTP/1.1 304 Not Modified\nContent-Length: 5\nContent-Type: text/plain\nETag: \"x\"", "", []string{`Etag: "x"`}},
		{"204", "HTTP/1.1 204 No Content\nContent-Length: 5\nX-A: b", "", []string{"X-A: b"}},
		{"chunks", "HTTP/1.1 200 OK\nTransfer-Encoding: chunked", "2\r\nok\r\n0\r\n\r\n", []string{"Transfer-Encoding: chunked"}},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			r, _ := newWireRig(t, "", always(strings.ReplaceAll(tt.sent, "\n", "\r\n")+"\r\n\r\n"+tt.body))
			a, closed := r.say("GET / HTTP/1.1\r\nHost: front.test\r\n\r\n")
			head, whole := strings.CutSuffix(a, "\r\n\r\n"+tt.body)
			got, dates := answerLines(head)
			if !slices.Equal(got, tt.want) || dates != 1 || !whole || closed {
				t.Errorf("the client sees %q, closed %t: fields\n%q and %d dates, want\n%q and 1", a, closed, got, dates, tt.want)
			}
		})
	}
}

// answerLines returns the lines of an answer's heads without the first status line, empty
// ones and Date, and how many of the latter there were.
func answerLines(head string) (lines []string, dates int) {
	all := strings.Split(head, "\r\n")
	for _, line := range all[1:] {
		switch {
		case strings.HasPrefix(line, "Date: "):
			dates++
		case line != "":
			lines = append(lines, line)
		}
	}
	return lines, dates
}

// What a middleware has set on the writer stays, in front of what the backend says,
// and an informational answer does not take it away.
func TestFieldsOfAMiddlewareStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newWireRig(t, "", always("HTTP/1.1 103 Early Hints\r\nX-A: hint\r\nLink: <a>\r\n\r\n"+
			"HTTP/1.1 200 OK\r\nX-A: backend\r\nSet-Cookie: b=1\r\nConnection: X-B\r\nX-B: backend\r\nContent-Length: 2\r\n\r\nok"))
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header()["X-A"] = append(make([]string, 0, 8), "set") // room in which an append could hide
			w.Header()["X-B"] = []string{"set"}
			w.Header()["Set-Cookie"] = []string{"a=1", "a=2"}
			r.pool.ServeHTTP(w, req)
		})
		a, _ := r.say("GET / HTTP/1.1\r\nHost: front.test\r\n\r\n")
		_, final, _ := strings.Cut(a, "\r\n\r\n")
		want := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: a=2\r\nSet-Cookie: b=1\r\nX-A: set\r\nX-A: backend\r\nX-B: set\r\n" +
			"Date: Sat, 01 Jan 2000 00:00:00 GMT\r\n\r\nok"
		if final != want {
			t.Errorf("the client sees %q, want %q", final, want)
		}
		if !strings.HasPrefix(a, "HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n") {
			t.Errorf("before it %q", strings.TrimSuffix(a, final))
		}
	})
}

// What must not be said in a header is not passed on after a body either: fields for
// one connection, fields that frame a message (RFC 9110, section 6.5.1) and, from a
// stranger, fields about its way.
func TestTrailersFollowTheRulesOfFields(t *testing.T) {
	const declared = "Trailer: X-T, X-Forwarded-For, Connection, X-Real-Ip, Upgrade\r\n"
	const fields = "X-T: a\r\nConnection: X-T\r\nKeep-Alive: a\r\nContent-Length: 9\r\nTransfer-Encoding: x\r\nHost: y\r\nUpgrade: h2c\r\nTE: gzip\r\n"
	for _, trailer := range []string{"", declared} {
		bubble(t, "of a request, "+trailer, func(t *testing.T) {
			r, w := newWireRig(t, "", always(okReply))
			r.say("PUT / HTTP/1.1\r\nHost: front.test\r\nTransfer-Encoding: chunked\r\n" + trailer +
				"\r\n2\r\nhi\r\n0\r\n" + fields + "X-Forwarded-For: 1.2.3.4\r\nX-Real-Ip: 1.2.3.4\r\nX_Real_Ip: 1.2.3.4\r\nForwarded: for=x\r\n\r\n")
			got := w.only(t)
			if got.body != "2\r\nhi\r\n0\r\nX-T: a\r\n\r\n" || trailer != "" && !slices.Equal(got.values("Trailer"), []string{"X-T"}) {
				t.Errorf("the backend got %v, want the one trailer X-T", got)
			}
		})
		bubble(t, "of an answer, "+trailer, func(t *testing.T) {
			r, _ := newWireRig(t, "", always("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"+trailer+"\r\n2\r\nhi\r\n0\r\n"+fields+"\r\n"))
			a, _ := r.say("GET / HTTP/1.1\r\nHost: front.test\r\n\r\n")
			head, body, _ := strings.Cut(a, "\r\n\r\n")
			if body != "2\r\nhi\r\n0\r\nX-T: a\r\n\r\n" || strings.Contains(head, "Connection") || strings.Contains(head, "Upgrade") {
				t.Errorf("the client got %q, want the one trailer X-T", a)
			}
		})
	}
}

// Nothing is invented on either side: these are all the bytes of an exchange
// (golang/go#15524). What net/http adds by itself is Date, the length 0 of a POST, PUT or
// PATCH without a body, and the Host of an HTTP/1.0 request without one.
func TestNothingIsInvented(t *testing.T) {
	const (
		date = "Date: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
		peer = "X-Forwarded-For: 198.18.0.1\r\n"
		way  = peer + "X-Forwarded-Host: a.test\r\nX-Forwarded-Proto: http\r\n"
		html = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n<html>\r\n0\r\n\r\n"
	)
	for _, tt := range []struct{ name, request, arrives, reply, answer string }{
		{"GET", "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET / HTTP/1.1\r\nHost: a.test\r\n" + way + "\r\n",
			okReply, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + date + "\r\nok"},
		{"HEAD", "HEAD / HTTP/1.1\r\nHost: a.test\r\n\r\n", "HEAD / HTTP/1.1\r\nHost: a.test\r\n" + way + "\r\n",
			"HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n" + date + "\r\n"},
		{"HEAD with a length", "HEAD / HTTP/1.1\r\nHost: a.test\r\n\r\n", "HEAD / HTTP/1.1\r\nHost: a.test\r\n" + way + "\r\n",
			"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n" + date + "\r\n"},
		{"GET with an empty body", "GET / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n", "GET / HTTP/1.1\r\nHost: a.test\r\n" + way + "\r\n", html, ""},
		{"POST", "POST / HTTP/1.1\r\nHost: a.test\r\n\r\n", "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n" + way + "\r\n", html, ""},
		{"POST with a body", "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\nhi", "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n" + way + "\r\nhi", html, ""},
		{"POST in chunks", "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
			"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n" + way + "\r\n2\r\nhi\r\n0\r\n\r\n", html, ""},
		{"method of its own", "brew /pot HTTP/1.1\r\nHost: a.test\r\n\r\n", "brew /pot HTTP/1.1\r\nHost: a.test\r\n" + way + "\r\n", html, ""},
		{"HTTP/1.0", "GET / HTTP/1.0\r\nHost: a.test\r\n\r\n", "GET / HTTP/1.1\r\nHost: a.test\r\n" + way + "\r\n",
			okReply, "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n" + date + "\r\nok"},
		{"HTTP/1.0 without Host", "GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.1\r\nHost: wire.test\r\n" + peer + "X-Forwarded-Proto: http\r\n\r\n",
			okReply, "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n" + date + "\r\nok"},
	} {
		if tt.answer == "" {
			tt.answer = "HTTP/1.1 200 OK\r\n" + date + "Transfer-Encoding: chunked\r\n\r\n6\r\n<html>\r\n0\r\n\r\n"
		}
		bubble(t, tt.name, func(t *testing.T) {
			r, w := newWireRig(t, "", always(tt.reply))
			if a, _ := r.say(tt.request); a != tt.answer {
				t.Errorf("the client reads %q, want %q", a, tt.answer)
			}
			if h := w.only(t); h.bytes() != tt.arrives {
				t.Errorf("the backend reads %q, want %q", h.bytes(), tt.arrives)
			}
		})
	}
}

// A pool of its own transport neither asks for compression nor takes it away
// (knative/pkg PR#2007, fatedier/frp PR#5510, gogatekeeper/gatekeeper#628).
func TestTransportsLeaveCompressionAlone(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, text(10_000))
	z.Close()
	b := lbtest.NewBackend(t, "a")
	b.Set(lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Write(packed.Bytes())
	})))
	for name, opts := range map[string][]lb.Option{
		"the default":             nil,
		"a template that unpacks": {lb.WithTransport(&http.Transport{})},
	} {
		p := newPool(t, lb.Targets(b.URL()), opts...)
		a := serve(p, "/")
		if !bytes.Equal(a.Body.Bytes(), packed.Bytes()) || a.Header().Get("Content-Encoding") != "gzip" || a.Header().Get("Content-Length") != fmt.Sprint(packed.Len()) {
			t.Errorf("%s: the client gets %d bytes with %v, want %d packed ones", name, a.Body.Len(), a.Header(), packed.Len())
		}
	}
	for _, got := range b.Received() {
		if values, ok := got.Header["Accept-Encoding"]; ok {
			t.Errorf("the backend sees Accept-Encoding: %q", values)
		}
	}
}

// No strategy and no hook parses the query, so it goes out as it came: with escapes
// that are none, with semicolons, with more parameters than net/url takes
// (golang/go#54663, golang/go#78948, TecharoHQ/anubis PR#1764).
func TestQueryGoesOutAsItCame(t *testing.T) {
	queries := []string{"a=%x&b=ok", "a=1;b=2", "a=1&a=2&a", "&&=", "a=%00%zz%", "a=b?c=d", "a+b=c%20d", "ü=\xff\"<>", "a=http://x/y#z", strings.Repeat("a&", 10_000) + "b=ok"}
	synctest.Test(t, func(t *testing.T) {
		r, w := newWireRig(t, "/base", always(okReply))
		for i, q := range queries {
			r.say("GET /p?" + q + " HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n")
			if got := w.heard(); len(got) != i+1 || got[i].line != "GET /base/p?"+q+" HTTP/1.1" {
				t.Fatalf("the backend got %.300v, want the query %.100q", got[i:], q)
			}
		}
	})
}

// The Host is the client's, or that of the target's URL if that is wanted, whatever
// protocol the client speaks (golang/go#28168).
func TestHostIsTheSameForAllProtocols(t *testing.T) {
	for _, tt := range []struct{ name, host, sent, want string }{
		{"the client's", "", "Client.test:8080", "Client.test:8080"},
		{"the target's", lb.HostFromURL, "client.test", "wire.test"},
		{"a third", "other.test:1", "client.test", "other.test:1"},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			r := &rig{t: t, net: lbtest.NewNetwork(), errorLog: new(bytes.Buffer)}
			w := startWire(t, r.net, "wire.test:80", always(okReply))
			r.start([]lb.Target{{URL: "http://wire.test", Host: tt.host}})
			r.say("GET /1.1 HTTP/1.1\r\nHost: " + tt.sent + "\r\nConnection: close\r\n\r\n")
			r.say("GET http://" + tt.sent + "/absolute HTTP/1.1\r\nHost: ignored.test\r\nConnection: close\r\n\r\n")
			r.say("GET /1.0 HTTP/1.0\r\nHost: " + tt.sent + "\r\n\r\n")
			resp := r.overHTTP2(tt.sent)
			if resp.ProtoMajor != 2 || resp.Header.Get("Content-Type") != "" || resp.Header.Get("Server") != "" {
				t.Errorf("answer = %s with %v", resp.Proto, resp.Header)
			}
			for i, line := range []string{"GET /1.1 HTTP/1.1", "GET /absolute HTTP/1.1", "GET /1.0 HTTP/1.1", "GET /2%2F\"?q HTTP/1.1"} {
				got := w.heard()
				if len(got) != 4 || got[i].line != line {
					t.Fatalf("the backend got %v, want %q", got, line)
				}
				if host := got[i].values("Host"); len(host) != 1 || host[0] != tt.want {
					t.Errorf("%s: Host = %q, want %q", line, host, tt.want)
				}
				if from := got[i].values("X-Forwarded-Host"); len(from) != 1 || from[0] != tt.sent {
					t.Errorf("%s: X-Forwarded-Host = %q, want %q", line, from, tt.sent)
				}
			}
			last := w.heard()[3]
			if fields := last.fields(t); !slices.Equal(fields, []string{"Te: trailers"}) {
				t.Errorf("of the HTTP/2 request the backend sees %q", fields)
			}
		})
	}
}

// overHTTP2 sends a request with prior knowledge of HTTP/2, to a server of its own.
func (r *rig) overHTTP2(host string) *http.Response {
	r.t.Helper()
	ln, err := r.net.Listen("front2.test:80")
	if err != nil {
		r.t.Fatal(err)
	}
	s := &http.Server{Handler: r.pool, Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	go s.Serve(ln)
	defer s.Close()
	over2 := r.net.Transport()
	over2.Protocols = new(http.Protocols)
	over2.Protocols.SetUnencryptedHTTP2(true)
	defer over2.CloseIdleConnections()
	req, err := http.NewRequestWithContext(r.t.Context(), "GET", "http://front2.test", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	req.URL.Opaque, req.URL.RawQuery, req.Host = "/2%2F\"", "q", host
	req.Header = http.Header{"User-Agent": {""}, "Te": {"trailers"}}
	resp, err := over2.RoundTrip(req)
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		r.t.Error(err)
	}
	return resp
}

// The request line that a backend reads is the client's, byte for byte, with the path of
// the target's URL in front.
func TestRequestTargetGoesOutAsItCame(t *testing.T) {
	const same, refused = "the same", "refused"
	for _, tt := range []struct {
		target string
		want   string // behind the prefix, if it is not same
		bare   string // without a prefix, if that is another
	}{
		{"/", same, ""}, {"/a%2fb", same, ""}, {"/a%2Fb", same, ""}, {"/%61", same, ""}, {"//double//slash", same, ""}, {"//a%2fb", same, ""},
		{"/a/../b", same, ""}, {"/..", same, ""}, {"/a//../b/./c/.", same, ""}, {"/%2e%2E/x", same, ""}, {`/a"b`, same, ""}, {"/a[1]", same, ""},
		{"/ü", same, ""}, {"/\xff", same, ""}, {"/a;b", same, ""}, {"/a#b", same, ""}, {`/a\b|^{}<>` + "`", same, ""}, {"/%00", same, ""}, {"/a:b@c", same, ""},
		{"/?", same, ""}, {"/x?", same, ""}, {"/x??", same, ""}, {"/x?#f", same, ""}, {"/*", same, ""}, {"/http://x/y", same, ""},
		// What is no request target is refused by net/http's server.
		{"/%", refused, ""}, {"/%zz", refused, ""}, {"/a b", refused, ""}, {"/a\tb", refused, ""}, {"", refused, ""}, {"a", refused, ""}, {"?q", refused, ""}, {"http://h:x/", refused, ""},
		// The absolute form loses scheme and authority, which has become the Host.
		{"http://other.test/p%41th?q", "/p%41th?q", ""}, {"https://other.test//x", "//x", ""}, {"http://u:p@other.test/x", "/x", ""}, {"http://[::1]:80/x", "/x", ""},
		{"http://other.test/a?b=http://c/d", "/a?b=http://c/d", ""},
		// A path that is empty is a slash if nothing stands before it.
		{"http://other.test", "", "/"}, {"http://other.test?q", "?q", "/?q"},
		// net/http's transport takes what begins with two slashes for a host, unless it is
		// a path that it writes itself, with its own escapes.
		{`//a"b`, same, byTransport("", "//a%22b")},
	} {
		for _, prefix := range []string{"", "/base", "/a%2Fb/"} {
			bubble(t, prefix+" "+tt.target, func(t *testing.T) {
				r, w := newWireRig(t, prefix, always(okReply))
				a, _ := r.say("GET " + tt.target + " HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n")
				want := tt.want
				switch {
				case want == refused:
					if !strings.HasPrefix(a, "HTTP/1.1 400 Bad Request\r\n") || len(w.heard()) != 0 {
						t.Errorf("answer = %q, the backend got %v; want 400", a, w.heard())
					}
					return
				case prefix == "" && tt.bare != "":
					want = tt.bare
				case want == same:
					want = tt.target
				}
				want = "GET " + strings.TrimSuffix(prefix, "/") + want + " HTTP/1.1"
				if got := w.only(t); got.line != want {
					t.Errorf("the backend reads %q, want %q", got.line, want)
				}
			})
		}
	}
}

// The asterisk is no path: net/http's server answers OPTIONS by itself, and if it does
// not, no prefix stands before it.
func TestAsteriskGoesOutAsItIs(t *testing.T) {
	for _, own := range []bool{false, true} {
		bubble(t, fmt.Sprintf("the server answers itself: %t", own), func(t *testing.T) {
			r, w := newWireRig(t, "/base", always(okReply))
			r.server.DisableGeneralOptionsHandler = !own
			a, _ := r.say("OPTIONS * HTTP/1.1\r\nHost: front.test\r\nConnection: close\r\n\r\n")
			if !strings.HasPrefix(a, "HTTP/1.1 200 OK\r\n") {
				t.Errorf("answer = %q", a)
			}
			switch got := w.heard(); {
			case own && len(got) != 0, !own && (len(got) != 1 || got[0].line != "OPTIONS * HTTP/1.1"):
				t.Errorf("the backend got %v", got)
			}
		})
	}
}
