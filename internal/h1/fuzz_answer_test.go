package h1_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// FuzzAnswer lets a server say anything. What h1 takes for an answer must be one to
// net/http too, and the same; and a connection carries another request only if nothing
// of what the server has said is left on it.
func FuzzAnswer(f *testing.F) {
	for _, answer := range []string{
		ok, noContent,
		"HTTP/1.1 200 OK\r\n\r\nuntil the end",
		"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + ok,
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + ok,
		"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: A\r\n\r\n2\r\nok\r\n0\r\nA: b\r\nC: d\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\no\r\n1\r\nk\r\n0\r\n\r\nleft",
		ok + ok, ok + "x", "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\nContent-Length: 0\n\n", "HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
		"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", "HTTP/1.1 099 x\r\n\r\n", "HTTP/2.0 200 OK\r\n\r\n", "hello",
		"HTTP/1.1 200 OK\r\n" + repeated(600) + "Content-Length: 2\r\n\r\nok",
		"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=3\r\nContent-Length: 0\r\n\r\n",
	} {
		f.Add([]byte(answer), false, false)
		f.Add([]byte(answer), true, true)
	}
	f.Fuzz(func(t *testing.T, said []byte, head, ends bool) {
		synctest.Test(t, func(t *testing.T) { fuzzAnswer(t, said, head, ends) })
	})
}

func fuzzAnswer(t *testing.T, said []byte, head, ends bool) {
	r := newRig(t, h1.Config{HeaderTimeout: time.Second}, func(p *peer) {
		p.hear()
		if p.number > 1 {
			p.say(noContent)
			return
		}
		p.say(string(said))
		if ends {
			p.Close()
			return
		}
		if p.hear() != nil {
			p.say(noContent)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req := request(t, "GET", nil).WithContext(ctx)
	if head {
		req.Method = "HEAD"
	}
	resp, err := r.send(req)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return
	}
	body, err := io.ReadAll(resp.Body)
	ref := bufio.NewReader(bytes.NewReader(said))
	want, wantErr := readFinal(ref, req)
	if wantErr != nil {
		t.Fatalf("h1 took for an answer what net/http refuses with %v", wantErr)
	}
	wantBody, wantErr := io.ReadAll(want.Body)
	if (err == nil) != (wantErr == nil) && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the body ends with %v, with net/http %v", err, wantErr)
	}
	if !bytes.Equal(body, wantBody) || resp.StatusCode != want.StatusCode || resp.ContentLength != want.ContentLength ||
		!reflect.DeepEqual(resp.Header, want.Header) || err == nil && !reflect.DeepEqual(resp.Trailer, want.Trailer) {
		t.Fatalf("h1 read %+v %q, net/http %+v %q", resp, body, want, wantBody)
	}
	resp.Body.Close()
	synctest.Wait() // until the server's end has come

	var x h1.Exchange
	second := request(t, "GET", nil)
	resp, err = r.pool.RoundTrip(t.Context(), &x, outgoing(second), silent{}, second)
	if err != nil || resp.StatusCode != http.StatusNoContent {
		t.Fatalf("the next request got %+v, %v", resp, err)
	}
	left, _ := io.ReadAll(ref)
	if x.Reused() && (len(left) > 0 || ends) {
		t.Fatalf("a connection was used again with %q left on it", left)
	}
}

// readFinal reads answers until a final one comes.
func readFinal(br *bufio.Reader, req *http.Request) (*http.Response, error) {
	for {
		resp, err := http.ReadResponse(br, req)
		if err != nil || resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols {
			return resp, err
		}
	}
}

// TestFuzzAnswerReadsWhatIsLargerThanItsBuffers runs FuzzAnswer's check on answers that
// a fuzzer does not come upon.
func TestFuzzAnswerReadsWhatIsLargerThanItsBuffers(t *testing.T) {
	for _, size := range []int{3999, 4000, 4095, 4096, 4097, 8192, 16383, 16384, 16385, 65536, 300_000} {
		start := "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX: "
		for _, head := range []string{
			start + strings.Repeat("x", size-len(start)-4) + "\r\n\r\n",
			"HTTP/1.1 103 Early Hints\r\n\r\n" + start + strings.Repeat("x", size-len(start)-4) + "\r\n\r\n",
		} {
			for _, rest := range []string{"abc", "abcd", "ab", strings.Repeat("abc", 5000)} {
				for _, ends := range []bool{false, true} {
					synctest.Test(t, func(t *testing.T) { fuzzAnswer(t, []byte(head+rest), false, ends) })
				}
			}
		}
	}
}
