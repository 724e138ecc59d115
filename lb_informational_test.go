package lb_test

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// finalAnswer reads answers until one is final, and returns the codes of all of them.
func finalAnswer(t *testing.T, br *bufio.Reader) (codes []int, headers []http.Header, body string) {
	t.Helper()
	for {
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Errorf("after %v: %v", codes, err)
			return codes, headers, ""
		}
		codes, headers = append(codes, resp.StatusCode), append(headers, resp.Header)
		if resp.StatusCode == 101 {
			return codes, headers, ""
		}
		if resp.StatusCode >= 200 {
			b, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Error(err)
			}
			return codes, headers, string(b)
		}
	}
}

// hinting answers with two early hints and then 200.
func hinting() lbtest.Behavior {
	return replies(func(w http.ResponseWriter, _ *http.Request) {
		for _, link := range []string{"one", "two"} {
			w.Header().Set("Link", link)
			w.WriteHeader(103)
			linger(time.Second)
		}
		w.Header().Del("Link")
		io.WriteString(w, "body")
	})
}

// Informational answers pass in their order and at once, not to clients that do not
// know them, and leave the header of the answer alone (golang/go#26088).
func TestInformationalAnswersPass(t *testing.T) {
	bubble(t, "HTTP/1.1 and HTTP/1.0", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{hinting()})
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("X-Outer", "kept")
			r.pool.ServeHTTP(w, req)
		})
		_, br := r.openWith("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		within(t, 0, func() { br.Peek(1) })
		codes, h, body := finalAnswer(t, br)
		if !slices.Equal(codes, []int{103, 103, 200}) || h[0].Get("Link") != "one" || h[1].Get("Link") != "two" || body != "body" {
			t.Fatalf("HTTP/1.1 got %v, %v, %q", codes, h, body)
		}
		if h[2].Get("X-Outer") != "kept" || h[2].Get("Link") != "" || h[2].Get(lbtest.BackendHeader) != "a" || len(h[2][lbtest.BackendHeader]) != 1 {
			t.Errorf("the answer's header is %v", h[2])
		}
		_, br = r.openWith("GET / HTTP/1.0\r\nHost: x\r\n\r\n")
		if codes, h, body := finalAnswer(t, br); !slices.Equal(codes, []int{200}) || h[0].Get("X-Outer") != "kept" || body != "body" {
			t.Errorf("HTTP/1.0 got %v, %v, %q", codes, h, body)
		}
	})
	bubble(t, "HTTP/2", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{hinting()})
		r.speakHTTP2()
		var links []string
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
			links = append(links, h.Get("Link"))
			return nil
		}})
		resp, err := r.get(ctx, "")
		if err != nil || resp.StatusCode != 200 || !slices.Equal(links, []string{"one", "two"}) || resp.Header.Get("Link") != "" {
			t.Errorf("HTTP/2 got %v, %v after %q", resp, err, links)
		}
	})
}

