package lbtest_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.com/lb/lbtest"
)

func TestAnswerTellsWhatArrived(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		sent := strings.Repeat("0123456789", 20_000)
		req := newRequest(t, "PUT", b.URL()+"/a%2Fb?q=%20", strings.NewReader(sent))
		req.Host = "example.test"
		req.Header.Set(lbtest.RequestIDHeader, "id-1")
		resp, err := r.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var got lbtest.Received
		if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
			t.Fatal(err)
		}
		want := lbtest.Received{
			Seq: 1, Method: "PUT", Target: "/a%2Fb?q=%20", Host: "example.test", Header: got.Header,
			BodyBytes: int64(len(sent)), BodySHA256: fmt.Sprintf("%x", sha256.Sum256([]byte(sent))), Conn: 1, At: got.At,
		}
		if fmt.Sprint(got) != fmt.Sprint(want) || got.Header.Get(lbtest.RequestIDHeader) != "id-1" {
			t.Errorf("answer\n%v, want\n%v", got, want)
		}
		recorded := b.Received()[0]
		if recorded.BodySHA256 != want.BodySHA256 || !recorded.At.Equal(got.At) || !maps.EqualFunc(recorded.Header, got.Header, slices.Equal) {
			t.Errorf("Received() = %v, want as answered: %v", recorded, got)
		}
		if name := resp.Header.Get(lbtest.BackendHeader); name != "a" || b.Name() != "a" || b.URL() != "http://"+b.Addr() {
			t.Errorf("answer by %q, Name() = %q, URL() = %q, Addr() = %q", name, b.Name(), b.URL(), b.Addr())
		}
	})
}

func TestBehaviorsOfAnswers(t *testing.T) {
	isPut := func(r *http.Request) bool { return r.Method == "PUT" }
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
	for _, tt := range []struct {
		name     string
		behavior lbtest.Behavior
		status   int
		body     string
		reset    bool // the request or the response ends with a reset
		read     int  // bytes of the request's body, -1 if not defined
	}{
		{"the zero value answers", lbtest.Behavior{}, 200, "*", false, 9},
		{"AnswerStatus", lbtest.AnswerStatus(503, "busy"), 503, "busy", false, 9},
		{"AnswerStatus without a body", lbtest.AnswerStatus(204, ""), 204, "", false, 9},
		{"Reset after the whole request", lbtest.Reset(), 0, "", true, 9},
		{"ResetAfter the header", lbtest.ResetAfter(0), 0, "", true, 0},
		{"ResetAfter some bytes", lbtest.ResetAfter(4), 0, "", true, 4},
		{"ResetAfter more than there is", lbtest.ResetAfter(100), 0, "", true, 9},
		{"ResetMid after some bytes", lbtest.ResetMid(5), 200, "xxxxx", true, 9},
		{"ResetMid after the header", lbtest.ResetMid(0), 200, "", true, 9},
		{"ResetMidChunked after some bytes", lbtest.ResetMidChunked(5), 200, "xxxxx", true, 9},
		{"ResetMidChunked after the header", lbtest.ResetMidChunked(0), 200, "", true, 9},
		{"Early with a body", lbtest.Early(413, 3), 413, "xxx", false, -1},
		{"Early without a body", lbtest.Early(304, 0), 304, "", false, -1},
		{"Handle", lbtest.Handle(handler), 200, "some body", false, 9},
		{"When it matches", lbtest.When(isPut, lbtest.AnswerStatus(201, ""), lbtest.Reset()), 201, "", false, 9},
		{"When it does not match", lbtest.When(func(*http.Request) bool { return false }, lbtest.Reset(), lbtest.Behavior{}), 200, "*", false, 9},
		{"Raw", lbtest.Raw("HTTP/1.1 299 Odd\r\nContent-Length: 2\r\n\r\nhi"), 299, "hi", false, -1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBothNetworks(t, func(t *testing.T, r *rig) {
				b := r.backend(t, "a")
				b.Set(tt.behavior)
				status, body, err := r.send(put(t, b, "some body"))
				if tt.body == "*" {
					body = "*"
				}
				if status != tt.status || body != tt.body || (err != nil) != tt.reset {
					t.Errorf("got %d, %q, %v; want %d, %q, reset %t", status, body, err, tt.status, tt.body, tt.reset)
				}
				b.Close()
				got := b.Received()
				if len(got) != 1 || tt.read >= 0 && got[0].BodyBytes != int64(tt.read) || got[0].Canceled {
					t.Errorf("Received() = %+v, want one that read %d", got, tt.read)
				}
			})
		})
	}
}

