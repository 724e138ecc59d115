package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/lb/lbtest"
)

// patience bounds every wait of these tests. It is long, because it only matters
// when something is wrong.
const patience = 30 * time.Second

// eventually waits until ok returns true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v in vain: %s", patience, what)
		}
	}
}

// transcript is what a gateway has written.
type transcript struct {
	mu   sync.Mutex // guards the following
	text bytes.Buffer
}

func (w *transcript) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

func (w *transcript) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// client is how tests ask a gateway, wherever that runs.
type client struct {
	http           *http.Client
	traffic, admin string // URLs
}

// newClient returns a client of the gateway that says in stdout where it is.
func newClient(t *testing.T, stdout string) *client {
	t.Helper()
	found := regexp.MustCompile(`(?m)^traffic on (\S+)\nadmin on (\S+): `).FindStringSubmatch(stdout)
	if found == nil {
		t.Fatalf("the gateway said %q, want where it is", stdout)
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 16}
	t.Cleanup(transport.CloseIdleConnections)
	return &client{&http.Client{Transport: transport, Timeout: patience}, found[1], found[2]}
}

// answer is a whole answer.
type answer struct {
	status int
	header http.Header
	body   string
}

func (c *client) do(method, url, body string) (answer, error) {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	return c.send(req)
}

func (c *client) send(req *http.Request) (answer, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(text)}, err
}

func (c *client) get(t *testing.T, url string) answer {
	t.Helper()
	a, err := c.do(http.MethodGet, url, "")
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (c *client) stats(t *testing.T) (s stats) {
	t.Helper()
	if err := json.Unmarshal([]byte(c.get(t, c.admin+"/stats").body), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// waitUsable waits until n backends get requests and all have been probed.
func (c *client) waitUsable(t *testing.T, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d backends are usable", n), func() bool {
		s := c.stats(t)
		unknown := func(b backendStats) bool { return b.Probe == nil }
		return s.HealthyBackends == n && !slices.ContainsFunc(s.Backends, unknown)
	})
}

// running is a gateway that this process runs.
type running struct {
	*client
	stdout, stderr transcript
	stop           context.CancelFunc
	ended          chan struct{}
	code           int // once it has ended
}

// start runs a gateway with args on free ports until the end of the test.
func start(t *testing.T, args ...string) *running {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	g := &running{stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(g.ended)
		args := append([]string{"-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0"}, args...)
		g.code = run(ctx, args, &g.stdout, &g.stderr)
	}()
	t.Cleanup(func() {
		stop()
		<-g.ended
		if t.Failed() {
			t.Logf("%q wrote\n%s\nand\n%s", args, &g.stdout, &g.stderr)
		}
	})
	eventually(t, "the gateway says where it is", func() bool {
		return strings.Contains(g.stdout.String(), "admin on ") || g.hasEnded()
	})
	g.client = newClient(t, g.stdout.String())
	return g
}

func (g *running) hasEnded() bool {
	select {
	case <-g.ended:
		return true
	default:
		return false
	}
}

// newBackend starts a backend whose probe passes.
func newBackend(t *testing.T, name string) *lbtest.Backend {
	t.Helper()
	b := lbtest.NewBackend(t, name)
	b.SetProbe("/healthz", lbtest.AnswerStatus(http.StatusOK, "ok"))
	return b
}

func backendsFlag(backends ...*lbtest.Backend) string {
	var urls []string
	for _, b := range backends {
		urls = append(urls, b.URL())
	}
	return "-backends=" + strings.Join(urls, ",")
}

// TestRunLeavesNoGoroutines is not parallel: it counts those of the process.
func TestRunLeavesNoGoroutines(t *testing.T) {
	before := runtime.NumGoroutine()
	g := start(t)
	g.waitUsable(t, 3)
	g.get(t, g.traffic)
	g.stop()
	<-g.ended
	if g.code != exitOK {
		t.Errorf("exit code %d, want %d", g.code, exitOK)
	}
	g.http.CloseIdleConnections()
	eventually(t, "as many goroutines as before", func() bool { return runtime.NumGoroutine() <= before })
}

func TestHelpShowsAllFlags(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"-h", "--help"} {
		var stdout, stderr transcript
		if code := run(t.Context(), []string{"-algo", "no matter", name}, &stdout, &stderr); code != exitOK || stderr.String() != "" {
			t.Errorf("%s: exit code %d and %q on stderr, want %d and nothing", name, code, &stderr, exitOK)
		}
		c, _ := parseFlags(nil)
		c.flags.VisitAll(func(f *flag.Flag) {
			if !strings.Contains(stdout.String(), "\n  -"+f.Name+" ") {
				t.Errorf("%s does not show -%s", name, f.Name)
			}
		})
	}
}

