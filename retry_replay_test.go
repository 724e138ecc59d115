package lb_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// A dial that fails leaves the body as it was: a POST goes to the next backend
// whole (caddyserver/caddy#1229).
func TestPostSurvivesRefusedDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Refuse(), lbtest.Answer()}, noEjection())
		body := text(64 << 10)
		for i := range 200 {
			a := r.must("POST", fmt.Sprint(i), strings.NewReader(body))
			r.wantStatus(a, 200)
		}
		for _, got := range r.backends[1].Received() {
			if got.BodySHA256 != sha(body) {
				t.Fatalf("request %d arrived as %d bytes with another hash", got.Seq, got.BodyBytes)
			}
		}
		if n := r.backends[1].Count(); n != 200 {
			t.Errorf("arrivals = %d, want 200", n)
		}
		r.wantIdle()
	})
}

// A body is repeated whole or not at all: up to the cap it is, beyond it the
// request fails and no further backend sees a part of it (envoyproxy/envoy#15211).
func TestBodyIsReplayedWholeOrNotAtAll(t *testing.T) {
	const limit = 64 << 10
	for _, length := range []int{0, 1, limit - 1, limit, limit + 1, 10 * limit} {
		for _, chunked := range []bool{false, true} {
			bubble(t, fmt.Sprintf("%d bytes, chunked %t", length, chunked), func(t *testing.T) {
				r := newRig(t, []lbtest.Behavior{lbtest.Reset(), lbtest.Answer()}, noEjection())
				s := text(length)
				for i := range 4 {
					id := fmt.Sprint(i)
					var body io.Reader = strings.NewReader(s)
					if chunked {
						body = streamOf(s)
					}
					a := r.must("PUT", id, body)
					switch {
					case length <= limit || r.backends[0].Arrivals(id) == 0:
						r.wantStatus(a, 200)
					default:
						r.wantStatus(a, 502)
						if n := r.backends[1].Arrivals(id); n != 0 {
							t.Errorf("%d attempts with a part of the body reached the second backend", n)
						}
					}
				}
				for _, got := range r.backends[1].Received() {
					if got.BodySHA256 != sha(s) {
						t.Errorf("%d of %d bytes arrived", got.BodyBytes, length)
					}
				}
				r.wantIdle()
			})
		}
	}
}

// A body of no bytes is a body like any other, in every way HTTP/1.1 has to say so
// (traefik/traefik#8045).
func TestEmptyBodiesArriveUnchanged(t *testing.T) {
	for name, head := range map[string]string{
		"no field":         "POST / HTTP/1.1\r\nHost: x\r\n\r\n",
		"GET":              "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"Content-Length 0": "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
		"chunked":          "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, answers(1))
			c := r.dial()
			defer c.Close()
			fmt.Fprint(c, head)
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("answer = %v, %v", resp, err)
			}
			got := r.backends[0].Received()
			if len(got) != 1 || got[0].BodyBytes != 0 || got[0].BodyErr != nil {
				t.Errorf("backend got %+v", got)
			}
		})
	}
}

// An attempt may still be reading the body when the next one begins: its reader
// is fenced off and no byte is lost (golang/go#30597).
func TestLateReaderOfTheBodyLosesNoByte(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Early(503, 10), lbtest.Answer()}, noEjection(),
			lb.WithRetry(lb.RetryPolicy{Statuses: []int{503}, MaxReplayBytes: 2 << 20}))
		body := text(1 << 20)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 12 {
					a, err := r.do("PUT", "", strings.NewReader(body))
					if err != nil || a.status != 200 {
						t.Errorf("answer = %d, %v", a.status, err)
					}
				}
			})
		}
		wg.Wait()
		for _, got := range r.backends[1].Received() {
			if got.BodySHA256 != sha(body) {
				t.Errorf("%d bytes arrived, with another hash", got.BodyBytes)
			}
		}
		synctest.Wait()
		r.wantIdle()
	})
}

// A client that stalls in mid-upload while the backend resets has its 502 within a
// second, and nothing is left behind (golang/go#78973).
func TestStalledUploadIsAnsweredWhenTheBackendDies(t *testing.T) {
	for name, head := range map[string]string{
		"length":  "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10485760\r\n\r\n" + text(1024),
		"chunked": "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n" + text(1024) + "\r\n",
		"PUT":     "PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 10485760\r\n\r\n" + text(1024),
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, []lbtest.Behavior{lbtest.ResetAfter(1024)}, noEjection())
			for range 200 {
				c := r.dial()
				within(t, time.Second, func() {
					fmt.Fprint(c, head)
					resp, err := http.ReadResponse(bufio.NewReader(c), nil)
					if err != nil || resp.StatusCode != 502 {
						t.Fatalf("answer = %v, %v", resp, err)
					}
				})
				c.Close()
			}
			synctest.Wait()
			r.wantIdle()
		})
	}
}

