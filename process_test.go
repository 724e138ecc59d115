package lb_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/lb"
)

// roleVariable makes of this test's program a process of another kind, which the test
// talks to.
const roleVariable = "LB_TEST_ROLE"

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(roleVariable) {
	case "backend":
		err = backendProcess(os.Args[1], os.Args[2])
	case "pool":
		err = poolProcess(os.Args[1:])
	case "streams":
		err = streamsProcess()
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// backendProcess serves on addr. What it has executed is a line in the file: the
// request's id and the hash of its body.
func backendProcess(addr, file string) error {
	log, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return announceAndServe(addr, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		if _, err := io.Copy(h, r.Body); err != nil {
			return
		}
		fmt.Fprintf(log, "%s %x\n", r.Header.Get("Request-Id"), h.Sum(nil)) // one write, which outlives a SIGKILL
		io.WriteString(w, r.Header.Get("Request-Id"))
	}))
}

func poolProcess(targets []string) error {
	pool, err := lb.New(lb.Targets(targets...))
	if err != nil {
		return err
	}
	return announceAndServe("127.0.0.1:0", pool)
}

// announceAndServe prints the address and serves until the process is killed, or
// its parent has gone.
func announceAndServe(addr string, h http.Handler) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	return http.Serve(ln, h)
}

// process is a running child.
type process struct {
	cmd  *exec.Cmd
	addr string
	in   io.Writer
	out  *bufio.Reader
}

func startProcess(t testing.TB, role string, args ...string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	p := &process{cmd: cmd, in: stdin, out: bufio.NewReader(out)}
	p.addr = p.line(t)
	return p
}

// line is the next that the process prints.
func (p *process) line(t testing.TB) string {
	t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("%v: %v", p.cmd, err)
	}
	return strings.TrimSpace(line)
}

// exchange is one request of the load and what became of it.
type exchange struct {
	id, method string
	keyed      bool
	body       string
	begin, end time.Time
	err        error
}

// TestKilledProcessCostsOnlyWhatWasOnIt loads a process that serves a pool in
// front of three backend processes while one of them is killed and started again.
func TestKilledProcessCostsOnlyWhatWasOnIt(t *testing.T) {
	dir := t.TempDir()
	logs := make([]string, 3)
	backends := make([]*process, 3)
	urls := make([]string, 3)
	for i := range backends {
		logs[i] = filepath.Join(dir, fmt.Sprintf("backend%d", i))
		backends[i] = startProcess(t, "backend", "127.0.0.1:0", logs[i])
		urls[i] = "http://" + backends[i].addr
	}
	pool := startProcess(t, "pool", urls...)

	// The story goes by the number of requests, not by the clock.
	const workers, total, killAt, startAt = 8, 12_000, 3_000, 6_000
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: workers}}
	defer client.CloseIdleConnections()
	var next atomic.Int64
	toKill, toStart := make(chan struct{}), make(chan struct{})
	results := make([][]exchange, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for {
				n := next.Add(1)
				switch {
				case n > total:
					return
				case n == killAt:
					close(toKill)
				case n == startAt:
					close(toStart)
				}
				results[w] = append(results[w], send(client, pool.addr, int(n)))
			}
		})
	}
	<-toKill
	killed := time.Now()
	backends[1].cmd.Process.Kill()
	backends[1].cmd.Wait()
	gone := time.Now()
	<-toStart
	startProcess(t, "backend", backends[1].addr, logs[1])
	wg.Wait()
	checkExchanges(t, results, executions(t, logs), killed, gone)
}

func send(client *http.Client, addr string, n int) exchange {
	e := exchange{id: fmt.Sprint(n), method: "GET"}
	switch n % 3 {
	case 1:
		e.method, e.body = "POST", text(n%40_000)
	case 2:
		e.method, e.body, e.keyed = "POST", text(n%40_000), true
	}
	req, err := http.NewRequest(e.method, "http://"+addr, strings.NewReader(e.body))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Request-Id", e.id)
	if e.keyed {
		req.Header.Set("Idempotency-Key", e.id)
	}
	e.begin = time.Now()
	resp, err := client.Do(req)
	if err == nil {
		var b []byte
		b, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		if err == nil && (resp.StatusCode != 200 || string(b) != e.id) {
			err = fmt.Errorf("status %d, body %.40q", resp.StatusCode, b)
		}
	}
	e.end, e.err = time.Now(), err
	return e
}

// executions returns the hashes of the bodies that were executed, by request id.
func executions(t *testing.T, logs []string) map[string][]string {
	t.Helper()
	done := map[string][]string{}
	for _, name := range logs {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			id, hash, _ := strings.Cut(strings.TrimSpace(line), " ")
			done[id] = append(done[id], hash)
		}
	}
	return done
}

func checkExchanges(t *testing.T, results [][]exchange, executed map[string][]string, killed, gone time.Time) {
	t.Helper()
	kinds, failed := map[string]int{}, 0
	for _, list := range results {
		for _, e := range list {
			kinds[fmt.Sprintf("%s keyed=%t", e.method, e.keyed)]++
			hash := sha256.Sum256([]byte(e.body))
			for _, got := range executed[e.id] {
				if got != hex.EncodeToString(hash[:]) {
					t.Errorf("%s %s was executed with another body", e.method, e.id)
				}
			}
			once := e.method == "POST" && !e.keyed
			if n := len(executed[e.id]); once && n > 1 || e.err == nil && n == 0 || e.err == nil && once && n != 1 {
				t.Errorf("%s %s was executed %d times, error %v", e.method, e.id, n, e.err)
			}
			if e.err == nil {
				continue
			}
			failed++
			if onIt := e.begin.Before(gone) && e.end.After(killed); !once || !onIt {
				t.Errorf("%s %s (keyed %t) failed, %v to %v after the kill, which took %v: %v",
					e.method, e.id, e.keyed, e.begin.Sub(killed), e.end.Sub(killed), gone.Sub(killed), e.err)
			}
		}
	}
	t.Logf("%v, of which %d POSTs failed that were on the killed process", kinds, failed)
}