// A client that waits for 100 Continue is told so only once a backend takes the body,
// and not at all if it is refused (traefik/traefik#2899, tinyproxy/tinyproxy#79).
func TestExpectContinue(t *testing.T) {
	refuses := func(code int) lbtest.Behavior {
		return lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Connection", "close")
			http.Error(w, "no", code)
		}))
	}
	refusesAndStays := lbtest.Early(401, 10)
	slow := lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		linger(3 * time.Second) // longer than the pool waits for a 100
		io.Copy(io.Discard, r.Body)
	}))
	hints := lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		linger(time.Second) // which is when the pool no longer waits for a 100
		w.WriteHeader(103)
		io.Copy(io.Discard, r.Body)
	}))
	for _, tt := range []struct {
		name string
		a, b lbtest.Behavior
		want []int
	}{
		{"refused at once", refuses(401), refuses(402), []int{401}},
		{"refused at once on a connection that stays", refusesAndStays, refuses(402), []int{401}},
		{"taken", lbtest.Answer(), lbtest.Answer(), []int{100, 200}},
		{"no word from the backend", slow, slow, []int{100, 200}},
		{"early hints at the same time", hints, hints, []int{100, 200}},
		{"nobody there, then taken", lbtest.Refuse(), lbtest.Answer(), []int{100, 200}},
		{"reset at once, then taken", lbtest.ResetAfter(0), lbtest.Answer(), []int{100, 200}},
		{"reset at once, then refused", lbtest.ResetAfter(0), refuses(401), []int{401}},
		{"taken and reset, then taken", lbtest.Reset(), lbtest.Answer(), []int{100, 200}},
		{"503 at once, then taken", refuses(503), lbtest.Answer(), []int{100, 200}},
		{"503 at once, then refused", refuses(503), refuses(401), []int{401}},
		{"503 at once on a connection that stays, then refused", lbtest.Early(503, 10), refuses(401), []int{401}},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{tt.a, tt.b}, noEjection(), lb.WithBalancer(lb.BalancerFunc(first)),
				lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}}))
			for range 50 {
				c, br := r.openWith("PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
				if line, _ := br.Peek(12); string(line) == "HTTP/1.1 100" {
					io.WriteString(c, "hello")
				}
				codes, _, _ := finalAnswer(t, br)
				if slices.Contains(codes, 103) { // which may come in any place, or not at all
					codes = slices.DeleteFunc(codes, func(code int) bool { return code == 103 })
				}
				if !slices.Equal(codes, tt.want) {
					t.Fatalf("got %v, want %v", codes, tt.want)
				}
				c.Close()
			}
			for _, got := range r.backends[1].Received() {
				if tt.want[0] == 100 && got.BodySHA256 != sha("hello") {
					t.Errorf("%d bytes arrived", got.BodyBytes)
				}
			}
			synctest.Wait()
			r.wantIdle()
		})
	}
}

// trailing answers with body and trailers, of which those in announce are announced.
func trailing(body, announce string) lbtest.Behavior {
	return replies(func(w http.ResponseWriter, _ *http.Request) {
		if announce != "" {
			w.Header().Set("Trailer", announce)
		}
		w.Header().Set("X-Twice", "header")
		flush(w)
		io.WriteString(w, body)
		for _, name := range []string{"Grpc-Status", "X-Twice"} {
			if !strings.Contains(announce, name) {
				name = http.TrailerPrefix + name
			}
			w.Header()[name] = []string{"one", "two"}
		}
	})
}

// Trailers of an answer arrive as they were sent, announced or not, also without a
// body before them (golang/go#20437, coupergateway/couper#968).
func TestTrailersOfAnswersArrive(t *testing.T) {
	for name, announce := range map[string]string{"announced": "Grpc-Status, X-Twice", "not announced": "", "one of two announced": "X-Twice"} {
		for _, body := range []string{"", "short", text(100 << 10)} {
			onBothProtocols(t, fmt.Sprintf("%s, %d bytes", name, len(body)), func(t *testing.T, start func(*rig) *rig) {
				r := start(newRig(t, []lbtest.Behavior{trailing(body, announce)}))
				resp, err := r.get(t.Context(), "")
				if err != nil {
					t.Fatal(err)
				}
				for name := range resp.Trailer {
					if !strings.Contains(announce, name) {
						t.Errorf("%s was announced", name)
					}
				}
				if b, err := io.ReadAll(resp.Body); string(b) != body || err != nil {
					t.Errorf("%d bytes arrived, %v", len(b), err)
				}
				want := http.Header{"Grpc-Status": {"one", "two"}, "X-Twice": {"one", "two"}}
				if !maps.EqualFunc(resp.Trailer, want, slices.Equal) || !slices.Equal(resp.Header["X-Twice"], []string{"header"}) {
					t.Errorf("trailers = %v, header = %v; want %v", resp.Trailer, resp.Header, want)
				}
			})
		}
	}
}

