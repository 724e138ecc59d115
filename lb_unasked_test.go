package lb_test

import (
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptrace"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

const evil = "HTTP/1.1 200 OK\r\nEvil: 1\r\nContent-Length: 4\r\n\r\nEVIL"

// beyond are answers with bytes behind them.
func beyond() map[string]string {
	return map[string]string{
		"after a body":                     okReply + evil,
		"after no body":                    "HTTP/1.1 204 No Content\r\n\r\n" + evil,
		"a hint, and the answer later":     okReply + "HTTP/1.1 103 Early Hints\r\nEvil: 1\r\n\r\n",
		"half a header, the rest later":    okReply + "HTTP/1.1 200 OK\r\nEvil: 1\r\nX: ",
		"a header alone, a body later":     okReply + "HTTP/1.1 200 OK\r\nEvil: 1\r\nContent-Length: 38\r\n\r\n",
		"bytes that are no answer at all":  okReply + "EVIL",
		"chunks, with an answer after one": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + evil,
	}
}

// Bytes that a backend sends beyond its answer are never the answer to another request,
// whether they come with it or while the connection is idle.
func TestBytesBeyondAnAnswerAnswerNobody(t *testing.T) {
	log.SetOutput(io.Discard) // of net/http's transport
	defer log.SetOutput(os.Stderr)
	for name, reply := range beyond() {
		for _, later := range []bool{false, true} {
			bubble(t, fmt.Sprintf("%s, later %t", name, later), func(t *testing.T) {
				if later {
					reply = strings.Replace(reply, "\r\n\r\nok", "\r\n\r\nok"+silence, 1)
				}
				r, w := newWireRig(t, "", replyTo(1, reply))
				r.must("GET", "", nil)
				if later {
					advance(2 * time.Second)
				}
				for _, method := range []string{"GET", "POST"} {
					if a := r.must(method, "", nil); a.header.Get("Evil") != "" || string(a.body) != fmt.Sprintf("answer %02d", len(w.heard())) {
						t.Errorf("%s is answered with %v %q", method, a.header, a.body)
					}
				}
				r.wantIdle()
			})
		}
	}
}

// The same if the next request gets the connection before net/http has looked at what is
// left on it. The hooks of httptrace make it so late here.
func TestBytesBeyondAnAnswerOverATransport(t *testing.T) {
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	for name, reply := range beyond() {
		for _, method := range []string{"GET", "POST"} {
			bubble(t, method+" "+name, func(t *testing.T) {
				n := lbtest.NewNetwork()
				w := startWire(t, n, "wire.test:80", replyTo(1, reply))
				r := &rig{t: t, net: n, errorLog: new(bytes.Buffer)}
				r.start(lb.Targets("http://wire.test"), lb.WithTransport(n.Transport()), noEjection())
				idle, written := make(chan struct{}), make(chan struct{})
				first := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{PutIdleConn: func(error) {
					close(idle)
					<-written
				}})
				var once sync.Once // net/http writes again what it could not send at all
				second := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { once.Do(func() { close(written) }) }})
				done := make(chan struct{})
				go func() {
					defer close(done)
					req, _ := http.NewRequestWithContext(first, "GET", "http://x/first", nil)
					if resp, err := r.pool.RoundTrip(req); err == nil {
						io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
					}
				}()
				<-idle
				req, _ := http.NewRequestWithContext(second, method, "http://x/second", nil)
				resp, err := r.pool.RoundTrip(req)
				if err == nil {
					b, _ := io.ReadAll(resp.Body)
					resp.Body.Close()
					if resp.Header.Get("Evil") != "" || string(b) != fmt.Sprintf("answer %02d", len(w.heard())) {
						t.Errorf("the second request is answered with %v %q", resp.Header, b)
					}
				} else if ae := asAttempt(t, err); lb.StatusOf(err) != 502 || ae.Blame != lb.BlameBackend {
					t.Errorf("error = %v, status %d", err, lb.StatusOf(err))
				}
				<-done
				synctest.Wait()
				r.wantIdle()
			})
		}
	}
}