func TestResetsAreTCPResets(t *testing.T) {
	for i, behavior := range []lbtest.Behavior{
		lbtest.Reset(), lbtest.ResetAfter(0), lbtest.ResetAfter(2), lbtest.ResetMid(10), lbtest.ResetMidChunked(10),
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			onBothNetworks(t, func(t *testing.T, r *rig) {
				b := r.backend(t, "a")
				b.Set(behavior)
				c := r.dial(t, b)
				io.WriteString(c, "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody")
				if got, err := io.ReadAll(c); !hasErrno(err, syscall.ECONNRESET) {
					t.Errorf("read %q, %v, want a reset", got, err)
				}
			})
		})
	}
}

func TestDelayAndStreamTakeTheirTime(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		for _, tt := range []struct {
			behavior lbtest.Behavior
			takes    time.Duration
			body     string
		}{
			{lbtest.Delay(r.delay), r.delay, `"seq":1`},
			{lbtest.Stream(3, r.delay), 2 * r.delay, "chunk 1\nchunk 2\nchunk 3\n"},
			{lbtest.Stream(0, r.delay), 0, ""},
		} {
			b.Set(tt.behavior)
			start := time.Now()
			status, body, err := r.send(put(t, b, "body"))
			took := time.Since(start)
			if status != 200 || !strings.Contains(body, tt.body) || err != nil {
				t.Errorf("got %d, %q, %v", status, body, err)
			}
			if took < tt.takes || r.virtual && took != tt.takes {
				t.Errorf("took %v, want %v", took, tt.takes)
			}
		}
	})
}

func TestStreamFlushesEachChunk(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.Set(lbtest.Stream(2, time.Hour))
		resp, err := r.client.Do(put(t, b, ""))
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len("chunk 1\n"))
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != "chunk 1\n" {
			t.Errorf("first chunk %q, %v", got, err)
		}
		resp.Body.Close() // leaves
		r.until(t, "the handler gave up", func() bool { return b.OpenConns() == 0 && b.Received()[0].Canceled })
	})
}

func TestRefuseClosesTheDoorAndOpensItAgain(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		idle := r.dial(t, b)
		r.until(t, "idle connection accepted", func() bool { return b.OpenConns() == 1 })
		b.Set(lbtest.Hang())
		hanging := make(chan error)
		go func() {
			_, _, err := r.send(put(t, b, "body"))
			hanging <- err
		}()
		r.until(t, "request arrived", func() bool { return b.Count() == 1 && b.Received()[0].BodySHA256 != "" })
		b.Set(lbtest.Refuse())
		b.Set(lbtest.Refuse())
		if err := <-hanging; !hasErrno(err, syscall.ECONNRESET) {
			t.Errorf("request in flight = %v, want a reset", err)
		}
		if _, err := idle.Read(make([]byte, 1)); !hasErrno(err, syscall.ECONNRESET) {
			t.Errorf("Read of an idle connection = %v, want a reset", err)
		}
		if _, _, err := r.send(put(t, b, "")); !hasErrno(err, syscall.ECONNREFUSED) {
			t.Errorf("request = %v, want connection refused", err)
		}
		for range 3 {
			b.Set(lbtest.Answer())
			r.client.CloseIdleConnections() // it may not have seen the reset yet
			if status, _, err := r.send(put(t, b, "")); status != 200 {
				t.Errorf("after listening again: %d, %v", status, err)
			}
			b.Set(lbtest.Refuse())
		}
		if b.OpenConns() != 0 || b.TotalConns() != 5 || b.Count() != 4 {
			t.Errorf("%d of %d connections open, %d requests; want 0 of 5, 4", b.OpenConns(), b.TotalConns(), b.Count())
		}
		b.Close()
		b.Set(lbtest.Answer())
		if _, err := r.dialer(t.Context(), "tcp", b.Addr()); err == nil {
			t.Error("listens again after Close")
		}
	})
}

