package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"example.com/lb"
)

// probePath is where servers tell whether they are well.
const probePath = "/healthz"

// server is an HTTP server that answers with its name and what it was sent. It
// can be killed and started again on the same address.
type server struct {
	name  string
	addr  string
	delay atomic.Int64 // a time.Duration
	ill   atomic.Bool  // fails its probe
	http  *http.Server
}

func startServer(name string) (*server, error) {
	s := &server{name: name}
	s.delay.Store(int64(serveTime))
	return s, s.listen("127.0.0.1:0")
}

// listen starts serving at addr.
func (s *server) listen(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	s.addr = l.Addr().String()
	s.http = &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second}
	go serveOn(s.http, l)
	return nil
}

// kill closes the listener and every connection, whatever is on them.
func (s *server) kill() { s.http.Close() }

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == probePath {
		if s.ill.Load() {
			http.Error(w, "not well", http.StatusServiceUnavailable)
		}
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	time.Sleep(time.Duration(s.delay.Load()))
	fmt.Fprintf(w, "%s %s", s.name, body)
}

func serveOn(s *http.Server, l net.Listener) {
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		log.Print(err)
	}
}

// front is a pool behind a listener.
type front struct {
	*lb.Pool
	url  string
	http *http.Server
}

func serve(pool *lb.Pool) (*front, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		pool.Close()
		return nil, err
	}
	f := &front{Pool: pool, url: "http://" + l.Addr().String()}
	f.http = &http.Server{Handler: pool, ReadHeaderTimeout: 10 * time.Second}
	go serveOn(f.http, l)
	return f, nil
}

func (f *front) close() {
	f.http.Close()
	f.Pool.Close()
}

// demo is the client, its counters and the screen. Its methods may be called
// concurrently, but for begin, reset and table.
type demo struct {
	servers      []*server
	client       *http.Client
	sent, failed atomic.Int64
	answers      [3]atomic.Int64 // of a, b and c, since reset

	start  time.Time
	out    io.Writer
	colour bool
	mu     sync.Mutex // guards out

	before lb.Stats // of the pool when the part began
}

func newDemo(out *os.File) *demo {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &demo{
		client: &http.Client{
			Timeout:   10 * time.Second,
			Transport: &http.Transport{MaxIdleConnsPerHost: workers},
		},
		start:  time.Now(),
		out:    out,
		colour: terminal && os.Getenv("NO_COLOR") == "",
	}
}

// send sends one request and returns the name of the server that answered. An
// answer that is not exactly what that server should say is a failure.
func (d *demo) send(url, method, body string) (name string) {
	n := d.sent.Add(1)
	text, err := d.exchange(url, method, body, n)
	name, echo, _ := strings.Cut(text, " ")
	i := strings.Index("abc", name)
	if err == nil && (len(name) != 1 || i < 0 || echo != body) {
		err = fmt.Errorf("unexpected answer %q", text)
	}
	if err != nil {
		d.failed.Add(1)
		d.event("?", fmt.Sprintf("%s failed: %v", method, err))
		return "?"
	}
	d.answers[i].Add(1)
	return name
}

func (d *demo) exchange(url, method, body string, n int64) (string, error) {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	if method == http.MethodPost {
		req.Header.Set("Idempotency-Key", fmt.Sprintf("quickstart-%d", n))
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return string(text), err
}

// sendAny sends a GET or a POST in turn.
func (d *demo) sendAny(url string, i int) {
	if i%2 == 0 {
		d.send(url, http.MethodGet, "")
		return
	}
	d.send(url, http.MethodPost, fmt.Sprintf("job %d", i))
}

// traffic makes the workers send until stop is called, which waits for what is
// under way and may be called twice.
func (d *demo) traffic(url string) (stop func()) {
	var ending atomic.Bool
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for i := 0; !ending.Load(); i++ {
				d.sendAny(url, i)
			}
		})
	}
	return func() {
		ending.Store(true)
		wg.Wait()
	}
}

// burst makes the workers send n requests.
func (d *demo) burst(url string, n int64) {
	var taken atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for i := taken.Add(1); i <= n; i = taken.Add(1) {
				d.sendAny(url, int(i))
			}
		})
	}
	wg.Wait()
}

func (d *demo) reset() {
	for i := range d.answers {
		d.answers[i].Store(0)
	}
}

// answered is how many requests the server of that name has answered.
func (d *demo) answered(name string) int64 {
	return d.answers[strings.Index("abc", name)].Load()
}

func (d *demo) printf(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintf(d.out, format, args...)
}

// begin starts a part of the demonstration.
func (d *demo) begin(f *front, format string, args ...any) {
	d.reset()
	if f != nil {
		d.before = f.Stats()
	}
	d.printf("%s\n", d.paint("1", fmt.Sprintf(format, args...)))
}

// event prints one line of the timeline.
func (d *demo) event(name, text string) {
	d.printf("   %5.2f s  %s  %s\n", time.Since(d.start).Seconds(), name, text)
}

// table shows what came of the part that began last.
func (d *demo) table(f *front) {
	stats := f.Stats()
	d.printf("   %-9s %9s %9s  %s\n", "backend", "answered", "failures", "state")
	for i, b := range stats.Backends {
		failures := b.Failures - d.before.Backends[i].Failures
		d.printf("   %-9s %9d %9d  %s\n", b.Name, d.answered(b.Name), failures, d.paintState(b.State))
	}
	d.printf("   tried again elsewhere: %d; failed: %d\n\n", stats.Retries-d.before.Retries, d.failed.Load())
}

func (d *demo) paint(code, text string) string {
	if !d.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (d *demo) paintState(state string) string {
	switch state {
	case "unknown", "healthy":
		return d.paint("32", state) // green: usable
	case "trial":
		return d.paint("33", state) // yellow
	}
	return d.paint("31", state) // red
}

// logger returns a logger that shows changes of state in the timeline.
func (d *demo) logger() *slog.Logger { return slog.New(timeline{slog.DiscardHandler, d}) }

type timeline struct {
	slog.Handler
	d *demo
}

func (timeline) Enabled(context.Context, slog.Level) bool { return true }

func (t timeline) Handle(_ context.Context, r slog.Record) error {
	attrs := make(map[string]string)
	r.Attrs(func(a slog.Attr) bool {
		attrs[a.Key] = a.Value.String()
		return true
	})
	if from, to := attrs["from"], attrs["to"]; to != "" {
		t.d.event(attrs["backend"], fmt.Sprintf("%s -> %s: %s", t.d.paintState(from), t.d.paintState(to), attrs["reason"]))
	}
	return nil
}
