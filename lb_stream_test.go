package lb_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// replies is a behaviour of a backend that first reads the whole request.
func replies(f http.HandlerFunc) lbtest.Behavior {
	return lbtest.Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		f(w, r)
	}))
}

func flush(w http.ResponseWriter) { http.NewResponseController(w).Flush() }

// setFields sets fields, given as names and values in turn.
func setFields(h http.Header, fields []string) {
	for i := 0; i+1 < len(fields); i += 2 {
		h.Add(fields[i], fields[i+1])
	}
}

// speakHTTP2 makes the rig's client speak HTTP/2, to a server of its own in front of
// the pool.
func (r *rig) speakHTTP2() {
	r.t.Helper()
	const addr = "front2.test:80"
	ln, err := r.net.Listen(addr)
	if err != nil {
		r.t.Fatal(err)
	}
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	s := &http.Server{Handler: r.pool, Protocols: protocols, ErrorLog: r.server.ErrorLog}
	go s.Serve(ln)
	dial := func(ctx context.Context, network, _ string) (net.Conn, error) {
		return r.net.DialContext(ctx, network, addr)
	}
	r.client = &http.Client{Transport: &http.Transport{DialContext: dial, DisableCompression: true, Protocols: protocols}}
	r.t.Cleanup(func() { s.Close() })
}

// onBothProtocols runs a test with a client that speaks HTTP/1.1 and one that speaks
// HTTP/2.
func onBothProtocols(t *testing.T, name string, test func(t *testing.T, start func(*rig) *rig)) {
	bubble(t, name+", HTTP/1.1", func(t *testing.T) { test(t, func(r *rig) *rig { return r }) })
	bubble(t, name+", HTTP/2", func(t *testing.T) { test(t, func(r *rig) *rig { r.speakHTTP2(); return r }) })
}

// openWith opens a connection to the pool's server and writes text on it.
func (r *rig) openWith(text string) (net.Conn, *bufio.Reader) {
	r.t.Helper()
	c := r.dial()
	r.t.Cleanup(func() { c.Close() })
	io.WriteString(c, text)
	return c, bufio.NewReader(c)
}

// get sends a GET, or a POST with body, and returns the answer with its body still to
// be read.
func (r *rig) get(ctx context.Context, body string) (*http.Response, error) {
	method, reader := "GET", io.Reader(nil)
	if body != "" {
		method, reader = "POST", strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+frontAddr+"/", reader)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := r.client.Do(req)
	if err == nil {
		r.t.Cleanup(func() { resp.Body.Close() })
	}
	return resp, err
}

const (
	stamps     = 10
	stampBytes = 20 // of each: a time in nanoseconds and a line feed
)

// stampEvery answers with pieces that say when they were written.
func stampEvery(d time.Duration, fields ...string) lbtest.Behavior {
	return replies(func(w http.ResponseWriter, _ *http.Request) {
		setFields(w.Header(), fields)
		for range stamps {
			fmt.Fprintf(w, "%019d\n", time.Now().UnixNano())
			flush(w)
			linger(d)
		}
	})
}

// wantStamps checks that each piece is read within 50 ms of being written.
func wantStamps(t *testing.T, body io.Reader) {
	t.Helper()
	piece := make([]byte, stampBytes)
	for i := range stamps {
		if _, err := io.ReadFull(body, piece); err != nil {
			t.Fatalf("piece %d: %v", i+1, err)
		}
		at, _ := strconv.ParseInt(strings.TrimSpace(string(piece)), 10, 64)
		if late := time.Since(time.Unix(0, at)); late > 50*time.Millisecond {
			t.Fatalf("piece %d came %v late", i+1, late)
		}
	}
	if n, err := body.Read(piece); n != 0 || err != io.EOF {
		t.Errorf("behind the last piece: %q, %v", piece[:n], err)
	}
}

// Each piece of an answer reaches the client as soon as the backend has written it
// (golang/go#41642, golang/go#27816, caddyserver/caddy#1972).
func TestPiecesOfAnAnswerArriveAtOnce(t *testing.T) {
	length := strconv.Itoa(stamps * stampBytes)
	for name, fields := range map[string][]string{
		"events":                   {"Content-Type", "text/event-stream; charset=utf-8"},
		"events of a known length": {"Content-Type", "Text/Event-Stream ;charset=utf-8", "Content-Length", length},
		"lines of JSON":            {"Content-Type", "application/x-ndjson"},
		"no type":                  nil,
		"text of a known length":   {"Content-Type", "text/plain", "Content-Length", length},
	} {
		onBothProtocols(t, name, func(t *testing.T, start func(*rig) *rig) {
			r := start(newRig(t, []lbtest.Behavior{stampEvery(300*time.Millisecond, fields...)}))
			for _, body := range []string{"", "upload"} {
				resp, err := r.get(t.Context(), body)
				if err != nil {
					t.Fatal(err)
				}
				wantStamps(t, resp.Body)
			}
			synctest.Wait()
			r.wantIdle()
		})
	}
}

