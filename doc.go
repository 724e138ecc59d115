// Package lb is an HTTP load balancer to build into a program: it turns a list
// of servers into one dependable [net/http.Handler]. It imports nothing but the
// standard library.
//
// # Start
//
//	pool, err := lb.New(lb.Targets("http://10.0.0.1:8080", "http://10.0.0.2:8080"))
//	if err != nil {
//		return err
//	}
//	defer pool.Close()
//	return http.ListenAndServe(":80", pool)
//
// A [Pool] has two faces. As a handler it is a reverse proxy and fits into any
// server, router or chain of middleware; as a [net/http.RoundTripper] it balances
// on the side of the client:
//
//	client := &http.Client{Transport: pool}
//
// Both may be used at once and share one view of the servers. Everything else is
// an [Option] of [New], and everything has a default.
//
// # Life of a request
//
//	request
//	   │      pool closed: 503
//	   ▼
//	candidates       one snapshot of the set, already filtered: not draining or
//	   │             disabled, not unhealthy or ejected, not tried by this
//	   │             request; on trial: one request at a time
//	   ▼
//	Balancer.Pick    the strategy chooses one of the candidates
//	   │
//	   ▼
//	attempt ◀─────┐  sent to the backend; the body is recorded as it is read
//	   │          │
//	   ▼          │
//	Outcome       │  one value: stage, cause, whose fault, bytes, times;
//	   │          │  counters, health, strategy and record learn from it
//	   ├─ retry? ─┘  failed, and sending it again can do no harm: pick again
//	   ▼
//	answer           passed on as it comes; if it breaks off, the client sees it
//
// The pool owns eligibility, a strategy only chooses: health, trial and what was
// tried already are dealt with before [Balancer.Pick] is called, for strategies
// of one's own as for those of this package.
//
// Two kinds of evidence decide whether a backend is healthy: what becomes of its
// requests (see [PassiveHealth]) and, if asked for, probes (see [HealthCheck]). They
// meet in one state, [Health], whose comment has the table of all transitions.
//
// A request is sent again only if that can do no harm: its method is idempotent,
// or it carries an Idempotency-Key, or provably no backend has looked at it. See
// [RetryPolicy]. Once the answer has begun there is no retry.
//
// ServeHTTP takes out hop-by-hop fields and whatever the client claims in the
// Forwarded and X-Forwarded fields (but see [WithTrustedProxies]), and sets
// X-Forwarded-For, -Host and -Proto itself; the path and the query go out byte for
// byte. RoundTrip leaves the header as it is. To the backends both speak HTTP/1.1 or
// HTTP/2; see [Target].URL.
//
// # Words
//
//	target     what is configured: a URL, a name, a weight
//	backend    a target at run time, with its state and counters
//	pool       the set of backends and what decides among them
//	strategy   what picks; in code a Balancer
//	candidate  a backend that may be picked for this request, now
//	attempt    one try of one request on one backend
//	outcome    how an attempt ended
//	probe      one active health check; what it says is a verdict
//	eject      take a backend out because requests failed on it
//	trial      the careful return after that
//	drain      give no new requests and let the old ones end
//	snapshot   the immutable published view of the set
//
// # Defaults
//
//	setting                         constant                      value
//	Timeouts.Dial                   DefaultDialTimeout            2s
//	Timeouts.TLSHandshake           DefaultTLSHandshakeTimeout    5s
//	Timeouts.ResponseHeader         DefaultResponseHeaderTimeout  60s
//	wait for 100 Continue           DefaultExpectContinueTimeout  1s
//	header of an answer             DefaultMaxHeaderBytes         1 MiB
//	Connections.MaxIdle             DefaultMaxIdleConns           256
//	Connections.IdleTimeout         DefaultIdleConnTimeout        30s
//	Upgrades.CloseSpread            DefaultCloseSpread            10s
//	RetryPolicy.Attempts            DefaultAttempts               3
//	dials that do not count         DefaultMaxFailedDials         10
//	RetryPolicy.BaseDelay           DefaultRetryBaseDelay         25ms
//	RetryPolicy.MaxDelay            DefaultRetryMaxDelay          250ms
//	RetryPolicy.Total               DefaultRetryTotal             60s
//	RetryPolicy.MaxReplayBytes      DefaultMaxReplayBytes         64 KiB
//	RetryPolicy.MaxPoolReplayBytes  DefaultMaxPoolReplayBytes     64 MiB
//	PassiveHealth.Failures          DefaultFailures               3
//	PassiveHealth.Ejection          DefaultEjection               5s
//	PassiveHealth.MaxEjection       DefaultMaxEjection            60s
//	HealthCheck.Interval            DefaultCheckInterval          5s
//	HealthCheck.FastInterval        DefaultFastCheckInterval      1s
//	HealthCheck.Timeout             DefaultCheckTimeout           2s
//	HealthCheck.Rise                DefaultRise                   2
//	HealthCheck.Fall                DefaultFall                   3
//
// The strategy is [RoundRobin]. No status is retried. There are no active checks
// until [WithHealthCheck] or [WithChecker] asks for them. When no backend is usable,
// the pool fails open. Nothing is logged. Proxies in the environment are not used, and
// no header of a client is trusted.
//
// # Concurrency
//
// All methods of [Pool] and [Backend] may be called concurrently, also while
// requests run. A request reads the set through one atomic load; what changes the
// set ([Pool.SetTargets], [Pool.SetState], an ejection) publishes a new snapshot,
// and requests under way keep theirs. An update never resets what did not change:
// a target that keeps its name, URL and Host keeps its backend with health,
// counters and connections, and a strategy keeps its position.
//
// Code of the user's ([Balancer], [Checker], logger, error handler, transport) runs
// without any lock held, concurrently, mostly on the request's goroutine. Panics in it are
// contained, but for those of the error handler: they go to the server, as those of
// any handler.
//
// [Pool.Shutdown] lets requests end, [Pool.Close] cuts them. After either no
// goroutine of the pool's is left, unless it hangs in code of the user's.
//
// # Errors
//
// [New] and [Pool.SetTargets] report all that is wrong at once and change nothing.
//
// A request that got no answer ends with an error that wraps [ErrNoBackend],
// [ErrClosed] or an [*AttemptError], which says which backend, how far it came,
// why it ended and whose fault that was. [StatusOf] maps it to the status that
// ServeHTTP replies with: 502 for a failure of the last backend that was tried,
// 504 for a time-out, 503 when there was nobody to ask, 4xx when the client is to
// blame. Only what a backend, or the way to it, is to blame for counts against
// its health; a client that leaves does not.
//
//	if e, ok := errors.AsType[*lb.AttemptError](err); ok && e.Cause == lb.CauseRefused {
//		log.Printf("%s is down", e.Backend)
//	}
//
// The text of an error names backends: it belongs into a log, not into a reply.
package lb
