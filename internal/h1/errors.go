package h1

import (
	"errors"
	"fmt"
	"os"
)

// Stage is how far an exchange came.
type Stage uint8

// The stages, in their order.
const (
	StageConnect Stage = iota // no connection yet; the error is that of Config.Dial
	StageSend                 // the request is going out
	StageHead                 // it is out; the answer's head is awaited
	StageBody                 // the head has come
)

var (
	// ErrRequest wraps what is wrong with a request that cannot be sent. Nothing of it was,
	// unless it is its trailer that is wrong.
	ErrRequest = errors.New("request cannot be sent")
	// ErrAnswer wraps what is wrong with an answer.
	ErrAnswer = errors.New("malformed answer")
	// ErrHeadTooLarge is the error of an answer whose head is over Config.MaxHeaderBytes.
	ErrHeadTooLarge = fmt.Errorf("%w: its head is too large", ErrAnswer)
	// ErrBodyLength is the error of a request's body that is not as long as was said.
	ErrBodyLength = errors.New("request body is not as long as its Content-Length")
	// ErrHeaderTimeout is the error of an answer whose head did not come in time.
	ErrHeaderTimeout error = timeoutError("timeout awaiting response headers")
)

type timeoutError string

func (e timeoutError) Error() string { return string(e) }
func (e timeoutError) Timeout() bool { return true }
func (e timeoutError) Is(target error) bool {
	return target == os.ErrDeadlineExceeded
}
