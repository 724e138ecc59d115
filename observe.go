package lb

import "time"

// Stage is how far an attempt came before it ended.
type Stage uint8

// The stages of an attempt, in order.
const (
	StageDial     Stage = iota + 1 // connecting
	StageTLS                       // TLS handshake
	StageRequest                   // sending the request
	StageResponse                  // waiting for the answer's headers
	StageBody                      // headers have come, the body is under way
	StageDone                      // the answer has ended, all of it
)

var stageNames = [...]string{"none", "dial", "tls", "request", "response", "body", "done"}

// String returns the stage as one lower-case word.
func (s Stage) String() string { return nameIn(stageNames[:], int(s)) }

// MarshalText makes it the word of String in JSON and in logs.
func (s Stage) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Cause is why an attempt ended as it did.
type Cause uint8

// The causes. The comment says whose fault each is.
const (
	CauseNone          Cause = iota // answered, with whatever status: nobody's
	CauseRefused                    // the dial was refused or found no way: backend
	CauseTimeout                    // dial, handshake or headers took too long: backend
	CauseTLS                        // the handshake failed: backend
	CauseReset                      // the connection ended before the answer did: backend
	CauseProtocol                   // the answer was no HTTP: backend
	CauseUnknown                    // a RoundTripper that is not ours failed: backend
	CauseClientGone                 // the request's context was cancelled: client
	CauseClientBody                 // the request's body could not be read: client
	CauseClientRequest              // the request cannot be sent as it is: client
	CauseDeadline                   // the deadline of the request's context passed: client
	CauseLocal                      // out of files, ports or buffers here: us
	CauseClosed                     // the pool was closed meanwhile: us
	CauseHook                       // a hook of the user's panicked: us
)

var causeNames = [...]string{
	"none", "refused", "timeout", "tls", "reset", "protocol", "unknown",
	"client gone", "client body", "client request", "deadline", "local", "closed", "hook",
}

// String returns the cause in lower-case words.
func (c Cause) String() string { return nameIn(causeNames[:], int(c)) }

// MarshalText makes it the word of String in JSON and in logs.
func (c Cause) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Blame is whose fault the end of an attempt was. Only BlameBackend counts
// against a backend.
type Blame uint8

// Whose fault it was.
const (
	BlameNone    Blame = iota // it went well
	BlameBackend              // the backend, or the way to it
	BlameClient               // whoever sent the request
	BlameUs                   // the pool, this process or this machine
)

var blameNames = [...]string{"none", "backend", "client", "us"}

// String returns whose fault it was as one lower-case word.
func (b Blame) String() string { return nameIn(blameNames[:], int(b)) }

// MarshalText makes it the word of String in JSON and in logs.
func (b Blame) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

func nameIn(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return "invalid"
}

// blameOf is the table of whose fault each cause is.
func blameOf(c Cause) Blame {
	switch c {
	case CauseNone:
		return BlameNone
	case CauseClientGone, CauseClientBody, CauseClientRequest, CauseDeadline:
		return BlameClient
	case CauseLocal, CauseClosed, CauseHook:
		return BlameUs
	}
	return BlameBackend
}

// Outcome is how one attempt ended. Retry, ejection, counters and log read this
// one value, so they cannot disagree.
//
// An attempt is told about at most twice: when the answer's headers are here,
// or it failed before them, with Final false; and, if it was answered, once more
// when the answer's body has ended, with Final true. An answer that streams for
// an hour so teaches the pool at once, not an hour late.
type Outcome struct {
	// Stage is how far the attempt came: StageBody when it was answered and the
	// body is still to come, StageDone when all of it has come.
	Stage Stage
	// Cause is why it ended, CauseNone if it was answered.
	Cause Cause
	// Blame is whose fault that was.
	Blame Blame
	// Status is the answer's status, 0 if there was none.
	Status int
	// Err is what the transport reported, nil if the attempt went well.
	Err error
	// Attempt counts the request's attempts from 1.
	Attempt int
	// Reused tells that the connection had carried a request before.
	Reused bool
	// NeverLeft tells that provably the backend has not looked at the request: there
	// was no connection, it carried no byte, or over HTTP/2 the backend has said so
	// (RFC 9113, section 8.7). False proves nothing.
	NeverLeft bool
	// SentBytes and ReceivedBytes count what this attempt moved on its
	// connection, TLS records included; where the connection is not the pool's
	// own, SentBytes is 0 and ReceivedBytes the length of the answer's body. Over
	// HTTP/2, where requests share a connection, they count the two bodies.
	SentBytes, ReceivedBytes int64
	// Wait is the time from the attempt's begin to the answer's headers, or to
	// its failure; Total the time to its end.
	Wait, Total time.Duration
	// Final tells that the answer's body has ended.
	Final bool
}

// failed tells whether the attempt counts against its backend.
func (o *Outcome) failed() bool { return o.Blame == BlameBackend }
