package lb

import (
	"fmt"
	"net/http/httptrace"
	"net/textproto"
	"sync"
	"time"
)

// attemptKey finds the attempt in the context of its dial.
type attemptKey struct{}

// pooled is what is known of an attempt whose connection a transport has: what that
// tells of it through its client trace, and what the connection counts.
type pooled struct {
	attempt *attempt
	trace   httptrace.ClientTrace

	mu     sync.Mutex // guards the following, which the transport's goroutines write
	dials  int        // dials that ended
	dialed bool       // one of them well
	taken  taken
	before int64     // bytes sent on connections that the transport gave up by itself
	opaque bool      // a connection was not ours: its bytes are not known
	stale  bool      // the answer had come before the request went out
	asked  time.Time // when the transport began to wait for a 100 Continue; zero: it does not
	agreed bool      // which has come
	hinted int64     // bytes of informational answers
}

// taken is the connection that carries an attempt, and its counters' state when
// the attempt got it.
type taken struct {
	conn           *countedConn
	sent, received int64
	reused         bool // it or one before it had carried another request
	idled          bool // it has

	over                     bool // the connection has gone on to another attempt
	sentAfter, receivedAfter int64
}

// moved is how many bytes the connection moved for the attempt.
func (t *taken) moved() (sent, received int64) {
	switch {
	case t.conn == nil:
		return 0, 0
	case t.over:
		return t.sentAfter, t.receivedAfter
	}
	return t.conn.sent.Load() - t.sent, t.conn.received.Load() - t.received
}

// newPooled returns what is known of a before it has begun.
func newPooled(a *attempt) *pooled {
	p := &pooled{attempt: a}
	if a.caller != nil {
		p.trace = *a.caller
	}
	conns := a.backend.conns
	if conns.owned { // else the connections may be another pool's
		p.trace.GotConn = p.gotConn
		p.trace.GotFirstResponseByte = p.gotFirstByte
	}
	p.trace.Got1xxResponse = nil
	if a.call.hint != nil || a.caller != nil && a.caller.Got1xxResponse != nil {
		p.trace.Got1xxResponse = p.got1xx
	}
	if conns.owned && a.call.body != nil && a.call.in.Header["Expect"] != nil {
		p.trace.Wait100Continue, p.trace.Got100Continue = p.wait100, p.got100
	}
	return p
}

func (p *pooled) got1xx(code int, header textproto.MIMEHeader) error {
	p.mu.Lock()
	for name, values := range header {
		for _, value := range values {
			p.hinted += int64(len(name) + len(value))
		}
	}
	p.hinted += int64(len("HTTP/1.1 100\r\n\r\n"))
	stale, flood := p.stale, p.hinted > DefaultMaxHeaderBytes
	p.mu.Unlock()
	switch {
	case stale:
		return errUnasked
	case flood: // to which net/http knows no end
		return fmt.Errorf("%w: more than %d bytes of informational answers", errBadAnswer, DefaultMaxHeaderBytes)
	}
	return p.attempt.Informational(code, header)
}

// dialEnded is told by the backend's dialer how a dial for this attempt ended.
func (p *pooled) dialEnded(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dials++
	p.dialed = p.dialed || err == nil
}

// gotConn is told by the transport which connection carries the attempt. It is
// told again when the transport found an idle connection dead and takes another. If
// the dead one has carried bytes of the request, whether to send it again is not
// for the transport to say: the new connection is closed before it is used, and so
// is every other that it tries; see mayDial.
func (p *pooled) gotConn(info httptrace.GotConnInfo) {
	cc := countedIn(info.Conn)
	p.mu.Lock()
	sent, _ := p.taken.moved()
	p.before += sent
	resend := p.before > 0
	p.taken = taken{conn: cc, reused: info.Reused || p.taken.reused, idled: info.Reused}
	if cc == nil {
		p.opaque = true
	} else {
		p.taken.sent, p.taken.received = cc.sent.Load(), cc.received.Load()
	}
	p.mu.Unlock()
	if cc != nil {
		// A look costs a system call: only for a request that could not be repeated if
		// it were written to a dead connection.
		cc.own(p, info.Reused && !p.attempt.call.replayable())
	}
	if resend {
		info.Conn.Close()
	}
	if p.attempt.caller != nil && p.attempt.caller.GotConn != nil {
		p.attempt.caller.GotConn(info)
	}
}

