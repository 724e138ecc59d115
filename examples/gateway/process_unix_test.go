//go:build unix

package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// roleVariable makes of this test's program one of the processes of a test.
const roleVariable = "GATEWAY_TEST_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	go func() { // a process whose test has ended ends too
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(exitFailed)
	}()
	switch role {
	case "gateway":
		main()
	case "backend":
		backendMain(os.Args[1], os.Args[2])
	}
}

// backendMain serves as the demonstration's backends do, until it is killed.
func backendMain(name, addr string) {
	b, err := newDemoBackend(name, addr, "/healthz")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exitFailed)
	}
	fmt.Println(b.url)
	<-b.ended
}

// process is a child of the test. It is killed when the test ends.
type process struct {
	cmd            *exec.Cmd
	stdout, stderr transcript
	ended          chan struct{}
}

func startProcess(t *testing.T, role string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0], args...), ended: make(chan struct{})}
	// The race detector makes a process wait for a second at its end, for no use here.
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role, "GORACE=atexit_sleep_ms=0")
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait() // the exit code is in ProcessState
	}()
	t.Cleanup(func() {
		stdin.Close()
		p.kill()
		if t.Failed() {
			t.Logf("%s %q wrote\n%s", role, args, &p.stderr)
		}
	})
	return p
}

// kill ends p as a crash would: SIGKILL, which leaves it no time for anything.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails if it has ended
	<-p.ended
}

func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

func startGateway(t *testing.T, args ...string) (*process, *client) {
	t.Helper()
	p := startProcess(t, "gateway", append([]string{"-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0"}, args...)...)
	eventually(t, "the gateway says where it is", func() bool {
		return strings.Contains(p.stdout.String(), "admin on ") || p.hasEnded()
	})
	return p, newClient(t, p.stdout.String())
}

// aBackend is a backend process, which can be started again on its port.
type aBackend struct {
	*process
	name, url string
}

// startBackend starts a backend process on addr. A port may be taken for a moment by
// something else on this machine: then it tries again.
func startBackend(t *testing.T, name, addr string) *aBackend {
	t.Helper()
	b := &aBackend{name: name}
	eventually(t, "backend "+name+" listens on "+addr, func() bool {
		b.process = startProcess(t, "backend", name, addr)
		eventually(t, "backend "+name+" says where it is", func() bool {
			return strings.Contains(b.stdout.String(), "\n") || b.hasEnded()
		})
		b.url = strings.TrimSpace(b.stdout.String())
		return b.url != ""
	})
	return b
}

// restart starts b again, until the end of t, which is that of the whole story.
func (b *aBackend) restart(t *testing.T) {
	t.Helper()
	b.process = startBackend(t, b.name, strings.TrimPrefix(b.url, "http://")).process
}

// story is a gateway process in front of three backend processes.
type story struct {
	*client
	whole    *testing.T // of which the steps are parts
	gateway  *process
	backends []*aBackend
}

// TestStoryOfProcesses is what the gateway is for, told with real processes and real
// signals. Its steps build on one another.
func TestStoryOfProcesses(t *testing.T) {
	t.Parallel()
	s := &story{whole: t}
	var urls []string
	for _, name := range []string{"a", "b", "c"} {
		b := startBackend(t, name, "127.0.0.1:0")
		s.backends, urls = append(s.backends, b), append(urls, b.url)
	}
	s.gateway, s.client = startGateway(t, "-backends", strings.Join(urls, ","), "-health-interval", "250ms")
	s.waitUsable(t, 3)
	for _, step := range []struct {
		name string
		tell func(*testing.T)
	}{
		{"the backends take turns", s.rotation},
		{"a lives on but fails its probe, leaves, and returns", s.probeSwitched},
		{"b is killed and costs no GET, and returns on its port", s.killed},
		{"all are killed, and then return", s.allKilled},
		{"an upload that is under way at SIGTERM is answered", s.terminated},
		{"the log has each transition once", s.logged},
	} {
		if !t.Run(step.name, step.tell) {
			return
		}
	}
}

func (s *story) rotation(t *testing.T) {
	var answers map[string]int
	// If the machine stalls, a probe may be late and a backend out for a moment.
	eventually(t, "9 requests while no backend comes or goes", func() bool {
		before := s.since(t)
		answers = make(map[string]int)
		for range 9 {
			answers[s.get(t, s.traffic).body]++
		}
		return slices.Equal(s.since(t), before)
	})
	for _, b := range s.backends {
		if n := answers[b.name+", 0 bytes\n"]; n != 3 {
			t.Errorf("%s answered %d of 9 requests, want 3: %v", b.name, n, answers)
		}
	}
}

