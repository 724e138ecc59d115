package lb

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/textproto"
	"slices"
	"time"
)

// RetryPolicy sets when a request that failed on one backend goes to another.
// The zero value means the defaults.
//
// A request is sent again only if that cannot do harm: because its method is
// idempotent (GET, HEAD, OPTIONS, TRACE, PUT, DELETE; RFC 9110, section 9.2.2),
// because it carries an Idempotency-Key or X-Idempotency-Key field, or because it
// provably never left: no connection was obtained, the backend has said over HTTP/2 that
// it has not looked at it (RFC 9113, section 8.7), or the connection carried no
// byte of it. And only if its body can be sent again; see MaxReplayBytes.
//
// A backend that failed is not asked again while others remain. When none does,
// it is, after a delay, if it could not be reached at all or if the failure was
// on a connection that had carried a request before, which it may just have
// closed.
type RetryPolicy struct {
	// Attempts is how often a request may reach a backend, the first time
	// included. Zero means DefaultAttempts; below zero is an error. 1 means that
	// no request is sent twice; a dial that fails is still passed on to the next
	// backend, which does not count (DefaultMaxFailedDials does).
	Attempts int
	// Statuses lists the answers that are worth another attempt, 500 to 599, 408, 425
	// or 429, for requests that may be repeated; none of them ejects its backend. When no
	// attempt is left, the last answer is passed on as it is. The default is
	// none; 502, 503 and 504 are common.
	Statuses []int
	// BaseDelay and MaxDelay bound the delay before a further attempt: before
	// the n-th it is random between 0 and BaseDelay × (2ⁿ⁻¹ − 1), at most
	// MaxDelay (full jitter). There is none when a request that never left goes
	// to another backend. Zero means DefaultRetryBaseDelay and
	// DefaultRetryMaxDelay; a negative BaseDelay means no delays.
	BaseDelay, MaxDelay time.Duration
	// Total is the time since the request came after which no attempt is begun
	// any more. Zero means DefaultRetryTotal, a negative value no limit.
	Total time.Duration
	// MaxReplayBytes is how much of a request's body is kept, while the first
	// attempt sends it, so that it can be sent again. A longer body is sent all
	// the same, but once more than this has been sent it cannot be repeated.
	// Zero means DefaultMaxReplayBytes; a negative value keeps nothing.
	MaxReplayBytes int64
	// MaxPoolReplayBytes bounds what all requests together keep, counted in chunks
	// of up to 32 KiB. Over it bodies are sent without being kept. Zero means
	// DefaultMaxPoolReplayBytes; below zero is an error.
	MaxPoolReplayBytes int64
}

func (r *RetryPolicy) fill(c *config) {
	if r.Attempts < 0 {
		c.faultf("RetryPolicy.Attempts is %d: want 1 or more, or 0 for %d", r.Attempts, DefaultAttempts)
	}
	for _, s := range r.Statuses {
		if (s < 500 || s > 599) && s != 408 && s != 425 && s != 429 {
			c.faultf("RetryPolicy.Statuses has %d: want 500 to 599, 408, 425 or 429", s)
		}
	}
	if r.MaxDelay < 0 || (r.MaxDelay > 0 && r.MaxDelay < r.BaseDelay) {
		c.faultf("RetryPolicy.MaxDelay is %v: want BaseDelay (%v) or more", r.MaxDelay, r.BaseDelay)
	}
	if r.MaxPoolReplayBytes < 0 {
		c.faultf("RetryPolicy.MaxPoolReplayBytes is %d: want 1 or more, or 0 for %d", r.MaxPoolReplayBytes, DefaultMaxPoolReplayBytes)
	}
	r.Statuses = slices.Clone(r.Statuses)
	r.Attempts = or(r.Attempts, DefaultAttempts)
	r.BaseDelay = or(r.BaseDelay, DefaultRetryBaseDelay)
	r.MaxDelay = or(r.MaxDelay, max(DefaultRetryMaxDelay, r.BaseDelay))
	r.Total = or(r.Total, DefaultRetryTotal)
	r.MaxReplayBytes = max(0, or(r.MaxReplayBytes, DefaultMaxReplayBytes))
	r.MaxPoolReplayBytes = or(r.MaxPoolReplayBytes, DefaultMaxPoolReplayBytes)
}

