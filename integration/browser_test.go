//go:build unix

package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"example.com/lb"
)

// A page in Chromium as the client of a pool: testdata/browser.html runs the cases of
// browser_cases_test.go and reports what it sees. Nothing is timed: a backend sends the
// next part once the page has told it, through the pool, that it has seen the one before.

func TestBrowserWorksThroughPool(t *testing.T) {
	for _, f := range []struct {
		name, protocol string // protocol is the browser's name for it
		start          front
	}{
		{"HTTP/1.1", "http/1.1", plain},
		{"HTTP/2", "h2", func(pool http.Handler) *httptest.Server {
			s := httptest.NewUnstartedServer(pool)
			s.EnableHTTP2 = true // but WebSockets come over HTTP/1.1: net/http has no RFC 8441
			s.StartTLS()
			return s
		}},
	} {
		t.Run(f.name, func(t *testing.T) {
			r := newBrowserRig(t, browserCases(f.protocol), f.start)
			browser := startBrowser(t, r.server.URL)
			for _, x := range r.exchanges {
				if t.Run(x.name, func(t *testing.T) { x.check(t, browser) }); x.hangs {
					return // so will those that follow
				}
			}
			t.Run("nothing is left when the browser is killed", func(t *testing.T) { r.checkEnd(t, browser) })
		})
	}
}

// browserCase is something that the page does, with what it and the backends see of it.
type browserCase struct {
	name, path    string // path is the page's name for it
	serve         func(*call)
	page, backend []string
	killed        []string // what the backends see when the browser is killed, sorted
	cut, left     int64    // answers that are cut, and those whose client leaves
}

// exchange is a case under way.
type exchange struct {
	browserCase
	said   chan string // by the page
	told   chan string // to the page
	seen   seen        // by the backends
	report chan []string
	hangs  bool
}

// check waits for what the page reports.
func (x *exchange) check(t *testing.T, browser *process) {
	var page []string
	select {
	case page = <-x.report:
	case <-browser.ended:
		x.hangs = true
		t.Error("the browser has ended")
	case <-time.After(patience):
		x.hangs = true
		t.Errorf("waited %v in vain for the report", patience)
	}
	if !x.hangs {
		wantLines(t, "the page", page, x.page)
		if err := x.seen.await(len(x.backend)); err != nil {
			t.Error(err)
		}
	}
	wantLines(t, "the backends", x.seen.all(), x.backend)
}

