package lbtest

import (
	"fmt"
	"net/http"
	"strings"
)

// SetProbe makes requests for path be served by behavior, whatever Set says,
// so that a backend can be ill while it serves traffic, or the other way
// round. All other requests go on as Set says:
//
//	b.SetProbe("/healthz", lbtest.AnswerStatus(503, "")) // fails
//	b.SetProbe("/healthz", lbtest.Delay(3*time.Second))  // is slow
//	b.SetProbe("/healthz", lbtest.Hang())                // never answers
//	b.SetProbe("/healthz", lbtest.AnswerStatus(200, "not what you look for"))
//	b.SetProbe("/healthz", lbtest.Raw("garbage"))        // is not even HTTP
//	b.SetProbe("/healthz", lbtest.Answer())              // is well again
//
// A probe is any request whose URL path, as it arrives and with escapes decoded,
// equals path; its method, query and sender do not matter. Probes are not among
// what Received, Count, Arrivals and MaxConcurrent tell; Probes and ProbeCount
// have them.
//
// SetProbe may be called again at any time and acts on probes that arrive from
// then on. There is one probe path: after a change of path the old one is
// traffic again, and what is recorded stays. Before the first call all requests
// are traffic.
//
// Probes use connections as all requests do. While [Refuse] is set they are
// refused too, and [CloseReused] treats them as requests of their connection.
// Therefore neither can be a probe's own behaviour: SetProbe panics if behavior
// is one of them, if path does not begin with "/", or if it has a query, which
// could never match.
func (b *Backend) SetProbe(path string, behavior Behavior) {
	if !strings.HasPrefix(path, "/") || strings.Contains(path, "?") {
		panic(fmt.Sprintf("lbtest: SetProbe: %q is not a path that begins with / and has no query", path))
	}
	checkServesRequests("SetProbe", behavior)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probePath, b.probeBehavior = path, behavior
}

// isProbeLocked reports whether r is for the path of SetProbe. The path of a
// request can be empty, which before SetProbe must not match either.
func (b *Backend) isProbeLocked(r *http.Request) bool {
	return b.probePath != "" && r.URL.Path == b.probePath
}

// Probes returns the requests for the path of SetProbe in order of arrival, of
// which it keeps the last 10,000. They are copies, and Seq counts probes only.
func (b *Backend) Probes() []Received {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.probes.all()
}

// ProbeCount returns how many requests for the path of SetProbe have arrived,
// including those that Probes no longer keeps.
func (b *Backend) ProbeCount() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.probes.count
}