// Trailers of a request arrive, announced or not (golang/go#29031).
func TestTrailersOfRequestsArrive(t *testing.T) {
	backend := func(got *http.Header) lbtest.Behavior {
		return replies(func(_ http.ResponseWriter, r *http.Request) { *got = r.Trailer })
	}
	onBothProtocols(t, "announced", func(t *testing.T, start func(*rig) *rig) {
		var got http.Header
		r := start(newRig(t, []lbtest.Behavior{backend(&got)}))
		for _, body := range []string{"", "hello"} {
			req, _ := http.NewRequest("POST", "http://"+frontAddr, streamOf(body))
			req.Trailer = http.Header{"X-Sum": {"one", "two"}}
			if resp, err := r.client.Do(req); err != nil || resp.StatusCode != 200 {
				t.Fatalf("answer = %v, %v", resp, err)
			}
			if !slices.Equal(got["X-Sum"], []string{"one", "two"}) {
				t.Errorf("the backend got %v", got)
			}
		}
	})
	for name, head := range map[string]string{"not announced": "", "one of two announced": "Trailer: X-Sum\r\n"} {
		bubble(t, name, func(t *testing.T) {
			var got http.Header
			r := newRig(t, []lbtest.Behavior{backend(&got)})
			for _, chunk := range []string{"", "5\r\nhello\r\n"} {
				_, br := r.openWith("POST / HTTP/1.1\r\nHost: x\r\n" + head + "Transfer-Encoding: chunked\r\n\r\n" + chunk + "0\r\nX-Sum: abc\r\nX-More: def\r\n\r\n")
				if codes, _, _ := finalAnswer(t, br); !slices.Equal(codes, []int{200}) {
					t.Fatalf("codes = %v", codes)
				}
				if got.Get("X-Sum") != "abc" || got.Get("X-More") != "def" {
					t.Errorf("the backend got %v", got)
				}
			}
		})
	}
}

// Answers that have no body although they state a length end at once, and leave the
// connection in order.
func TestAnswersWithoutBodyEnd(t *testing.T) {
	for name, tt := range map[string]struct{ method, reply string }{
		"HEAD":         {"HEAD", "200 OK\r\nContent-Length: 1000"},
		"HEAD chunked": {"HEAD", "200 OK\r\nTransfer-Encoding: chunked"},
		"HEAD events":  {"HEAD", "200 OK\r\nContent-Type: text/event-stream"},
		"204":          {"GET", "204 No Content\r\nContent-Length: 1000"},
		"304":          {"GET", "304 Not Modified\r\nContent-Length: 1000"},
		"304 to HEAD":  {"HEAD", "304 Not Modified\r\nContent-Length: 1000"},
	} {
		onBothProtocols(t, name, func(t *testing.T, start func(*rig) *rig) {
			r := start(newRig(t, []lbtest.Behavior{lbtest.Raw("HTTP/1.1 " + tt.reply + "\r\nEtag: x\r\nConnection: close\r\n\r\n")}))
			within(t, 0, func() {
				for range 3 {
					a := r.must(tt.method, "", nil)
					if len(a.body) != 0 || a.header.Get("Etag") != "x" || !strings.HasPrefix(tt.reply, strconv.Itoa(a.status)) {
						t.Errorf("answer = %d, %d bytes, %v", a.status, len(a.body), a.header)
					}
					if name == "HEAD" && a.header.Get("Content-Length") != "1000" {
						t.Errorf("HEAD got %v", a.header)
					}
				}
			})
			synctest.Wait()
			r.wantIdle()
			r.wantUnblamed()
		})
	}
}

// unexpecting panics at a status that it does not expect.
type unexpecting struct{ http.ResponseWriter }

func (w unexpecting) WriteHeader(code int) {
	if code < 200 {
		panic(http.ErrAbortHandler)
	}
	w.ResponseWriter.WriteHeader(code)
}

// A middleware's writer that panics does so where the server expects it, and not on a
// goroutine of the transport, which would end the program.
func TestPanicOfAWriterInAHintIsTheRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{hinting()})
		r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { r.pool.ServeHTTP(unexpecting{w}, req) })
		if a, err := r.do("GET", "", nil); err == nil {
			t.Errorf("answer = %d, want a cut", a.status)
		}
		r.after(time.Second)
		r.wantIdle()
		r.wantUnblamed()
	})
}

// Informational answers without an end do not go on without an end.
func TestFloodOfHintsIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 40_000
		hint := "HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
		r, _ := newWireRig(t, "", always(strings.Repeat(hint, n)+okReply))
		_, br := r.openWith("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		codes, _, _ := finalAnswer(t, br)
		if last := codes[len(codes)-1]; last != 502 || len(codes) > n {
			t.Errorf("%d hints passed, and then %d; want fewer than %d, and 502", len(codes)-1, last, n)
		}
	})
}
