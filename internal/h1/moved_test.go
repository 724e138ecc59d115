package h1_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// counter counts what a server gets and gives on the wire.
type counter struct {
	net.Conn
	got, gave atomic.Int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.got.Add(int64(n))
	return n, err
}

func (c *counter) Write(p []byte) (int, error) {
	c.gave.Add(int64(len(p)))
	return c.Conn.Write(p)
}

// TestMovedIsWhatIsOnTheWire sends the same request twice over one connection. Bodies
// that are sent over TLS in pieces of a few bytes are not here: see CarriesRequest.
func TestMovedIsWhatIsOnTheWire(t *testing.T) {
	big := strings.Repeat("0123456789", 30_000)
	clientTLS, serverTLS := tlsConfigs(t)
	for _, c := range []struct {
		name    string
		version uint16 // of TLS; zero: without
		body    string // empty: GET
		unknown bool
		answer  string
	}{
		{name: "a GET", answer: ok},
		{name: "a GET with hints", answer: "HTTP/1.1 103 x\r\n\r\n" + ok},
		{name: "a GET of a large head", answer: sized(20_000)},
		{name: "a POST", body: "hello", answer: noContent},
		{name: "a POST of unknown length", body: "hello", unknown: true, answer: ok},
		{name: "a large POST", body: big, answer: ok},
		{name: "a GET over TLS 1.2", version: tls.VersionTLS12, answer: ok},
		{name: "a GET over TLS 1.3", version: tls.VersionTLS13, answer: ok},
		{name: "a POST over TLS 1.2", version: tls.VersionTLS12, body: big, answer: ok},
		{name: "a POST over TLS 1.3", version: tls.VersionTLS13, body: big, answer: ok},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var wire atomic.Pointer[counter]
				serve := func(p *peer) {
					nc := &counter{Conn: p.Conn}
					wire.Store(nc)
					var secure net.Conn = nc
					if c.version != 0 {
						secure = tls.Server(nc, serverTLS)
					}
					br := bufio.NewReader(secure)
					for {
						req, err := http.ReadRequest(br)
						if err != nil {
							return
						}
						io.Copy(io.Discard, req.Body)
						io.WriteString(secure, c.answer)
					}
				}
				var r *rig
				r = newRig(t, h1.Config{Dial: func(ctx context.Context, count func(net.Conn) net.Conn) (net.Conn, error) {
					nc, err := r.network.DialContext(ctx, "tcp", addr)
					if err != nil {
						return nil, err
					}
					if nc = count(nc); c.version == 0 {
						return nc, nil
					}
					config := clientTLS.Clone()
					config.MaxVersion = c.version
					tc := tls.Client(nc, config)
					return tc, tc.HandshakeContext(ctx)
				}}, serve)
				first := movedBy(t, r, c.body, c.unknown)
				before := [2]int64{wire.Load().got.Load(), wire.Load().gave.Load()}
				second := movedBy(t, r, c.body, c.unknown)
				sent, received := second.Moved()
				if got, gave := wire.Load().got.Load()-before[0], wire.Load().gave.Load()-before[1]; sent != got || received != gave {
					t.Errorf("Moved() = %d, %d, the server got %d and gave %d", sent, received, got, gave)
				}
				if firstSent, _ := first.Moved(); firstSent != sent && c.version == 0 { // TLS grows its records
					t.Errorf("the first of two like requests sent %d, the second %d", firstSent, sent)
				}
				if first.Reused() || !second.Reused() || second.Stage() != h1.StageBody {
					t.Errorf("reused %v, %v, stage %d, want false, true, %d", first.Reused(), second.Reused(), second.Stage(), h1.StageBody)
				}
			})
		})
	}
}

// movedBy returns the exchange of a request that has ended.
func movedBy(t *testing.T, r *rig, body string, hide bool) *h1.Exchange {
	t.Helper()
	req := request(t, "GET", nil)
	switch {
	case hide:
		req = request(t, "POST", unknown(body))
	case body != "":
		req = request(t, "POST", strings.NewReader(body))
	}
	x := new(h1.Exchange)
	resp, err := r.pool.RoundTrip(t.Context(), x, outgoing(req), silent{}, req)
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	synctest.Wait()
	return x
}