// conn is the connection that carries the attempt, nil if it is not known.
func (p *pooled) conn() *countedConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken.conn
}

// gotFirstByte is told by the transport when it sees the first byte of an answer. If
// the connection has received nothing since the attempt got it, that byte was there
// before: the backend has sent more than its answer to the request before, and what
// follows answers nobody's. net/http drops such a connection, but only if it comes to
// look at it before it has given it to the next request.
func (p *pooled) gotFirstByte() {
	p.mu.Lock()
	conn := p.taken.conn
	_, received := p.taken.moved()
	p.stale = conn != nil && p.taken.idled && received == 0
	stale := p.stale
	p.mu.Unlock()
	if stale {
		conn.Close() // now, or the transport may give it to the request after this one
	}
	if p.attempt.caller != nil && p.attempt.caller.GotFirstResponseByte != nil {
		p.attempt.caller.GotFirstResponseByte()
	}
}

func (p *pooled) isStale() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stale
}

// mayDial tells whether a connection may be opened for the attempt: not once it has
// sent something.
func (p *pooled) mayDial() bool {
	sent, _ := p.moved()
	return sent == 0
}

// wait100 and got100 are told when the transport begins to wait for the backend's word
// that it wants the body, and when that has come.
func (p *pooled) wait100() {
	p.mu.Lock()
	p.asked = time.Now()
	p.mu.Unlock()
	if p.attempt.caller != nil && p.attempt.caller.Wait100Continue != nil {
		p.attempt.caller.Wait100Continue()
	}
}

func (p *pooled) got100() {
	p.mu.Lock()
	p.agreed = true
	p.mu.Unlock()
	if p.attempt.caller != nil && p.attempt.caller.Got100Continue != nil {
		p.attempt.caller.Got100Continue()
	}
}

// wanted tells whether the client is to be asked for more of the body. The transport
// reads it also when a final answer has come in place of a 100 Continue, for the sake
// of the connection: the client would be told to go on with an upload that was refused.
func (p *pooled) wanted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.agreed || p.asked.IsZero() || time.Since(p.asked) >= p.attempt.backend.conns.patience
}

// passedOn is told that the connection now carries another attempt.
func (p *pooled) passedOn() {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := &p.taken
	t.sentAfter, t.receivedAfter = t.moved()
	t.over = true
}

// moved is how many bytes of the request left on connections of the pool, and how many
// came on the last of them.
func (p *pooled) moved() (sent, received int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sent, received = p.taken.moved()
	return p.before + sent, received
}

// isOpaque tells that a connection was not the pool's: what has left is not known.
func (p *pooled) isOpaque() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.opaque
}

func (p *pooled) reused() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken.reused
}

// disown lets go of the connection.
func (p *pooled) disown() {
	if conn := p.conn(); conn != nil {
		conn.disown(p)
	}
}

// stage is how far the attempt came that got no answer; sentWhole tells whether its body
// has been read to its end.
func (p *pooled) stage(sentWhole bool) Stage {
	p.mu.Lock()
	defer p.mu.Unlock()
	unconnected := p.taken.conn == nil && !p.opaque
	switch {
	case unconnected && p.dialed:
		return StageTLS
	case unconnected && p.dials > 0:
		return StageDial
	case !sentWhole || unconnected:
		return StageRequest
	}
	return StageResponse
}

// cause is why the attempt got no answer, from what its connection tells; moved says
// that a byte was sent or received.
func (p *pooled) cause(moved bool) Cause {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.taken.conn == nil && !p.opaque:
		return CauseClientRequest // net/http would not send it
	case p.taken.conn == nil || p.before > 0 || p.taken.conn.cut.Load():
		return CauseReset
	case !moved && !p.taken.reused:
		return CauseClientRequest // net/http could not write it
	case !moved:
		return CauseReset // net/http has closed what was left open too long
	}
	return CauseProtocol
}