func TestEarlyAnswersBeforeTheBodyIsSent(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.Set(lbtest.Early(200, 10_000))
		c := r.dial(t, b)
		io.WriteString(c, "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		if len(text) != 10_000 || err != nil {
			t.Errorf("answer of %d bytes, %v", len(text), err)
		}
		io.WriteString(c, "late body")
		r.until(t, "the body was read", func() bool { return b.Received()[0].BodySHA256 != "" })
		if got := b.Received()[0]; got.BodyBytes != 9 || got.BodyErr != nil {
			t.Errorf("Received() = %+v", got)
		}
	})
}

// A single byte once left the connection open for ever, if it came just before
// the server was done with the first request and had it read by then.
func TestCloseReusedClosesAtTheFirstByte(t *testing.T) {
	const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	for _, tt := range []struct{ name, first, further string }{
		{"a whole request", request, request},
		{"one byte", request, "G"},
		{"a pipelined request", request + request, ""},
		{"a pipelined byte and the rest", request + "G", request[1:]},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBothNetworks(t, func(t *testing.T, r *rig) {
				b := r.backend(t, "a")
				b.Set(lbtest.CloseReused())
				c := r.dial(t, b)
				io.WriteString(c, tt.first)
				br := bufio.NewReader(c)
				resp, err := http.ReadResponse(br, nil)
				if err != nil || resp.StatusCode != 200 || resp.Close {
					t.Fatalf("first answer %v, %v", resp, err)
				}
				io.Copy(io.Discard, resp.Body)
				io.WriteString(c, tt.further) // fails if the rest came too late
				if _, err := br.ReadByte(); err != io.EOF && !hasErrno(err, syscall.ECONNRESET) {
					t.Errorf("after the further request: %v, want the end", err)
				}
				if b.Count() != 1 {
					t.Errorf("Count() = %d, want 1", b.Count())
				}
			})
		})
	}
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		b.Set(lbtest.CloseReused())
		r.send(put(t, b, "first"))
		if status, _, err := r.send(put(t, b, "second")); err == nil {
			t.Errorf("reused connection answered %d, want an error", status)
		}
		if status, _, err := r.send(put(t, b, "third")); status != 200 || b.TotalConns() != 2 {
			t.Errorf("new connection: %d, %v; %d connections, want 2", status, err, b.TotalConns())
		}
	})
}

func TestRawSendsTheReplyAndNothingElse(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		const reply = "HTTP/1.1 200 OK\nno colon\x00"
		b := r.backend(t, "a")
		b.Set(lbtest.Raw(reply))
		c := r.dial(t, b)
		fmt.Fprintf(c, "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n%s", strings.Repeat("x", 5000))
		if got, err := io.ReadAll(c); string(got) != reply || err != nil {
			t.Errorf("read %q, %v, want %q", got, err, reply)
		}
		r.until(t, "connection closed", func() bool { return b.OpenConns() == 0 })
	})
}