func TestBadFlagsEndWithExitCodeTwo(t *testing.T) {
	t.Parallel()
	var stdout, stderr transcript
	code := run(t.Context(), []string{"-algo", "fastest", "-max-attempts", "0"}, &stdout, &stderr)
	want := `gateway: -algo is "fastest": want round-robin, least-connections or ip-hash
gateway: -max-attempts is "0": want a number, 1 or more
gateway: -h explains the flags
`
	if code != exitUsage || stdout.String() != "" || stderr.String() != want {
		t.Errorf("exit code %d, stdout %q, stderr\n%swant %d, nothing and\n%s", code, &stdout, &stderr, exitUsage, want)
	}
}

func TestPortsInUseEndWithExitCodeOne(t *testing.T) {
	t.Parallel()
	var taken []string
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		taken = append(taken, l.Addr().String())
	}
	var stdout, stderr transcript
	code := run(t.Context(), []string{"-addr", taken[0], "-admin-addr", taken[1], "-backends", "http://127.0.0.1:1"}, &stdout, &stderr)
	if code != exitFailed || stdout.String() != "" {
		t.Errorf("exit code %d, stdout %q, want %d and nothing", code, &stdout, exitFailed)
	}
	for i, name := range []string{"-addr", "-admin-addr"} {
		want := fmt.Sprintf("gateway: cannot listen on %s %s: ", name, taken[i])
		if runtime.GOOS != "windows" { // which says it in other words
			want += "address already in use\n"
		}
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("stderr is %q, want %q in it", &stderr, want)
		}
	}
}

func TestFirstFailureTakesABackendOutUntilAProbePasses(t *testing.T) {
	t.Parallel()
	a, b := newBackend(t, "a"), newBackend(t, "b")
	g := start(t, backendsFlag(a, b), "-health-interval", "200ms")
	g.waitUsable(t, 2)
	a.SetProbe("/healthz", lbtest.AnswerStatus(http.StatusServiceUnavailable, ""))
	a.Set(lbtest.Refuse())
	for range 2 {
		if got := g.get(t, g.traffic); got.status != http.StatusOK {
			t.Errorf("a request was answered with %d while b works, want 200", got.status)
		}
	}
	a.SetProbe("/healthz", lbtest.AnswerStatus(http.StatusOK, ""))
	a.Set(lbtest.Answer())
	g.waitUsable(t, 2)
	s := g.stats(t).Backends[0]
	if s.Failures != 1 || !strings.HasPrefix(s.Reason, "probe") {
		t.Errorf("a has %d failures and is back because %q, want 1 and a probe", s.Failures, s.Reason)
	}
	if got := transitionsIn(t, g.stderr.String())[a.URL()]; !slices.Contains(got, "healthy>ejected") {
		t.Errorf("the log has a's transitions %q, want its ejection among them", got)
	}
	if log := g.stderr.String(); strings.Contains(log, " until=") {
		t.Errorf("the ejection has an end of its own, want that only a probe ends it:\n%s", log)
	}
}

func TestWithoutBackendsLeftTheAnswerIs503AtOnce(t *testing.T) {
	t.Parallel()
	backends := []*lbtest.Backend{newBackend(t, "a"), newBackend(t, "b")}
	for _, b := range backends {
		b.SetProbe("/healthz", lbtest.AnswerStatus(http.StatusInternalServerError, ""))
	}
	g := start(t, backendsFlag(backends...))
	g.waitUsable(t, 0)
	got := g.get(t, g.traffic)
	if got.status != http.StatusServiceUnavailable || got.header.Get("Retry-After") == "" {
		t.Errorf("answered %d, Retry-After %q, want 503 and when to come back", got.status, got.header.Get("Retry-After"))
	}
	for _, b := range backends {
		if strings.Contains(got.body, b.Addr()) {
			t.Errorf("the answer names a backend: %q", got.body)
		}
		if n := b.Count(); n != 0 {
			t.Errorf("backend %s got %d requests although its probe fails, want none", b.Name(), n)
		}
	}
	if got := g.get(t, g.admin+"/readyz"); got.status != http.StatusServiceUnavailable {
		t.Errorf("readyz = %d, want 503", got.status)
	}
	if got := g.get(t, g.admin+"/healthz"); got.status != http.StatusOK {
		t.Errorf("healthz = %d, want 200: the gateway itself lives", got.status)
	}
}

func TestEmptyHealthPathChecksConnections(t *testing.T) {
	t.Parallel()
	a, b := lbtest.NewBackend(t, "a"), lbtest.NewBackend(t, "b")
	a.Set(lbtest.AnswerStatus(http.StatusInternalServerError, ""))
	g := start(t, backendsFlag(a, b), "-health-path", "", "-health-interval", "200ms")
	g.waitUsable(t, 2)
	a.Set(lbtest.Refuse())
	g.waitUsable(t, 1)
	if s := g.stats(t).Backends[0]; s.State != "unhealthy" || s.Requests != 0 {
		t.Errorf("a refuses connections and is %s after %d requests, want unhealthy after none", s.State, s.Requests)
	}
	a.Set(lbtest.Answer())
	g.waitUsable(t, 2)
	if a.Count() != 0 || b.Count() != 0 {
		t.Errorf("%d and %d requests arrived, want connections only", a.Count(), b.Count())
	}
}