// since returns when the state of each backend began.
func (s *story) since(t *testing.T) (times []time.Time) {
	for _, b := range s.stats(t).Backends {
		times = append(times, b.Since)
	}
	return times
}

// waitState waits until the backend with index i is in that state, and returns it.
func (s *story) waitState(t *testing.T, i int, state string) (b backendStats) {
	t.Helper()
	eventually(t, "backend "+s.backends[i].name+" is "+state, func() bool {
		b = s.stats(t).Backends[i]
		return b.State == state
	})
	return b
}

// load sends GETs until it is stopped.
type load struct {
	c            *client
	sent, failed atomic.Int64
	last         atomic.Pointer[string] // what the last failure was
	ending       atomic.Bool
	workers      sync.WaitGroup
}

// startLoad sends GETs for each of paths, one after the other for each.
func startLoad(c *client, paths ...string) *load {
	l := &load{c: c}
	for _, path := range paths {
		l.workers.Go(func() {
			for !l.ending.Load() {
				l.send(path)
			}
		})
	}
	return l
}

func (l *load) send(path string) {
	a, err := l.c.do(http.MethodGet, l.c.traffic+path, "")
	if err == nil && a.status == http.StatusOK && strings.HasSuffix(a.body, ", 0 bytes\n") {
		l.sent.Add(1)
		return
	}
	text := fmt.Sprintf("%d %q, %v", a.status, a.body, err)
	l.last.Store(&text)
	l.failed.Add(1)
}

// more waits until n more requests were answered.
func (l *load) more(t *testing.T, n int64) {
	t.Helper()
	want := l.sent.Load() + n
	eventually(t, "requests go on", func() bool { return l.sent.Load() >= want || l.failed.Load() > 0 })
}

// end stops the load and reports what failed.
func (l *load) end(t *testing.T) {
	t.Helper()
	l.ending.Store(true)
	l.workers.Wait()
	if n := l.failed.Load(); n > 0 {
		t.Errorf("%d GETs failed and %d were answered, want none to fail; the last: %s", n, l.sent.Load(), *l.last.Load())
	}
}

func (s *story) probeSwitched(t *testing.T) {
	a := s.backends[0]
	l := startLoad(s.client, "/", "/")
	defer l.end(t)
	if _, err := s.do(http.MethodPost, a.url+"/probe/off", ""); err != nil {
		t.Fatal(err)
	}
	if b := s.waitState(t, 0, "unhealthy"); b.Failures != 0 || b.Reason == "" {
		t.Errorf("a is out because %q after %d failures, want none, and a reason", b.Reason, b.Failures)
	}
	// What was given to it before has ended once nothing is in flight there.
	eventually(t, "a is idle", func() bool { return s.stats(t).Backends[0].InFlight == 0 })
	before := s.stats(t).Backends[0].Requests
	l.more(t, 20)
	if after := s.stats(t).Backends[0].Requests; after != before {
		t.Errorf("a got %d requests while it was out", after-before)
	}
	if got := s.get(t, a.url).body; got != "a, 0 bytes\n" {
		t.Errorf("a itself answers %q, want it to live on", got)
	}
	if _, err := s.do(http.MethodPost, a.url+"/probe/on", ""); err != nil {
		t.Fatal(err)
	}
	s.waitUsable(t, 3)
	eventually(t, "a gets requests again", func() bool { return s.stats(t).Backends[0].Requests > before })
}

func (s *story) killed(t *testing.T) {
	b := s.backends[1]
	// The slow ones see to it that something is on b when it is killed.
	l := startLoad(s.client, "/", "/", "/slow?ms=100", "/slow?ms=100", "/slow?ms=100")
	defer l.end(t)
	l.more(t, 20)
	eventually(t, "requests are on b", func() bool { return s.stats(t).Backends[1].InFlight > 0 })
	b.kill()
	s.waitState(t, 1, "unhealthy")
	l.more(t, 20)
	b.restart(s.whole)
	s.waitUsable(t, 3)
	before := s.stats(t).Backends[1].Requests
	eventually(t, "b gets requests again", func() bool { return s.stats(t).Backends[1].Requests > before })
}

