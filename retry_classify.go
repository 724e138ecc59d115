package lb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// outcome classifies how the attempt stands: err is what the transport returned
// instead of an answer, nil if there is one.
func (a *attempt) outcome(err error) Outcome {
	// The body's lock before the attempt's: attemptBody.Read takes them in that order.
	bodyFault, sentWhole := error(nil), true
	if a.body != nil {
		bodyFault, sentWhole = a.call.body.fault(), a.body.sentWhole()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	o := Outcome{Stage: StageBody, Attempt: a.number, Reused: a.taken.reused, Err: err, Wait: time.Since(a.began)}
	o.Total = o.Wait
	a.countLocked(&o)
	if err == nil {
		return o
	}
	owned := a.backend.conns.owned
	o.NeverLeft = owned && !a.opaque && o.SentBytes == 0
	if a.backend.conns.handler != nil && errors.Is(err, ErrNoBackend) {
		o.NeverLeft = true // a Pool that could not reach anybody
	}
	o.Stage = a.stageLocked(sentWhole)
	o.Cause = a.causeLocked(err, o.Stage, o.SentBytes+o.ReceivedBytes > 0, bodyFault)
	if bodyFault != nil && o.Cause == CauseClientBody {
		o.Err = bodyFault // what the transport makes of it is less clear
	}
	o.Blame = blameOf(o.Cause)
	return o
}

// countLocked fills in the bytes moved.
func (a *attempt) countLocked(o *Outcome) {
	sent, received := a.taken.moved()
	o.SentBytes, o.ReceivedBytes = a.before+sent, received
}

// stageLocked is how far an attempt came that got no answer.
func (a *attempt) stageLocked(sentWhole bool) Stage {
	switch {
	case !a.backend.conns.owned:
		return StageResponse
	case a.taken.conn == nil && !a.opaque && a.dialed:
		return StageTLS
	case a.taken.conn == nil && !a.opaque && a.dials > 0:
		return StageDial
	case !sentWhole:
		return StageRequest
	case a.taken.conn == nil && !a.opaque:
		return StageRequest
	}
	return StageResponse
}

// callersCause is why an attempt ended if that was the doing of the pool's closing or
// of the request's own side, and CauseNone if it was not. It goes by what is known
// for certain, our reader of the body and the request's context.
func (a *attempt) callersCause(bodyFault error) Cause {
	ctxErr := a.Context.Err()
	switch {
	case a.call.pool.closed():
		return CauseClosed
	case bodyFault != nil && (ctxErr == nil || bodyStatus(bodyFault) != http.StatusBadRequest):
		return CauseClientBody
	case errors.Is(ctxErr, context.DeadlineExceeded):
		return CauseDeadline
	case ctxErr != nil:
		return CauseClientGone
	}
	return CauseNone
}

// bodyCause is why the body of an answer ended with err, nil if its reader closed it
// before its end.
func (a *attempt) bodyCause(err error) Cause {
	if err == io.EOF {
		return CauseNone
	}
	var bodyFault error
	if err != nil && a.call.body != nil {
		// The transport cuts an answer if it cannot send the rest of the body.
		bodyFault = a.call.body.fault()
	}
	cause := a.callersCause(bodyFault)
	if cause == CauseNone && err != nil {
		return CauseReset
	}
	return cause
}

// causeLocked is why an attempt got no answer. What is known for certain comes
// before what the transport's error says: that is the first of several to be noticed.
func (a *attempt) causeLocked(err error, stage Stage, moved bool, bodyFault error) Cause {
	if cause := a.callersCause(bodyFault); cause != CauseNone {
		return cause
	}
	switch {
	case errors.Is(err, errHook):
		return CauseHook
	case isLocal(err):
		return CauseLocal
	case isTimeout(err):
		return CauseTimeout
	case errors.Is(err, errBadAnswer):
		return CauseProtocol
	case !a.backend.conns.owned:
		return CauseUnknown
	case stage == StageDial:
		return CauseRefused
	case stage == StageTLS:
		return CauseTLS
	case a.taken.conn == nil && !a.opaque:
		return CauseClientRequest // net/http would not send it
	case a.taken.conn == nil || a.before > 0 || a.taken.conn.cut.Load():
		return CauseReset
	case !moved:
		return CauseClientRequest // net/http could not write it
	}
	return CauseProtocol
}

func (a *attempt) error(o *Outcome) *AttemptError {
	err := o.Err
	if err == nil {
		err = fmt.Errorf("answered with status %d, which is retried", o.Status)
	}
	return &AttemptError{Backend: a.backend.name, Attempt: a.number, Stage: o.Stage, Cause: o.Cause, Blame: o.Blame, Err: err}
}
