package lb

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Conditions that callers test with errors.Is.
var (
	// ErrNoBackend means that no backend could be given the request: none may be
	// used, the strategy wanted none, or each of them failed to be reached. Its
	// status is 503.
	ErrNoBackend = errors.New("no backend available")
	// ErrClosed means that the pool has been shut down or closed. Its status is
	// 503.
	ErrClosed = errors.New("pool is closed")
)

var (
	errFenced     = errors.New("attempt has ended")
	errClientGone = errors.New("client does not take the answer")
	errBodyLength = errors.New("request body is not as long as its Content-Length")
	errStale      = errors.New("idle connection was closed by the backend")
	errBadAnswer  = errors.New("answer cannot be passed on")
	errUnasked    = fmt.Errorf("%w: it came before the request was sent", errBadAnswer)
	errResend     = errors.New("connection broke after a part of the request was sent")
	errNoConn     = errors.New("dialer returned neither connection nor error")
	errNoAnswer   = errors.New("transport returned neither answer nor error")
)

// StatusClientClosed is the status that StatusOf gives to a request whose client
// left before it was answered. It is not registered with IANA; nginx and others
// log the same number. A client sees it only if a middleware cancelled the request
// while its client was still there.
const StatusClientClosed = 499

// AttemptError says which attempt of a request failed, where and why. Where a
// request failed after several attempts, it describes the last of them.
//
// It unwraps to the error that the transport reported. Its text names the
// backend: it is meant for logs, not for clients.
type AttemptError struct {
	// Backend is the name of the backend that was tried.
	Backend string
	// Attempt counts the request's attempts from 1, failed dials included.
	Attempt int
	// Stage is how far the attempt came.
	Stage Stage
	// Cause is why it ended.
	Cause Cause
	// Blame is whose fault it was.
	Blame Blame
	// Err is what the transport reported; never nil.
	Err error
}

func (e *AttemptError) Error() string {
	return fmt.Sprintf("backend %q, attempt %d, %s: %s: %v", e.Backend, e.Attempt, e.Stage, e.Cause, e.Err)
}

// Unwrap returns what the transport reported.
func (e *AttemptError) Unwrap() error { return e.Err }

// StatusOf returns the HTTP status that tells a client about err:
//
//	no backend to be had: also if each was tried and
//	failed at dial or TLS handshake, time-out or not  503
//	pool closed; out of files, ports or buffers here  503
//	time-out of the last attempt otherwise,
//	the request's deadline                            504
//	request body over the limit of an
//	http.MaxBytesReader in front of the pool          413
//	request body too slow (408), broken (400)
//	client left                                       499, see StatusClientClosed
//	hook of WithRewrite that panicked                 500
//	anything else                                     502
//
// A nil err gives 200.
func StatusOf(err error) int {
	var ae *AttemptError
	switch {
	case err == nil:
		return http.StatusOK
	case errors.Is(err, ErrNoBackend), errors.Is(err, ErrClosed):
		return http.StatusServiceUnavailable
	case errors.As(err, &ae):
		return ae.status()
	case errors.Is(err, context.Canceled):
		return StatusClientClosed
	case isTimeout(err):
		return http.StatusGatewayTimeout
	}
	return http.StatusBadGateway
}

func (e *AttemptError) status() int {
	switch e.Cause {
	case CauseClientGone:
		return StatusClientClosed
	case CauseClientBody:
		return bodyStatus(e.Err)
	case CauseClientRequest:
		return http.StatusBadRequest
	case CauseTimeout, CauseDeadline:
		return http.StatusGatewayTimeout
	case CauseClosed, CauseLocal:
		return http.StatusServiceUnavailable
	case CauseHook:
		return http.StatusInternalServerError
	}
	return http.StatusBadGateway
}

// bodyStatus is the status for a request whose body could not be read.
func bodyStatus(err error) int {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return http.StatusRequestEntityTooLarge
	case isTimeout(err):
		return http.StatusRequestTimeout
	}
	return http.StatusBadRequest
}

func isTimeout(err error) bool {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// isLocal tells whether err says that this process or machine is short of
// something: file descriptors, ports, buffers. No backend is to blame for that.
func isLocal(err error) bool {
	for _, e := range [...]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL} {
		if errors.Is(err, e) {
			return true
		}
	}
	// A look-up that failed does not say that it could open neither its configuration
	// nor a socket. Whether files have run out can be asked of the system itself.
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		f, err := os.Open(os.DevNull)
		if err != nil {
			return true
		}
		f.Close()
	}
	return false
}

// replyError is the default of WithErrorHandler. Its text is the status's own:
// what err says about backends is nobody's business outside.
func replyError(w http.ResponseWriter, r *http.Request, err error) {
	code := StatusOf(err)
	if isGRPC(r.Header) {
		replyGRPC(w, code)
		return
	}
	http.Error(w, http.StatusText(code), code)
}

// isGRPC tells whether a request is one of gRPC, whose clients look for a status in
// fields of their own.
func isGRPC(h http.Header) bool {
	rest, ok := strings.CutPrefix(h.Get("Content-Type"), "application/grpc")
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// grpcDeadlinePassed tells whether a request of gRPC has a deadline, by its Grpc-Timeout
// field, that has passed after that time: a backend keeps to it by itself, and then ends
// the call in whatever way.
func grpcDeadlinePassed(h http.Header, after time.Duration) bool {
	s := h.Get("Grpc-Timeout")
	if len(s) < 2 || len(s) > 9 || !isGRPC(h) {
		return false
	}
	units := map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond}
	unit, known := units[s[len(s)-1]]
	n, err := strconv.ParseUint(s[:len(s)-1], 10, 32)
	return known && err == nil && time.Duration(n) <= after/unit
}

// replyGRPC answers as a gRPC server does that has nothing but a status to send: in
// the header, with 200 (gRPC over HTTP/2, "Trailers-Only").
func replyGRPC(w http.ResponseWriter, code int) {
	const invalidArgument, deadlineExceeded, resourceExhausted, internal, unavailable = 3, 4, 8, 13, 14
	status := unavailable
	switch code {
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		status = deadlineExceeded
	case http.StatusRequestEntityTooLarge:
		status = resourceExhausted
	case http.StatusBadRequest:
		status = invalidArgument
	case http.StatusInternalServerError:
		status = internal
	}
	h := w.Header()
	h.Set("Content-Type", "application/grpc")
	h.Set("Grpc-Status", strconv.Itoa(status))
	h.Set("Grpc-Message", http.StatusText(code))
	w.WriteHeader(http.StatusOK)
}

// setRetryAfter says when a client may ask again, in whole seconds.
func setRetryAfter(h http.Header, seconds int) {
	h.Set("Retry-After", strconv.Itoa(seconds))
}
