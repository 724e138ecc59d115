package lb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"example.com/lb/internal/h1"
	"example.com/lb/internal/h2"
)

// outcome classifies how the attempt stands: err is what the transport returned
// instead of an answer, nil if there is one.
func (a *attempt) outcome(err error) Outcome {
	// The body's lock before the attempt's: attemptBody.Read takes them in that order.
	bodyFault, sentWhole := error(nil), true
	if a.body != nil {
		bodyFault, sentWhole = a.call.body.fault(), a.body.sentWhole()
	}
	o := Outcome{Stage: StageBody, Attempt: a.number, Reused: a.reused(), Err: err, Wait: time.Since(a.began)}
	o.Total = o.Wait
	o.SentBytes, o.ReceivedBytes = a.counted()
	if err == nil {
		return o
	}
	o.NeverLeft = a.neverLeft(err, o.SentBytes)
	o.Stage = a.stage(err, sentWhole)
	o.Cause = a.cause(err, o.Stage, o.SentBytes+o.ReceivedBytes > 0, bodyFault)
	if bodyFault != nil && o.Cause == CauseClientBody {
		o.Err = bodyFault // what the transport makes of it is less clear
	}
	o.Blame = blameOf(o.Cause)
	return o
}

// neverLeft tells whether provably no byte of the request has reached a backend.
func (a *attempt) neverLeft(err error, sent int64) bool {
	switch {
	case a.backend.conns.handler != nil:
		return errors.Is(err, ErrNoBackend) // a Pool that could not reach anybody
	case a.pooled == nil:
		return a.trip.neverLeft()
	}
	return a.backend.conns.owned && !a.pooled.isOpaque() && sent == 0
}

// stage is how far an attempt came that got no answer.
func (a *attempt) stage(err error, sentWhole bool) Stage {
	switch {
	case !a.backend.conns.owned:
		return StageResponse
	case a.pooled != nil:
		return a.pooled.stage(sentWhole)
	}
	stage := a.trip.stage(err)
	if stage == StageResponse && !sentWhole {
		return StageRequest
	}
	return stage
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
	case errors.Is(ctxErr, context.DeadlineExceeded), grpcDeadlinePassed(a.call.in.Header, time.Since(a.call.began)):
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
	switch {
	case cause != CauseNone || err == nil:
		return cause
	case errors.Is(err, h1.ErrAnswer):
		return CauseProtocol
	}
	return CauseReset
}

// cause is why an attempt got no answer. What is known for certain comes before what the
// transport's error says: that is the first of several to be noticed.
func (a *attempt) cause(err error, stage Stage, moved bool, bodyFault error) Cause {
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
	case errors.Is(err, errBadAnswer), errors.Is(err, h1.ErrAnswer), errors.Is(err, h2.ErrHeadTooLarge):
		return CauseProtocol
	case !a.backend.conns.owned:
		return CauseUnknown
	case stage == StageDial:
		return CauseRefused
	case stage == StageTLS:
		return CauseTLS
	case a.pooled != nil:
		return a.pooled.cause(moved)
	case errors.Is(err, h1.ErrRequest), errors.Is(err, h2.ErrRequest):
		return CauseClientRequest
	case errors.Is(err, h1.ErrBodyLength):
		return CauseClientBody
	}
	return CauseReset
}

func (a *attempt) error(o *Outcome) *AttemptError {
	err := o.Err
	if err == nil {
		err = fmt.Errorf("answered with status %d, which is retried", o.Status)
	}
	return &AttemptError{Backend: a.backend.name, Attempt: a.number, Stage: o.Stage, Cause: o.Cause, Blame: o.Blame, Err: err}
}