// TestBodyUpToTheCapIsSentAgain uses the default cap, 1 MiB.
func TestBodyUpToTheCapIsSentAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		bytes    int
		failures int // of two requests, one of which comes to the broken backend first
	}{
		{"a body of the cap's size is sent to the next backend", 1 << 20, 0},
		{"of a longer one not enough is left", 1<<20 + 1, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			broken, whole := newBackend(t, "broken"), newBackend(t, "whole")
			broken.Set(lbtest.Reset()) // having read all of it
			g := start(t, backendsFlag(broken, whole), "-health-interval", "1h")
			g.waitUsable(t, 2)
			body, failures := strings.Repeat("x", c.bytes), 0
			for range 2 {
				got, err := g.do(http.MethodPut, g.traffic, body)
				switch {
				case err != nil:
					t.Error(err)
				case got.status == http.StatusBadGateway:
					failures++
				case got.status != http.StatusOK:
					t.Errorf("answered %d, want 200 or 502", got.status)
				}
			}
			if failures != c.failures || broken.Count() != 1 {
				t.Errorf("%d of 2 requests failed, %d came to the broken backend, want %d and 1", failures, broken.Count(), c.failures)
			}
			for _, r := range whole.Received() {
				if r.BodyBytes != int64(c.bytes) {
					t.Errorf("a body arrived with %d bytes, want %d", r.BodyBytes, c.bytes)
				}
			}
		})
	}
}

func TestMaxAttemptsOfOneSendsNothingAgain(t *testing.T) {
	t.Parallel()
	broken, whole := newBackend(t, "broken"), newBackend(t, "whole")
	broken.Set(lbtest.Reset())
	g := start(t, backendsFlag(broken, whole), "-health-interval", "1h", "-max-attempts", "1")
	g.waitUsable(t, 2)
	got := []int{g.get(t, g.traffic).status, g.get(t, g.traffic).status}
	slices.Sort(got)
	if want := []int{http.StatusOK, http.StatusBadGateway}; !slices.Equal(got, want) {
		t.Errorf("2 requests, one of them to the broken backend, were answered with %d, want %d", got, want)
	}
}

func TestResponseHeaderTimeoutIsThatOfTheFlag(t *testing.T) {
	t.Parallel()
	b := newBackend(t, "b")
	b.Set(lbtest.Hang())
	g := start(t, backendsFlag(b), "-response-header-timeout", "50ms", "-max-attempts", "1")
	g.waitUsable(t, 1)
	if got := g.get(t, g.traffic).status; got != http.StatusGatewayTimeout {
		t.Errorf("a backend that hangs is answered for with %d, want 504", got)
	}
}

func TestForwardedForOfClientsIsNotTrusted(t *testing.T) {
	t.Parallel()
	b := newBackend(t, "b")
	g := start(t, backendsFlag(b))
	req, err := http.NewRequest(http.MethodGet, g.traffic, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Forwarded-For", "203.0.113.7")
	if got, err := g.send(req); err != nil || got.status != http.StatusOK {
		t.Fatalf("answered %d, %v, want 200", got.status, err)
	}
	if got := b.Received()[0].Header["X-Forwarded-For"]; !slices.Equal(got, []string{"127.0.0.1"}) {
		t.Errorf("the backend got X-Forwarded-For %q, want what is known of the client alone", got)
	}
}

func TestAlgoChoosesTheStrategy(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		algo string
		busy int // backends that get 2 requests at once
		want int // backends that get the next 6, one after the other
	}{
		{"round-robin", 2, 3},
		{"least-connections", 2, 1}, // the one that is idle
		{"ip-hash", 1, 1},
	} {
		t.Run(c.algo, func(t *testing.T) {
			t.Parallel()
			g := start(t, "-algo", c.algo)
			g.waitUsable(t, 3)
			held := []*upload{startUpload(t, g.client, 1), startUpload(t, g.client, 2)}
			busy := 0
			for _, b := range g.stats(t).Backends {
				if b.InFlight > 0 {
					busy++
				}
			}
			if busy != c.busy {
				t.Errorf("%s gave 2 requests at once to %d backends, want %d", c.algo, busy, c.busy)
			}
			answered := make(map[string]bool)
			for range 6 {
				answered[g.get(t, g.traffic).body] = true
				eventually(t, "the request is over", func() bool { return g.stats(t).InFlight == 2 })
			}
			if s := g.stats(t); s.Algorithm != c.algo || len(answered) != c.want {
				t.Errorf("%s gave 6 requests to %d backends, want %s and %d", s.Algorithm, len(answered), c.algo, c.want)
			}
			for _, u := range held {
				u.body.Close()
				<-u.answer
			}
		})
	}
}