// The upload goes to the other backend although the client stalls at the moment
// of the reset, and is whole once the client goes on.
func TestStalledUploadMovesToAnotherBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.ResetAfter(1024), lbtest.Answer()}, noEjection())
		body := text(40 << 10)
		for range 20 {
			r.stalledPut(body)
		}
		for _, got := range r.backends[1].Received() {
			if got.BodySHA256 != sha(body) {
				t.Errorf("%d of %d bytes arrived", got.BodyBytes, len(body))
			}
		}
		synctest.Wait()
		r.wantIdle()
	})
}

// A body that is left in mid-read, because the answer came early, does not become
// the next request: the connection is closed behind the answer. (net/http's server
// in full duplex would go on reading requests where the body stopped.)
func TestRestOfABodyIsNeverTakenForARequest(t *testing.T) {
	for name, behavior := range map[string]lbtest.Behavior{
		"early answer": lbtest.Early(200, 10), "reset": lbtest.ResetAfter(0),
	} {
		for _, head := range []string{"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "Content-Length: 1000\r\n\r\nhello"} {
			bubble(t, name+", "+head[:8], func(t *testing.T) {
				r := newRig(t, []lbtest.Behavior{behavior}, noEjection())
				for range 50 {
					c := r.dial()
					fmt.Fprint(c, "PUT /first HTTP/1.1\r\nHost: x\r\n"+head)
					br := bufio.NewReader(c)
					br.Peek(1)                     // until it is answered, or cut where the answer is
					linger(100 * time.Millisecond) // the answer has been passed on, the body has not ended
					fmt.Fprint(c, "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
					c.SetReadDeadline(time.Now().Add(2 * time.Second)) // the server may also wait for the rest
					answers, _ := io.ReadAll(br)
					if n := strings.Count(string(answers), "HTTP/1.1 "); n > 1 {
						t.Fatalf("%d answers: %q", n, answers)
					}
					c.Close()
				}
				for _, got := range r.backends[0].Received() {
					if got.Target != "/first" {
						t.Errorf("a part of a body arrived as %s %s", got.Method, got.Target)
					}
				}
			})
		}
	}
}

// A body over the limit is sent whole while next to nothing of it is kept, and the
// request can then not be repeated (linkerd/linkerd2-proxy PR#1039).
func TestLongUploadsAreNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const length = 256 << 20
		r := newRig(t, answers(2), noEjection())
		want := sha256.New()
		body := io.TeeReader(io.LimitReader(zeros{}, length), want)
		peak := make(chan uint64, 1)
		sampled := &sampler{Reader: body, every: 16 << 20, peak: peak}
		runtime.GC()
		var before runtime.MemStats
		runtime.ReadMemStats(&before)
		a := r.must("PUT", "", stream{sampled})
		r.wantStatus(a, 200)
		if grown := int64(<-peak) - int64(before.HeapAlloc); grown > 8<<20 {
			t.Errorf("the heap grew by %d KiB", grown>>10)
		}
		got := append(r.backends[0].Received(), r.backends[1].Received()...)
		if len(got) != 1 || got[0].BodyBytes != length || got[0].BodySHA256 != hex.EncodeToString(want.Sum(nil)) {
			t.Errorf("arrived: %+v", got)
		}
		if n := r.pool.Stats().Unrecorded; n != 1 {
			t.Errorf("unrecorded = %d, want 1", n)
		}
		r.wantIdle()
	})
}

type zeros struct{}

// sampler looks at the heap now and then while it is read, and sends the largest
// at the end.
type sampler struct {
	io.Reader
	every, next, read int64
	max               uint64
	peak              chan<- uint64
}

func (s *sampler) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	s.read += int64(n)
	if s.read >= s.next {
		s.next = s.read + s.every
		runtime.GC()
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		s.max = max(s.max, now.HeapAlloc)
	}
	if err != nil {
		s.peak <- s.max
	}
	return n, err
}

// What all requests together keep of their bodies is bounded too: over it they are
// sent all the same, without being kept.
func TestPoolWideReplayLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, []lbtest.Behavior{lbtest.Hang(), lbtest.Hang()}, noEjection(),
			lb.WithTimeouts(lb.Timeouts{ResponseHeader: time.Minute}), lb.WithRetry(lb.RetryPolicy{MaxPoolReplayBytes: 256 << 10}))
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() { r.do("PUT", "", strings.NewReader(text(60<<10))) })
		}
		linger(time.Second)
		if n := r.pool.Stats().ReplayBytes; n == 0 || n > 256<<10 {
			t.Errorf("replay bytes = %d, want some and at most %d", n, 256<<10)
		}
		for _, b := range r.backends {
			for _, got := range b.Received() {
				if got.BodySHA256 != sha(text(60<<10)) {
					t.Errorf("%d bytes arrived", got.BodyBytes)
				}
			}
		}
		wg.Wait()
		if n := r.pool.Stats().Unrecorded; n == 0 {
			t.Error("no request is counted as unrecorded")
		}
		r.wantIdle()
	})
}