func TestImpossibleBehaviorsPanic(t *testing.T) {
	always := func(*http.Request) bool { return true }
	for name, make := range map[string]func(){
		"Refuse in When":            func() { lbtest.When(always, lbtest.Refuse(), lbtest.Answer()) },
		"CloseReused in When":       func() { lbtest.When(always, lbtest.Answer(), lbtest.CloseReused()) },
		"When without function":     func() { lbtest.When(nil, lbtest.Answer(), lbtest.Answer()) },
		"Handle without handler":    func() { lbtest.Handle(nil) },
		"informational status":      func() { lbtest.AnswerStatus(103, "") },
		"204 with a body":           func() { lbtest.Early(204, 1) },
		"negative bytes":            func() { lbtest.ResetAfter(-1) },
		"negative bytes in the mid": func() { lbtest.ResetMid(-1) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if text, ok := recover().(string); !ok || !strings.HasPrefix(text, "lbtest: ") {
					t.Errorf("panic(%q), want one of lbtest", text)
				}
			}()
			make()
		})
	}
}

// allBehaviors has one of each that can hold a request for long, and others.
func allBehaviors() []lbtest.Behavior {
	return []lbtest.Behavior{
		lbtest.Answer(), lbtest.AnswerStatus(500, "no"), lbtest.Delay(time.Hour), lbtest.Hang(), lbtest.Reset(),
		lbtest.ResetAfter(100), lbtest.ResetMid(256 << 10), lbtest.ResetMidChunked(256 << 10), lbtest.Early(200, 256<<10),
		lbtest.CloseReused(), lbtest.Stream(1000, time.Hour), lbtest.Raw(strings.Repeat("x", 256<<10)), lbtest.Refuse(),
		lbtest.Handle(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if _, err := io.Copy(io.Discard, r.Body); err == nil {
				<-r.Context().Done()
			}
		})),
	}
}

func TestEveryBehaviorEnds(t *testing.T) {
	const whole = "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"
	for i, behavior := range allBehaviors() {
		for _, request := range []string{whole, whole[:len(whole)-1], ""} {
			for _, clientLeaves := range []bool{true, false} {
				t.Run(fmt.Sprintf("%d, %d bytes, client leaves %t", i, len(request), clientLeaves), func(t *testing.T) {
					onBothNetworks(t, func(t *testing.T, r *rig) {
						before := runtime.NumGoroutine()
						b := r.backend(t, "a")
						c := r.dial(t, b)
						r.until(t, "accepted", func() bool { return b.OpenConns() == 1 })
						b.Set(behavior)
						io.WriteString(c, request)
						if clientLeaves {
							r.pause()
							c.Close()
							r.until(t, "no connection", func() bool { return b.OpenConns() == 0 })
						}
						b.Close()
						b.Close()
						r.until(t, "no goroutine", func() bool { return runtime.NumGoroutine() <= before })
					})
				})
			}
		}
	}
}

func TestRecordCountsAndForgets(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		release := make(chan struct{})
		b.Set(lbtest.Handle(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			<-release
		})))
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				req := put(t, b, "body")
				req.Header.Set(lbtest.RequestIDHeader, fmt.Sprint("id-", i%2))
				r.send(req)
			})
		}
		r.until(t, "six requests", func() bool { return b.Count() == 6 })
		if b.OpenConns() != 6 {
			t.Errorf("OpenConns() = %d, want 6", b.OpenConns())
		}
		close(release)
		wg.Wait()
		all := b.Received()
		for i, got := range all {
			if got.Seq != i+1 || got.Reused || got.BodySHA256 == "" || got.Canceled {
				t.Errorf("Received()[%d] = %+v", i, got)
			}
		}
		if len(all) != 6 || b.Arrivals("id-1") != 3 || b.Arrivals("no") != 0 || b.MaxConcurrent() != 6 || b.TotalConns() != 6 {
			t.Errorf("%d requests, Arrivals %d and %d, MaxConcurrent %d, TotalConns %d", len(all), b.Arrivals("id-1"), b.Arrivals("no"), b.MaxConcurrent(), b.TotalConns())
		}
		all[0].Header.Set(lbtest.RequestIDHeader, "changed")
		if b.Received()[0].Header.Get(lbtest.RequestIDHeader) == "changed" {
			t.Error("Received does not return copies")
		}
		r.until(t, "handlers returned", func() bool { b.Forget(); return b.MaxConcurrent() == 0 })
		r.send(put(t, b, ""))
		if got := b.Received(); len(got) != 1 || got[0].Seq != 1 || !got[0].Reused || b.TotalConns() != 0 || b.Arrivals("id-1") != 0 || b.MaxConcurrent() != 1 {
			t.Errorf("after Forget: %+v, TotalConns %d, Arrivals %d, MaxConcurrent %d", got, b.TotalConns(), b.Arrivals("id-1"), b.MaxConcurrent())
		}
	})
}

