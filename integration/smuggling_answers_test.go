package integration

import (
	"slices"
	"strconv"
	"strings"
	"testing"
)

// answer is what a backend sends in answer to first, all at once, which is more than an
// answer or none.
type answer struct {
	name, reply string
	want        string // by the client; see shape
	asks        string // the request but for its first line and Host
	early       bool   // it is sent when the head of the request has come
	dirty       bool   // it leaves something behind; see rounds
}

// rounds is how often the answer that leaves something behind is asked for in a row: the
// next request should come to get its connection before anybody has looked at that. It
// may be answered with 502 then.
const rounds = 20

const (
	ok    = "HTTP/1.1 200 OK\r\n"
	first = "Content-Length: 9\r\n\r\nNNN/first"
	evil  = "HTTP/1.1 200 OK\r\nEvil: 1\r\nContent-Length: 12\r\n\r\nNNN/smuggled"
	asks  = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
	hint  = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
)

func answers() []answer {
	whole := chunked + "\r\n" + chunk("NNN/first") + "0\r\n\r\n"
	part := chunked + "\r\n" + chunk("NNN/first")
	long := strings.Repeat("x", 1<<20)
	return []answer{
		{name: "two lengths that differ, the second shorter", reply: ok + "Content-Length: 90\r\n" + first + evil, want: "502 next"},
		{name: "two lengths that differ, the second longer", reply: ok + "Content-Length: 0\r\n" + first + evil, want: "502 next"},
		{name: "two lengths that are equal", reply: ok + "Content-Length: 9\r\n" + first, want: "502 next"},
		{name: "list of equal lengths", reply: ok + "Content-Length: 9, 9\r\n\r\nNNN/first" + evil, want: "502 next"},
		{name: "length +9", reply: ok + "Content-Length: +9\r\n\r\nNNN/first" + evil, want: "502 next"},
		{name: "length -1", reply: ok + "Content-Length: -1\r\n\r\nNNN/first" + evil, want: "502 next"},
		{name: "length 0x9", reply: ok + "Content-Length: 0x9\r\n\r\nNNN/first" + evil, want: "502 next"},
		{name: "length over 64 bits", reply: ok + "Content-Length: 18446744073709551625\r\n\r\nNNN/first" + evil, want: "502 next"},
		{name: "length that is empty", reply: ok + "Content-Length:\r\n\r\nNNN/first" + evil, want: "502 next"},
		{name: "length and chunks", reply: ok + "Content-Length: 5\r\n" + whole, want: "502 next"},
		{name: "length 0 and chunks, with an answer in them", reply: ok + "Content-Length: 0\r\n" + chunked + "\r\n" + chunk("NNN/first"+evil) + "0\r\n\r\n", want: "502 next"},
		{name: "xchunked", reply: ok + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + evil, want: "502 next"},
		{name: "chunked on two lines", reply: ok + chunked + whole + evil, want: "502 next"},
		{name: "chunked, identity", reply: ok + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + evil, want: "502 next"},

		{name: "chunk size that is none", reply: ok + part + "zz\r\n" + evil, want: "cut"},
		{name: "chunk size over 64 bits", reply: ok + part + "10000000000000005\r\n" + evil, want: "cut"},
		{name: "chunk size with 0x", reply: ok + part + "0x5\r\n" + evil, want: "cut"},
		{name: "chunk longer than it says", reply: ok + chunked + "\r\n5\r\nNNN/first\r\n0\r\n\r\n" + evil, want: "cut"},
		{name: "LF behind a chunk size", reply: ok + part + "5\nhello\r\n0\r\n\r\n" + evil, want: "cut"},
		{name: "chunks without their end", reply: ok + part + hangUp, want: "cut"},
		{name: "length longer than the body", reply: ok + "Content-Length: 90\r\n\r\nNNN/first" + hangUp, want: "cut"},
		{name: "trailer that is no field", reply: ok + part + "0\r\nno field\r\n\r\n" + evil, want: "cut"},
		{name: "trailers that frame", reply: ok + part + "0\r\nContent-Length: 90\r\nTransfer-Encoding: x\r\nConnection: close\r\n\r\n", want: "first next"},

		{name: "CR in a value", reply: ok + "X: y\rEvil: 1\r\n" + first + evil, want: "502 next"},
		{name: "CR in front of a length", reply: ok + "X: y\rContent-Length: 90\r\n" + first + evil, want: "502 next"},
		{name: "NUL in a value", reply: ok + "X: y\x00z\r\n" + first + evil, want: "502 next"},
		{name: "no colon", reply: ok + "X\r\n" + first + evil, want: "502 next"},
		{name: "name that is empty", reply: ok + ": y\r\n" + first + evil, want: "502 next"},
		{name: "folded in front of the first field", reply: ok + " X: y\r\n" + first + evil, want: "502 next"},
		{name: "folded value", reply: ok + "X: y\r\n Evil: 1\r\n\tz\r\n" + first, want: "502 next"},
		{name: "LF at the end of lines", reply: "HTTP/1.1 200 OK\nX: y\nContent-Length: 9\n\nNNN/first", want: "502 next"},
		{name: "head over 1 MiB", reply: ok + "X: " + long + "\r\n" + first + evil, want: "502 next"},
		{name: "head without an end", reply: ok + strings.Repeat("X: "+long[:1000]+"\r\n", 1100), want: "502 next"},
		{name: "status line without an end", reply: "HTTP/1.1 200 " + long, want: "502 next"},
		{name: "status that is none", reply: "HTTP/1.1 20 OK\r\n" + first + evil, want: "502 next"},
		{name: "status 1000", reply: "HTTP/1.1 1000 OK\r\n" + first + evil, want: "502 next"},
		{name: "HTTP/0.9", reply: "NNN/first" + hangUp, want: "502 next"},
		{name: "HTTP/2", reply: "\x00\x00\x00\x04\x00\x00\x00\x00\x00" + hangUp, want: "502 next"},
		{name: "nothing", reply: hangUp, want: "502 next"},

		{name: "another answer behind the answer", reply: ok + first + evil, want: "first next", dirty: true},
		{name: "another answer behind chunks", reply: ok + whole + evil, want: "first next", dirty: true},
		{name: "another answer behind no body", reply: "HTTP/1.1 204 No Content\r\n\r\n" + evil, want: "204 next", dirty: true},
		{name: "another answer in place of the body of 304", reply: "HTTP/1.1 304 Not Modified\r\nContent-Length: 67\r\n\r\n" + evil, want: "304 next", dirty: true},
		{name: "half an answer behind the answer", reply: ok + first + "HTTP/1.1 200 OK\r\nEvil: 1\r\nX: ", want: "first next", dirty: true},
		{name: "hint behind the answer", reply: ok + first + "HTTP/1.1 103 Early Hints\r\nEvil: 1\r\n\r\n", want: "first next", dirty: true},
		{name: "bytes behind the answer", reply: ok + first + "\x00", want: "first next", dirty: true},
		{name: "empty lines behind the answer", reply: ok + first + "\r\n\r\n", want: "first next", dirty: true},

		{name: "1000 hints in front of the answer", reply: strings.Repeat(hint, 1000) + ok + first, want: strings.Repeat("103 ", 1000) + "first next"},
		{name: "hint with a length and a body", reply: "HTTP/1.1 103 Early Hints\r\nContent-Length: 67\r\n\r\n" + evil, want: "103 smuggled next"}, // which is the answer
		{name: "hint over 1 MiB", reply: "HTTP/1.1 103 Early Hints\r\nX: " + long + "\r\n\r\n" + evil, want: "502 next"},
		{name: "100 that nobody asked for", reply: "HTTP/1.1 100 Continue\r\n\r\n" + ok + first, want: "100 first next"},

		{name: "101 that nobody asked for", reply: "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + evil, want: "502 next"},
		{name: "101 that names nothing", reply: "HTTP/1.1 101 Switching Protocols\r\n\r\n" + evil, want: "502 next"},
		{name: "101 to another protocol", asks: asks, reply: "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + evil, want: "502 next"},
		{name: "101 to two protocols", asks: asks, reply: "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket, h2c\r\n\r\n" + evil, want: "502 next"},
		{name: "101 that was asked for: what follows is in the tunnel", asks: asks, reply: "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + ok + first, want: "101 first next"},
		{name: "426 in place of 101", asks: asks, reply: "HTTP/1.1 426 Upgrade Required\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + first, want: "426 next"},
		{name: "400 in place of 101", asks: asks, reply: "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n" + first + hangUp, want: "400 next"},
		{name: "200 in place of 101", asks: asks, reply: ok + "Connection: Upgrade\r\nUpgrade: websocket\r\n" + first, want: "first next"},
		{name: "200 in place of 101, with another answer behind it", asks: asks, reply: ok + first + evil, want: "first next", dirty: true},

		{name: "101 before the body has come", early: true, asks: asks[:len(asks)-2] + "Content-Length: 1000\r\n\r\nhello" + smuggled, reply: "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + evil, want: "502"},
		{name: "answer before the body has come", early: true, asks: "Content-Length: 1000\r\n\r\nhello" + smuggled, reply: ok + first, want: "first"},
		{name: "answer between chunks", early: true, asks: chunked + "\r\n" + chunk("hello") + "ffff\r\n" + smuggled, reply: ok + first, want: "first"},
		{name: "refusal of an Expect, whose body is there", early: true, asks: "Expect: 100-continue\r\n" + length(smuggled) + "\r\n" + smuggled, reply: "HTTP/1.1 401 Unauthorized\r\n" + first, want: "401"},
	}
}

// Answers that are none, and what follows answers: the client gets a 502, or sees a cut,
// and nobody gets a byte of what was not asked for.
func TestNoAnswerIsSmuggled(t *testing.T) {
	rows := answers()
	backend := startAnswering(t, rows)
	g := startGateway(t, []string{"http://" + backend.addr()}, "-max-attempts", "1")
	others := innocents{url: g.url, refused: true}
	for n, row := range rows {
		others.during(t, func() {
			sent, want := row.exchange()
			if got := converse(strings.TrimPrefix(g.url, "http://"), number(sent, n), n, false); got != want && !(row.dirty && sameBut502(got, want)) {
				t.Errorf("%03d %s comes as %.400q, want %.400q", n, row.name, got, want)
			}
		})
	}
	others.client.CloseIdleConnections()
	if code := g.stop(t); code != 0 {
		t.Errorf("the gateway ended with %d", code)
	}
	for _, a := range backend.end(t) {
		role := "innocent"
		if m := roleInTarget.FindStringSubmatch(a.Line); m != nil {
			role = m[2]
		}
		outside := a.Way == "" && role == "next" || strings.HasPrefix(a.Line, "GET /healthz.txt ") // in a tunnel, or a probe
		if role == "smuggled" || a.Fault != "" || a.Way != "127.0.0.1" && !outside {
			t.Errorf("what is no request of the pool's has arrived: %+v", a)
		}
	}
}

// startAnswering starts a backend that answers the first request of each row as that says.
func startAnswering(t *testing.T, rows []answer) *recorder {
	t.Helper()
	// of returns the row of a request, nil if it is not the first of one.
	of := func(a arrival) (*answer, int) {
		m := roleInTarget.FindStringSubmatch(a.Line)
		if m == nil || m[2] != "first" {
			return nil, 0
		}
		n, _ := strconv.Atoi(m[1])
		return &rows[n], n
	}
	reply := func(a arrival) string {
		if row, n := of(a); row != nil {
			return number(row.reply, n)
		}
		if a.Way == "" { // the last one in a tunnel, or a probe
			return echoed(a) + hangUp
		}
		return echoed(a)
	}
	early := func(a arrival) string {
		if row, n := of(a); row != nil && row.early {
			return number(row.reply, n)
		}
		return ""
	}
	return startRecorder(t, reply, early)
}

// exchange is what the client sends and what it wants.
func (a *answer) exchange() (sent, want string) {
	sent = "GET /NNN/first HTTP/1.1\r\nHost: front.test\r\n"
	if a.asks == "" {
		sent += "\r\n"
	}
	sent += a.asks
	if !a.dirty {
		return sent + next, a.want
	}
	before, _ := strings.CutSuffix(a.want, "next")
	return strings.Repeat(sent+second, rounds) + next, strings.Repeat(before+"second ", rounds) + "next"
}

// sameBut502 tells whether got are the answers that want has, but for some that are 502.
func sameBut502(got, want string) bool {
	g, w := strings.Fields(got), strings.Fields(want)
	return slices.EqualFunc(g, w, func(g, w string) bool { return g == w || g == "502" })
}