func (s *story) allKilled(t *testing.T) {
	for _, b := range s.backends {
		b.kill()
	}
	s.waitUsable(t, 0)
	got := s.get(t, s.traffic)
	if n, err := strconv.Atoi(got.header.Get("Retry-After")); got.status != http.StatusServiceUnavailable || err != nil || n < 1 {
		t.Errorf("answered %d, Retry-After %q, want 503 and seconds", got.status, got.header.Get("Retry-After"))
	}
	for _, b := range s.backends {
		b.restart(s.whole)
	}
	s.waitUsable(t, 3)
	s.rotation(t)
}

func (s *story) terminated(t *testing.T) {
	u := startUpload(t, s.client, 1)
	if err := s.gateway.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	waitClosed(t, s.client)
	if got := s.get(t, s.admin+"/readyz"); got.status != http.StatusServiceUnavailable {
		t.Errorf("readyz = %d %q, want 503", got.status, got.body)
	}
	u.write(t, "world")
	u.body.Close()
	if got := <-u.answer; got.status != http.StatusOK || !strings.HasSuffix(got.body, ", 11 bytes\n") {
		t.Errorf("the upload was answered with %d %q, want 200 and 11 bytes", got.status, got.body)
	}
	<-s.gateway.ended
	if code := s.gateway.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Errorf("exit code %d, want %d", code, exitOK)
	}
}

// logged compares the whole log with the story. A stall of the machine may add
// transitions, which are recognised by their cause, a probe that took too long. They
// are marked with an asterisk and allowed anywhere.
func (s *story) logged(t *testing.T) {
	const (
		begin = `(unknown>healthy |unknown>unhealthy\* unhealthy>healthy )`
		stall = `(healthy>unhealthy\* unhealthy>healthy )*`
		out   = stall + `healthy>unhealthy\*? `
		kill  = stall + `(healthy>ejected ejected>unhealthy\*? |healthy>unhealthy\* )`
		in    = `unhealthy>healthy ` + stall
	)
	log := s.gateway.stderr.String()
	got := transitionsIn(t, log)
	want := []string{
		begin + out + in + out + in,  // probe off and on, all killed
		begin + kill + in + out + in, // killed, all killed
		begin + out + in,             // all killed
	}
	for i, b := range s.backends {
		seq := strings.Join(got[b.url], " ") + " "
		if !regexp.MustCompile("^" + want[i] + "$").MatchString(seq) {
			t.Errorf("%s went %s, want %s", b.name, seq, want[i])
		}
		delete(got, b.url)
	}
	if len(got) > 0 {
		t.Errorf("the log has transitions of others: %q", got)
	}
	down, up := strings.Count(log, "no backend is usable"), strings.Count(log, "backends are usable again")
	if stalled := strings.Contains(log, slowProbe); down != up || down < 1 || down > 1 && !stalled {
		t.Errorf("the log has %d times that no backend is usable and %d times that some are, want once each", down, up)
	}
}

func TestSecondSignalEndsTheGatewayAtOnce(t *testing.T) {
	t.Parallel()
	p, c := startGateway(t, "-shutdown-timeout", "1h")
	c.waitUsable(t, 3)
	u := startUpload(t, c, 1)
	defer u.body.Close()
	terminate := func() { _ = p.cmd.Process.Signal(syscall.SIGTERM) } // fails if it has ended
	terminate()
	waitClosed(t, c)
	eventually(t, "the gateway ends in spite of the upload", func() bool {
		terminate() // again and again: that the first one was taken in cannot be seen
		return p.hasEnded()
	})
	if code := p.cmd.ProcessState.ExitCode(); code != -1 {
		t.Errorf("exit code %d, want -1: ended by the signal", code)
	}
}

// TestInterruptEndsTheGateway sends the other signal than the story.
func TestInterruptEndsTheGateway(t *testing.T) {
	t.Parallel()
	p, c := startGateway(t)
	c.waitUsable(t, 3)
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	<-p.ended
	if code := p.cmd.ProcessState.ExitCode(); code != exitOK {
		t.Errorf("exit code %d, want %d", code, exitOK)
	}
	if log := p.stderr.String(); !regexp.MustCompile(`msg="shutting down" cause="interrupt`).MatchString(log) {
		t.Errorf("the log does not say that it was interrupted:\n%s", log)
	}
}