// TestMovedAndStageFollowAnExchange stops at each stage; what they are for it is known
// at once, and does not change when the connection goes on to another exchange.
func TestMovedAndStageFollowAnExchange(t *testing.T) {
	serve := func(p *peer) {
		http.ReadRequest(p.br)
		linger(2 * time.Second)
		p.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
		linger(2 * time.Second)
		p.say("ok")
		always(ok)(p)
	}
	bubble(t, "of a POST", h1.Config{}, serve, func(t *testing.T, r *rig) {
		const head = int64(len("POST /x?y HTTP/1.1\r\nHost: a.test\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: 5\r\n\r\n"))
		const answerHead = int64(len("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"))
		var x h1.Exchange
		check := func(when string, stage h1.Stage, sent, received int64) {
			t.Helper()
			synctest.Wait()
			if s, r := x.Moved(); x.Stage() != stage || s != sent || r != received {
				t.Errorf("%s: stage %d, Moved() = %d, %d, want %d, %d, %d", when, x.Stage(), s, r, stage, sent, received)
			}
		}
		body := newPipe()
		check("before", h1.StageConnect, 0, 0)
		done := make(chan error)
		go func() {
			out := outgoing(request(t, "POST", body))
			out.Length = 5
			resp, err := r.pool.RoundTrip(t.Context(), &x, out, silent{}, nil)
			if err == nil {
				_, err = io.ReadAll(resp.Body)
			}
			done <- err
		}()
		check("without the body", h1.StageSend, head, 0)
		body.say("hel")
		check("in the body", h1.StageSend, head+3, 0)
		body.say("lo")
		body.end(io.EOF)
		check("behind the body", h1.StageHead, head+5, 0)
		linger(2 * time.Second)
		check("behind the head", h1.StageBody, head+5, answerHead)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		check("at the end", h1.StageBody, head+5, answerHead+2)
		r.must()
		check("when the connection has carried another request", h1.StageBody, head+5, answerHead+2)
		r.pool.CloseIdle()
		check("when the connection is closed", h1.StageBody, head+5, answerHead+2)
	})
}

func TestMovedCountsAnExchangeThatFails(t *testing.T) {
	const get = int64(len("GET /x?y HTTP/1.1\r\nHost: a.test\r\nUser-Agent: Go-http-client/1.1\r\n\r\n"))
	for _, c := range []struct {
		name     string
		serve    func(*peer)
		sent     int64
		received int64
	}{
		{name: "no answer", serve: func(p *peer) { p.hear(); p.Close() }, sent: get},
		{name: "half a head", serve: once("HTTP/1.1 2"), sent: get, received: 10},
		{name: "an answer that is none", serve: once("hello\r\n"), sent: get, received: 7},
	} {
		bubble(t, c.name, h1.Config{}, c.serve, func(t *testing.T, r *rig) {
			var x h1.Exchange
			req := request(t, "GET", nil)
			if _, err := r.pool.RoundTrip(t.Context(), &x, outgoing(req), silent{}, req); err == nil {
				t.Error("RoundTrip() = nil")
			}
			if sent, received := x.Moved(); sent != c.sent || received != c.received || x.Stage() != h1.StageHead {
				t.Errorf("Moved() = %d, %d at stage %d, want %d, %d, %d", sent, received, x.Stage(), c.sent, c.received, h1.StageHead)
			}
		})
	}
}

func TestCarriesRequestKnowsRecordsOfTLS(t *testing.T) {
	record := func(kind byte, size int) []byte { return append([]byte{kind, 3, 3}, make([]byte, size-3)...) }
	for _, c := range []struct {
		name   string
		record []byte
		want   bool
	}{
		{name: "the shortest head of a request over TLS 1.3", record: record(23, 48), want: true},
		{name: "a full record", record: record(23, 16<<10), want: true},
		{name: "an alert of TLS 1.2", record: record(21, 57)},
		{name: "an alert of TLS 1.3", record: record(23, 24)},
		{name: "a key update of TLS 1.3", record: record(23, 27)},
		{name: "a handshake", record: record(22, 300)},
		{name: "nothing"},
	} {
		if got := h1.CarriesRequest(c.record); got != c.want {
			t.Errorf("%s: CarriesRequest(%d bytes) = %v, want %v", c.name, len(c.record), got, c.want)
		}
	}
}