// or returns v, or def if v is zero.
func or[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// delay is how long to wait before attempt n; chance is 0 to 1.
func (r *RetryPolicy) delay(n int, chance float64) time.Duration {
	if r.BaseDelay < 0 || n < 2 {
		return 0
	}
	top := r.MaxDelay
	if shift := n - 1; shift < 16 {
		top = min(top, r.BaseDelay*time.Duration(1<<shift-1))
	}
	return time.Duration(chance * float64(top))
}

// repeatable tells whether r may reach a backend twice.
func repeatable(r *http.Request) bool {
	switch r.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return len(r.Header["Idempotency-Key"]) > 0 || len(r.Header["X-Idempotency-Key"]) > 0
}

// call is one request on its way through the pool: the attempt loop and what it
// has to remember. It is used by one goroutine.
type call struct {
	pool       *Pool
	in         *http.Request // as it goes out to any backend; never changed
	original   *http.Request // as it came
	asked      *http.Request // the same for hooks, with its client in the context
	answering  *attempt      // whose answer was delivered; nil before
	body       *replay       // nil without a body
	began      time.Time
	repeatable bool
	left       func() // tells the pool that the request is over; nil if somebody else does
	target     string // the path as it came, escapes and all; empty: that of in.URL
	// hint is told of informational answers; nil if nobody wants them.
	hint func(code int, header textproto.MIMEHeader) error

	attempts    int // begun so far
	failedDials int // of them, dials to untried backends that failed
	tried       []*Backend
	triedArray  [4]*Backend
	unreached   bool // every attempt so far failed at dial or handshake
	last        *AttemptError
	record      *RequestRecord
	first       attempt
}

// replayable tells whether the request may be sent again after bytes of it have left.
func (c *call) replayable() bool {
	return c.repeatable && (c.body == nil || c.body.length <= c.body.limit)
}

// init makes c the call of r. left is called when the request is over, if not nil.
func (c *call) init(p *Pool, r *http.Request, left func()) *call {
	c.pool, c.in, c.left = p, r, left
	if c.original == nil {
		c.original, c.asked = r, r
	}
	c.target = rawTarget(r.URL)
	c.began, c.repeatable, c.unreached = time.Now(), repeatable(r), true
	c.tried = c.triedArray[:0]
	c.record, _ = r.Context().Value(recordKey{}).(*RequestRecord)
	if r.Body != nil && r.Body != http.NoBody {
		c.body = newReplay(r, c.original, p)
	}
	return c
}

// run makes attempts until one is answered or no further one may be made.
func (c *call) run() (*http.Response, error) {
	b, err := c.pick()
	if err != nil {
		return c.giveUp(err)
	}
	for {
		a := c.begin(b)
		resp, o := a.do()
		a.publish(&o)
		if o.Err == nil && !c.retriedStatus(resp.StatusCode) {
			return a.deliver(resp), nil
		}
		if o.Err != nil {
			c.last = a.error(&o)
		}
		if o.Stage > StageTLS {
			c.unreached = false
		}
		delay, again := c.again(a, &o)
		if !again {
			if resp != nil {
				return a.deliver(resp), nil
			}
			return c.giveUp(nil)
		}
		if resp != nil {
			c.last = a.error(&o)
			a.discard(resp)
		}
		if err := c.wait(delay); err != nil {
			return c.giveUp(err)
		}
		if b, err = c.pick(); err != nil {
			return c.giveUp(err)
		}
	}
}

func (c *call) retriedStatus(code int) bool {
	return c.repeatable && slices.Contains(c.pool.cfg.retry.Statuses, code)
}

// again tells whether another attempt may follow a, which ended with o, and after
// which delay. It is the one place where that is decided.
func (c *call) again(a *attempt, o *Outcome) (time.Duration, bool) {
	policy := &c.pool.cfg.retry
	fresh := !c.hasTried(a.backend)
	if fresh {
		c.tried = append(c.tried, a.backend)
	}
	if fresh && o.Err != nil && o.Stage <= StageTLS {
		c.failedDials++
	}
	switch {
	case o.Blame == BlameClient || o.Cause == CauseClosed || o.Cause == CauseHook:
		return 0, false
	case !c.repeatable && !o.NeverLeft:
		return 0, false
	case c.attempts-min(c.failedDials, DefaultMaxFailedDials) >= policy.Attempts:
		return 0, false
	}
	delay := time.Duration(0)
	switch {
	case !c.anyUntried():
		sameAgain := o.Err != nil && (o.Stage <= StageTLS || o.Reused)
		if !sameAgain || c.attempts >= policy.Attempts {
			return 0, false
		}
		delay = policy.delay(c.attempts+1, rand.Float64())
	case !o.NeverLeft || o.Cause == CauseLocal:
		delay = policy.delay(c.attempts+1, rand.Float64())
	}
	if policy.Total > 0 && time.Since(c.began)+delay > policy.Total {
		return 0, false
	}
	// Last, because it ends the attempt's reading of the body.
	return delay, a.body == nil || a.body.handOver()
}

// wait sleeps unless the client leaves or the pool is closed before.
func (c *call) wait(d time.Duration) error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-c.in.Context().Done():
		return c.in.Context().Err()
	case <-c.pool.conns.ctx.Done():
		return ErrClosed
	}
}

// giveUp ends a request that got no answer and returns the error that says why:
// err if it stopped the loop, else the last attempt's.
func (c *call) giveUp(err error) (*http.Response, error) {
	if c.body != nil {
		c.body.finish(false)
	}
	switch {
	case c.pool.closed():
		err = ErrClosed
	case err != nil && !errors.Is(err, ErrNoBackend):
		err = c.leftWaiting(err)
	case c.last == nil: // err says why nobody was picked
	case c.unreached && c.last.Blame == BlameBackend && !c.anyUntried():
		// nobody could be reached: that is no backend's answer to the request
		err = fmt.Errorf("%w: %w", ErrNoBackend, c.last)
	default:
		err = c.last
	}
	err = fmt.Errorf("lb: %w", err)
	c.pool.totals.failed(err)
	c.over()
	return nil, err
}

// leftWaiting is the error of a request whose client left, or whose deadline came,
// between two attempts: the client's doing, told with what the last one gave.
func (c *call) leftWaiting(ctxErr error) error {
	e := *c.last
	e.Blame, e.Cause = BlameClient, CauseClientGone
	if errors.Is(ctxErr, context.DeadlineExceeded) {
		e.Cause = CauseDeadline
	}
	e.Err = fmt.Errorf("%w, before the next attempt; the last one: %s: %w", ctxErr, c.last.Cause, c.last.Err)
	return &e
}

// over ends the request for the pool. It is called once.
func (c *call) over() {
	if c.left != nil {
		c.left()
	}
}