// The header arrives as soon as the backend has sent it, however long the body lets
// the client wait (golang/go#31125, caddyserver/caddy#4247), and a limit on the wait
// for the header has nothing to say about that (kortix-ai/suna#536).
func TestHeaderArrivesBeforeTheBody(t *testing.T) {
	for name, fields := range map[string][]string{
		"unknown length": nil, "events of a known length": {"Content-Type", "text/event-stream", "Content-Length", "4"},
		"known length": {"Content-Length", "4"},
	} {
		onBothProtocols(t, name, func(t *testing.T, start func(*rig) *rig) {
			silent := replies(func(w http.ResponseWriter, _ *http.Request) {
				setFields(w.Header(), fields)
				flush(w)
				linger(5 * time.Second)
				io.WriteString(w, "late")
			})
			r := start(newRig(t, []lbtest.Behavior{silent}, lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Second})))
			var resp *http.Response
			within(t, 100*time.Millisecond, func() {
				var err error
				if resp, err = r.get(t.Context(), ""); err != nil {
					t.Fatal(err)
				}
			})
			if b, err := io.ReadAll(resp.Body); string(b) != "late" || err != nil {
				t.Errorf("body = %q, %v", b, err)
			}
			r.wantUnblamed()
		})
	}
}

// When the client of a stream leaves, the backend learns of it (vmware/pinniped#464,
// caddyserver/caddy PR#4952).
func TestClientsThatLeaveAStreamEndIt(t *testing.T) {
	for name, fields := range map[string][]string{
		"unknown length": {"Content-Type", "text/event-stream"}, "known length": {"Content-Length", "100000"},
	} {
		onBothProtocols(t, name, func(t *testing.T, start func(*rig) *rig) {
			var cancelled atomic.Int64
			r := start(newRig(t, []lbtest.Behavior{replies(func(w http.ResponseWriter, req *http.Request) {
				setFields(w.Header(), fields)
				io.WriteString(w, "data: first\n\n")
				flush(w)
				<-req.Context().Done()
				cancelled.Add(1)
			})}))
			ctx, leave := context.WithCancel(t.Context())
			for i := range 200 {
				resp, err := r.get(ctx, strings.Repeat("x", i%2))
				if err != nil {
					t.Fatal(err)
				}
				io.ReadFull(resp.Body, make([]byte, 5))
			}
			if n := r.pool.Stats().InFlight; n != 200 {
				t.Errorf("in flight = %d, want 200", n)
			}
			leave()
			linger(time.Second)
			if n := cancelled.Load(); n != 200 {
				t.Errorf("the backend saw %d of 200 leave", n)
			}
			if s := r.pool.Stats(); s.ClientClosed != 200 || s.Cut != 0 {
				t.Errorf("client closed = %d, cut = %d; want 200, 0", s.ClientClosed, s.Cut)
			}
			r.wantIdle()
			r.wantUnblamed()
		})
	}
}

// An answer that breaks off is seen as such by clients of both protocols, is not asked
// for again and counts against its backend (golang/go#23643, BerriAI/litellm#20870).
func TestAnswerThatBreaksOffCountsAndIsSeen(t *testing.T) {
	for name, cut := range map[string]lbtest.Behavior{"chunked": lbtest.ResetMidChunked(1000), "length": lbtest.ResetMid(1000)} {
		onBothProtocols(t, name, func(t *testing.T, start func(*rig) *rig) {
			r := start(newRig(t, []lbtest.Behavior{cut, cut}, noEjection()))
			a, err := r.do("GET", "1", nil)
			if err != nil || a.bodyErr == nil || len(a.body) != 1000 {
				t.Errorf("the client read %d bytes and %v, %v; want 1000 and an error", len(a.body), a.bodyErr, err)
			}
			synctest.Wait()
			s := r.pool.Stats()
			if n := r.arrivals("1"); n != 1 || s.Cut != 1 || s.Failures != 0 || s.Backends[0].Failures+s.Backends[1].Failures != 1 {
				t.Errorf("arrivals = %d, stats = %+v; want 1 arrival, 1 cut, 1 failure of a backend", n, s)
			}
			r.wantIdle()
			for _, b := range r.backends {
				b.Set(lbtest.Answer())
			}
			r.wantStatus(r.must("GET", "2", nil), 200)
		})
	}
}