func TestRecordKeepsTheLastRequests(t *testing.T) {
	const kept, conns, perConn = 10_000, 4, 2_550
	n := lbtest.NewNetwork()
	b := n.NewBackend(t, "a")
	b.Set(lbtest.Handle(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	var wg sync.WaitGroup
	for range conns {
		wg.Go(func() {
			c, err := n.DialContext(t.Context(), "tcp", b.Addr())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			go io.WriteString(c, strings.Repeat("GET / HTTP/1.1\r\nHost: a\r\nRequest-Id: 1\r\n\r\n", perConn-1)+
				"GET / HTTP/1.1\r\nHost: a\r\nRequest-Id: 2\r\nConnection: close\r\n\r\n")
			io.Copy(io.Discard, c)
		})
	}
	wg.Wait()
	all := b.Received()
	if b.Count() != conns*perConn || len(all) != kept || all[0].Seq != conns*perConn-kept+1 || all[kept-1].Seq != b.Count() {
		t.Errorf("%d of %d requests kept, from %d to %d", len(all), b.Count(), all[0].Seq, all[len(all)-1].Seq)
	}
	if one, two := b.Arrivals("1"), b.Arrivals("2"); one+two != kept {
		t.Errorf("Arrivals = %d and %d, want %d together", one, two, kept)
	}
}

func TestSetIsSafeUnderTraffic(t *testing.T) {
	onBothNetworks(t, func(t *testing.T, r *rig) {
		b := r.backend(t, "a")
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for ctx.Err() == nil {
					short, done := context.WithTimeout(ctx, 5*time.Millisecond)
					r.send(put(t, b, strings.Repeat("x", 1000)).WithContext(short))
					done()
					r.pause()
				}
			})
		}
		for range 2 {
			for _, behavior := range allBehaviors() {
				b.Set(behavior)
				for until := time.Now().Add(3 * time.Millisecond); time.Now().Before(until); r.pause() {
					b.Received()
				}
			}
		}
		b.Set(lbtest.Answer())
		cancel()
		wg.Wait()
		r.client.CloseIdleConnections() // some may not have seen their reset yet
		if status, _, err := r.send(put(t, b, "")); status != 200 {
			t.Errorf("at the end: %d, %v", status, err)
		}
	})
}

// exampleTB stands in for the *testing.T that a test passes to NewBackend.
type exampleTB struct{ testing.TB }

func (exampleTB) Helper()        {}
func (exampleTB) Cleanup(func()) {}

func ExampleBackend() {
	b := lbtest.NewBackend(exampleTB{}, "blue")
	defer b.Close() // a test's cleanup does it

	resp, err := http.Get(b.URL() + "/hello")
	if err != nil {
		fmt.Println(err)
		return
	}
	resp.Body.Close()
	fmt.Println(resp.StatusCode, resp.Header.Get(lbtest.BackendHeader), b.Received()[0].Target)

	b.Set(lbtest.Reset())
	_, err = http.Post(b.URL(), "text/plain", strings.NewReader("once"))
	fmt.Println(err != nil, b.Count())
	// Output:
	// 200 blue /hello
	// true 2
}