func wantLines(t *testing.T, who string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s saw\n\t%s\nwant\n\t%s", who, strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// browserRig is a pool between the page and its backends, which do the same.
type browserRig struct {
	exchanges []*exchange
	pool      *lb.Pool
	server    *httptest.Server // in front of the pool
	live      atomic.Int64     // handlers of the backends
}

func newBrowserRig(t *testing.T, cases []browserCase, f front) *browserRig {
	t.Helper()
	r := &browserRig{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, "testdata/browser.html") })
	var paths []string
	for _, c := range cases {
		paths = append(paths, c.path)
		x := &exchange{browserCase: c, said: make(chan string), told: make(chan string), report: make(chan []string, 1)}
		r.exchanges = append(r.exchanges, x)
		x.handle(mux)
	}
	mux.HandleFunc("GET /cases", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Join(paths, " ")) })
	var urls []string
	for range 2 {
		b := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r.live.Add(1)
			defer r.live.Add(-1)
			mux.ServeHTTP(w, req)
		}))
		t.Cleanup(b.Close)
		urls = append(urls, b.URL)
	}
	pool, err := lb.New(lb.Targets(urls...),
		lb.WithPassiveHealth(lb.PassiveHealth{Failures: -1}), // they fail on purpose
		lb.WithLogger(slog.New(slog.NewTextHandler(t.Output(), nil))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	r.pool, r.server = pool, f(pool)
	t.Cleanup(r.server.Close)
	return r
}

// handle makes the paths of a case.
func (x *exchange) handle(mux *http.ServeMux) {
	at := func(method, path string, f func(*call)) {
		mux.HandleFunc(method+" /"+x.path+path, func(w http.ResponseWriter, r *http.Request) { f(&call{x, w, r}) })
	}
	at("POST", "/say", func(c *call) {
		if what, err := io.ReadAll(c.r.Body); err == nil {
			c.pass(c.said, string(what))
		}
	})
	at("POST", "/hear", func(c *call) { _, _ = io.WriteString(c.w, c.take(c.told)) }) // the page misses it
	at("POST", "/report", func(c *call) {
		var lines []string
		if err := json.NewDecoder(c.r.Body).Decode(&lines); err != nil {
			lines = []string{err.Error()}
		}
		x.report <- lines
	})
	if x.serve != nil {
		at("", "/do/{what}", x.serve)
	}
}

func (r *browserRig) checkEnd(t *testing.T, browser *process) {
	var open int64
	for _, x := range r.exchanges {
		open += int64(len(x.killed))
	}
	wait(t, "the last report to be answered", func() bool { return r.pool.Stats().InFlight == open })
	killGroup(t, browser)
	wait(t, "the handlers to end", func() bool { return r.live.Load() == 0 })
	wait(t, "nothing in flight", func() bool { return r.pool.Stats().InFlight == 0 })
	var cut, left int64
	for _, x := range r.exchanges {
		cut, left = cut+x.cut, left+x.left
		got := x.seen.all()
		if len(got) > len(x.backend) {
			slices.Sort(got[len(x.backend):])
		}
		wantLines(t, x.path+": the backends", got, slices.Concat(x.backend, x.killed))
	}
	if err := r.pool.Shutdown(t.Context()); err != nil { // all is counted when it returns
		t.Error(err)
	}
	s := r.pool.Stats()
	if s.Cut != cut || s.ClientClosed != left || s.Failures != 0 || s.Retries != 0 {
		t.Errorf("cut %d, client closed %d, failures %d, retries %d, want %d, %d, 0, 0", s.Cut, s.ClientClosed, s.Failures, s.Retries, cut, left)
	}
}

// call is a request at a backend.
type call struct {
	*exchange
	w http.ResponseWriter
	r *http.Request
}

// what is the last part of the path.
func (c *call) what() string { return c.r.PathValue("what") }

// send sends a part of the answer; it is all that there is until the page has heard of it.
func (c *call) send(part string) {
	_, err := io.WriteString(c.w, part)
	if err == nil {
		err = http.NewResponseController(c.w).Flush()
	}
	if err != nil {
		c.giveUp("%v", err)
	}
}

// heard waits until the page says that it has seen something.
func (c *call) heard(want string) {
	if got := c.take(c.said); got != want {
		c.giveUp("the page says %.40q, want %.40q", got, want)
	}
}

// tell waits until the page hears something.
func (c *call) tell(what string) { c.pass(c.told, what) }

// gone waits until the client has left.
func (c *call) gone() {
	select {
	case <-c.r.Context().Done():
		c.seen.add(c.what() + ": gone")
	case <-time.After(patience):
		c.giveUp("is not cancelled")
	}
}

// The channels have no buffer: a page that knows that something was passed may leave, and
// nobody who waits for that gives up because of it.

func (c *call) pass(to chan<- string, what string) {
	select {
	case to <- what:
	case <-c.r.Context().Done():
		c.giveUp("cancelled before %.40q was passed", what)
	case <-time.After(patience):
		c.giveUp("waited in vain to pass %.40q", what)
	}
}

func (c *call) take(from <-chan string) string {
	select {
	case what := <-from:
		return what
	case <-c.r.Context().Done():
		c.giveUp("cancelled before something came")
	case <-time.After(patience):
		c.giveUp("waited in vain for something to come")
	}
	panic("unreachable")
}

// giveUp cuts the answer.
func (c *call) giveUp(format string, args ...any) {
	c.seen.add(c.r.Method + " " + c.r.URL.Path + ": " + fmt.Sprintf(format, args...))
	panic(http.ErrAbortHandler)
}

// startBrowser opens a page.
func startBrowser(t *testing.T, page string) *process {
	t.Helper()
	const name = "chromium-headless-shell"
	cmd := exec.Command(name,
		"--no-sandbox", // root cannot have it
		"--ignore-certificate-errors",
		"--enable-logging=stderr", // which has what the page logs
		"--user-data-dir="+t.TempDir(), page)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p := &process{cmd: cmd, output: &output{}, ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.output, p.output
	if err := cmd.Start(); err != nil {
		t.Fatalf("this test needs %s: %v", name, err)
	}
	go func() {
		defer close(p.ended)
		_ = cmd.Wait() // it is killed
	}()
	t.Cleanup(func() {
		killGroup(t, p)
		if t.Failed() {
			t.Logf("%s wrote:\n%s", name, p.output)
		}
	})
	return p
}

// killGroup ends a program and its children. They are gone when it returns: each has
// the pipe to p.output.
func killGroup(t *testing.T, p *process) {
	t.Helper()
	select {
	case <-p.ended:
		return // the group may be another's by now
	default:
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // fails if they have just ended
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Errorf("processes of %s are left", p.cmd.Path)
	}
}