// uphill is a body that is fast at first and then takes its time, so that most of it
// need not be read before the answer is through.
type uphill struct {
	io.Reader
	fastBytes int
}

func (u *uphill) Read(p []byte) (int, error) {
	if u.fastBytes <= 0 {
		linger(10 * time.Millisecond)
	}
	n, err := u.Reader.Read(p[:min(len(p), 16<<10)])
	u.fastBytes -= n
	return n, err
}

// An answer that comes before the end of the upload is whole (golang/go#40747,
// golang/go#57786).
func TestEarlyAnswersAreWhole(t *testing.T) {
	for name, uploadBytes := range map[string]int64{"long upload": 10 << 20, "short upload": 1000} {
		bubble(t, name+", HTTP/1.1", func(t *testing.T) {
			wantEarlyAnswers(newRig(t, []lbtest.Behavior{lbtest.Early(200, earlyBytes)}), 250, uploadBytes)
		})
		bubble(t, name+", HTTP/2", func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{lbtest.Early(200, earlyBytes)})
			r.speakHTTP2()
			wantEarlyAnswers(r, 25, uploadBytes)
		})
	}
}

const earlyBytes = 256 << 10

// wantEarlyAnswers sends uploads from 32 clients at once, of known and of unknown
// length, and wants each answer whole.
func wantEarlyAnswers(r *rig, requests, uploadBytes int64) {
	var wg sync.WaitGroup
	var begun atomic.Int64
	for range 32 {
		wg.Go(func() {
			for n := begun.Add(1); n <= requests; n = begun.Add(1) {
				body := &uphill{io.LimitReader(zeros{}, uploadBytes), 64 << 10}
				req, _ := http.NewRequest([]string{"PUT", "POST"}[n%2], "http://"+frontAddr, body)
				if n%4 < 2 {
					req.ContentLength = uploadBytes
				}
				resp, err := r.client.Do(req)
				if err != nil {
					r.t.Error(err)
					return
				}
				got, err := io.Copy(io.Discard, resp.Body)
				if resp.StatusCode != 200 || err != nil || got != earlyBytes {
					r.t.Errorf("%s got %d, %d bytes and %v", req.Method, resp.StatusCode, got, err)
				}
				resp.Body.Close()
			}
		})
	}
	wg.Wait()
	linger(5 * time.Second)
	if r.errorLog.Len() != 0 {
		r.t.Errorf("logged %q", r.errorLog)
	}
	r.wantUnblamed()
	r.wantIdle()
}

// Writers of middlewares.
type (
	unwrapOnly  struct{ w http.ResponseWriter }
	flusherOnly struct{ unwrapOnly }
	plainWriter struct{ unwrapOnly }
	panicFlush  struct{ unwrapOnly }
)

func (u unwrapOnly) Header() http.Header { return u.w.Header() }

func (u unwrapOnly) Write(p []byte) (int, error) { return u.w.Write(p) }

func (u unwrapOnly) WriteHeader(code int) { u.w.WriteHeader(code) }

func (u unwrapOnly) Unwrap() http.ResponseWriter { return u.w }

func (f flusherOnly) Unwrap(struct{}) {}

func (f flusherOnly) Flush() { f.w.(http.Flusher).Flush() }

func (p plainWriter) Unwrap(struct{}) {}

func (p panicFlush) Unwrap(struct{}) {}

func (p panicFlush) Flush() { panic(http.ErrAbortHandler) }

// wrapped puts a middleware in front of the pool that wraps the writer.
func (r *rig) wrapped(wrap func(http.ResponseWriter) http.ResponseWriter) {
	r.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { r.pool.ServeHTTP(wrap(w), req) })
}

