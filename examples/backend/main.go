// Command backend is a server to put behind a pool: it answers with its name and the
// length of the request's body, slowly if it is asked to. Its probe can be switched off
// and on.
//
//	$ go run ./examples/backend -addr 127.0.0.1:9001 -name a
//	a listens on http://127.0.0.1:9001
//
//	$ curl http://127.0.0.1:9001/                        a, 0 bytes
//	$ curl http://127.0.0.1:9001/slow?ms=5000            the same after 5 s
//	$ curl http://127.0.0.1:9001/healthz                 ok
//	$ curl -X POST http://127.0.0.1:9001/probe/off       the probe now answers 503
//	$ curl -X POST http://127.0.0.1:9001/probe/on        and 200 again
//
// Interrupt it, and it answers what is under way before it ends.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	addr := flag.String("addr", "127.0.0.1:0", "`address` to listen on; port 0 takes a free one")
	name := flag.String("name", "backend", "`name` to answer with")
	probe := flag.String("probe", "/healthz", "`path` of the probe")
	flag.Parse()
	if flag.NArg() > 0 || !strings.HasPrefix(*probe, "/") {
		fmt.Fprintf(os.Stderr, "backend: arguments %q, -probe %q: want flags only, and a path that begins with a slash\n", flag.Args(), *probe)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *addr, *name, *probe); err != nil {
		log.Fatal(err)
	}
}

// run serves until ctx has ended.
func run(ctx context.Context, addr, name, probe string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	fmt.Printf("%s listens on http://%s\n", name, l.Addr())
	server := &http.Server{Handler: handler(name, probe), ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	go func() {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		ended <- server.Shutdown(grace)
	}()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-ended
}

// handler answers with name, and with the probe's verdict at the path probe.
func handler(name, probe string) http.Handler {
	var off atomic.Bool
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch path := r.URL.Path; {
		case r.Method == http.MethodPost && (path == "/probe/off" || path == "/probe/on"):
			off.Store(path == "/probe/off")
			fmt.Fprintf(w, "%s is now %s\n", probe, path[len("/probe/"):])
		case path == probe && off.Load():
			http.Error(w, "switched off", http.StatusServiceUnavailable)
		case path == probe:
			fmt.Fprintln(w, "ok")
		default:
			n, _ := io.Copy(io.Discard, r.Body) // of a broken one, what there is
			if path == "/slow" {
				wait(r)
			}
			fmt.Fprintf(w, "%s, %d bytes\n", name, n)
		}
	})
}

// wait waits for as long as r asks, or until its client has left.
func wait(r *http.Request) {
	ms, err := strconv.Atoi(r.URL.Query().Get("ms"))
	if err != nil {
		return
	}
	timer := time.NewTimer(time.Duration(ms) * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
	}
}
