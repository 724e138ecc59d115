package integration

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is how long a test waits for what should take a moment.
const patience = 30 * time.Second

// process is a program under test. It is killed when the test ends.
type process struct {
	cmd    *exec.Cmd
	output *output
	ended  chan struct{}
}

// start runs a program. What it writes is kept and shown if the test fails.
func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(name, args...), output: &output{}, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.output, p.output
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("this test needs %s: %v", name, err)
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait() // most of them are killed
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s wrote:\n%s", filepath.Base(name), p.output)
		}
	})
	return p
}

// kill ends the program at once.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails if it has ended
	<-p.ended
}

// stop asks the program to end and returns its exit code.
func (p *process) stop(t *testing.T) int {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Fatalf("%s does not end", p.cmd.Path)
	}
	return p.cmd.ProcessState.ExitCode()
}

// line waits for a line that begins with prefix and returns the rest of it.
func (p *process) line(t *testing.T, prefix string) (rest string) {
	t.Helper()
	wait(t, fmt.Sprintf("a line %q of %s", prefix, p.cmd.Path), func() bool {
		lines := bufio.NewScanner(strings.NewReader(p.output.String()))
		for lines.Scan() {
			var found bool
			if rest, found = strings.CutPrefix(lines.Text(), prefix); found {
				return true
			}
		}
		return false
	})
	return rest
}

// wait waits until what holds.
func wait(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for began := time.Now(); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > patience {
			t.Fatalf("waited %v in vain for %s", patience, what)
		}
	}
}

// waitOpen waits until somebody listens on addr.
func waitOpen(t *testing.T, addr string) {
	t.Helper()
	wait(t, "a listener on "+addr, func() bool {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
}

// freeAddr returns an address that was free a moment ago.
func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// output is what a program has written until now.
type output struct {
	mu  sync.Mutex // guards the following
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// curl runs curl to its end and returns what it wrote to standard output. It fails
// the test unless curl succeeds.
func curl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := tryCurl(t.Context(), nil, args...)
	if err != nil {
		t.Fatalf("curl %s: %v", strings.Join(args, " "), err)
	}
	return out
}

func tryCurl(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "curl", append([]string{"--silent", "--show-error", "--max-time", "20"}, args...)...)
	var out, complaint bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &complaint
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%w: %s", err, complaint.String())
	}
	return out.String(), nil
}

// gatewayPath is the built program; see TestMain.
var gatewayPath string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "gateway")
	if err != nil {
		panic(err)
	}
	gatewayPath = filepath.Join(dir, "gateway")
	build := exec.Command("go", "build", "-o", gatewayPath, "./examples/gateway")
	build.Dir = ".." // another module
	build.Stdout, build.Stderr = os.Stderr, os.Stderr
	code := 1
	if err := build.Run(); err == nil {
		code = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// startNginxWith starts nginx in the foreground, with what its http block says and all its
// files in own; it waits for addrs.
func startNginxWith(t *testing.T, own, http string, addrs ...string) *process {
	t.Helper()
	config := fmt.Sprintf(`
daemon off;
master_process off;
pid %[1]s/pid;
error_log stderr;
events {}
http {
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	%[2]s
}
`, own, http)
	file := filepath.Join(own, "nginx.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "nginx", "-c", file, "-p", own)
	for _, addr := range addrs {
		waitOpen(t, addr)
	}
	return p
}