// A writer of a middleware's streams if it can be unwrapped or flushed, and else
// delivers in lumps (golang/go#64045, fabiolb/fabio PR#655).
func TestWritersOfMiddlewares(t *testing.T) {
	for name, wrap := range map[string]func(http.ResponseWriter) http.ResponseWriter{
		"with Unwrap": func(w http.ResponseWriter) http.ResponseWriter { return unwrapOnly{w} },
		"with Flush":  func(w http.ResponseWriter) http.ResponseWriter { return flusherOnly{unwrapOnly{w}} },
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{stampEvery(300 * time.Millisecond)})
			r.wrapped(wrap)
			for _, body := range []string{"", "upload"} {
				resp, err := r.get(t.Context(), body)
				if err != nil {
					t.Fatal(err)
				}
				wantStamps(t, resp.Body)
			}
		})
	}
	bubble(t, "with a Flush that panics", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{stampEvery(300 * time.Millisecond), stampEvery(300*time.Millisecond, "Content-Length", "200"), lbtest.Handle(http.HandlerFunc(
			func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Length", "4")
				flush(w)
				linger(time.Second)
				io.WriteString(w, "late")
			}))})
		r.wrapped(func(w http.ResponseWriter) http.ResponseWriter { return panicFlush{unwrapOnly{w}} })
		for range 3 {
			if a, err := r.do("POST", "", nil); err == nil && a.bodyErr == nil {
				t.Errorf("answer = %d, %q", a.status, a.body)
			}
		}
		synctest.Wait()
		r.wantIdle()
		r.wantUnblamed()
	})
	bubble(t, "with neither, and a recorder", func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{stampEvery(300 * time.Millisecond)})
		r.wrapped(func(w http.ResponseWriter) http.ResponseWriter { return plainWriter{unwrapOnly{w}} })
		for _, body := range []io.Reader{nil, streamOf("upload")} {
			if a := r.must("PUT", "", body); a.status != 200 || len(a.body) != stamps*stampBytes {
				t.Errorf("plain writer got %d and %d bytes", a.status, len(a.body))
			}
			rec := httptest.NewRecorder()
			r.pool.ServeHTTP(rec, httptest.NewRequest("PUT", "/", body))
			if rec.Code != 200 || rec.Body.Len() != stamps*stampBytes || !rec.Flushed {
				t.Errorf("recorder got %d and %d bytes, flushed = %t", rec.Code, rec.Body.Len(), rec.Flushed)
			}
		}
		r.wantIdle()
	})
}

// A client that takes no more of its answer than fits into the buffers has left when
// the server's patience ends; nobody else is to blame.
func TestClientThatTakesNoAnswerHasLeft(t *testing.T) {
	for name, fields := range map[string][]string{"chunked": nil, "length": {"Content-Length", strconv.Itoa(10 << 20)}} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{replies(func(w http.ResponseWriter, _ *http.Request) {
				setFields(w.Header(), fields)
				io.Copy(w, io.LimitReader(zeros{}, 10<<20))
			})})
			synctest.Wait() // until the server has begun
			r.server.WriteTimeout = 2 * time.Second
			_, br := r.openWith("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
			br.Peek(1)
			linger(1900 * time.Millisecond)
			if s := r.pool.Stats(); s.InFlight != 1 || s.ClientClosed != 0 {
				t.Errorf("before its time is up: in flight = %d, client closed = %d", s.InFlight, s.ClientClosed)
			}
			linger(200 * time.Millisecond)
			if s := r.pool.Stats(); s.ClientClosed != 1 || s.Cut != 0 || s.Failures != 0 {
				t.Errorf("client closed = %d, cut = %d, failures = %d; want 1, 0, 0", s.ClientClosed, s.Cut, s.Failures)
			}
			if n := r.backends[0].OpenConns(); n != 0 {
				t.Errorf("%d connections are open to the backend", n)
			}
			r.wantIdle()
			r.wantUnblamed()
		})
	}
}

// Nothing of a discarded attempt reaches the client but, at most, the early hints of
// the first (traefik/traefik#12988).
func TestDiscardedAnswersDoNotBleed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		long := text(100 << 10)
		discarded := replies(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Link", "a")
			w.WriteHeader(103)
			w.Header().Set("Set-Cookie", "of=a")
			w.Header().Set("Trailer", "X-Sum")
			w.WriteHeader(503)
			io.WriteString(w, long)
			w.Header().Set("X-Sum", "a")
		})
		want := strings.ToUpper(text(5000))
		r := newRig(t, []lbtest.Behavior{discarded, lbtest.AnswerStatus(200, want)},
			lb.WithBalancer(lb.BalancerFunc(first)), lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}}))
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				for range 40 {
					resp, err := r.get(t.Context(), "")
					if err != nil {
						t.Error(err)
						return
					}
					b, err := io.ReadAll(resp.Body)
					delete(resp.Header, "Date")
					names := slices.Sorted(maps.Keys(resp.Header))
					if string(b) != want || err != nil || resp.StatusCode != 200 || resp.Header.Get(lbtest.BackendHeader) != "b" ||
						!slices.Equal(names, []string{"Backend", "Content-Length", "Content-Type"}) || len(resp.Trailer) > 0 {
						t.Errorf("got %d, %d bytes, %v, %v, %v", resp.StatusCode, len(b), err, resp.Header, resp.Trailer)
					}
				}
			})
		}
		wg.Wait()
		if a, b := r.backends[0].Count(), r.backends[1].Count(); a != 2000 || b != 2000 {
			t.Errorf("arrivals = %d and %d, want 2000 of both", a, b)
		}
		r.wantIdle()
	})
}
