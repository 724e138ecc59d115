// Command gateway is a reverse proxy to copy: it spreads requests over backends,
// probes them, has a port of its own for its operator, and ends without losing a
// request. Without -backends it starts three of its own and prints what to try:
//
//	$ go run ./examples/gateway
//	traffic on http://localhost:8080
//	admin on http://localhost:8081: /stats, /healthz, /readyz
//
//	Three backends run in this program:
//	a on http://127.0.0.1:41001
//	…
//	# who answers: with -algo round-robin each in turn
//	curl -s http://localhost:8080/ http://localhost:8080/ http://localhost:8080/
//	…
//
// With backends of one's own, each in a terminal of its own so that it can be killed
// while requests run (no GET fails, and a POST only if it was on the killed one):
//
//	$ go run ./examples/backend -addr 127.0.0.1:9001 -name a
//	$ go run ./examples/backend -addr 127.0.0.1:9002 -name b
//	$ go run ./examples/gateway -backends http://127.0.0.1:9001,http://127.0.0.1:9002
//	traffic on http://localhost:8080
//	admin on http://localhost:8081: /stats, /healthz, /readyz
//
// What happens to backends is logged to stderr, once and with its cause. Interrupt the
// gateway, and requests under way are answered before it ends; interrupt it again, and
// they are not. It exits with 0 if none was cut, 1 if something failed and 2 if its
// flags are wrong; -h explains these.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"example.com/lb"
)

// The exit codes.
const (
	exitOK = iota
	exitFailed
	exitUsage
)

// adminGrace bounds how long what is under way on the admin port may take at the end.
const adminGrace = time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from then on a signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is the program but for what is the process's own. It serves until ctx has
// ended and returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg, help := parseFlags(args)
	if help {
		cfg.usage(stdout)
		return exitOK
	}
	g := &gateway{cfg: cfg, log: slog.New(slog.NewTextHandler(stderr, nil))}
	defer g.close()
	err := g.open()
	if err == nil {
		err = g.serve(ctx, stdout)
	}
	if err == nil {
		return exitOK
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(stderr, "gateway: %s\n", strings.TrimSuffix(line, "\n"))
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		fmt.Fprintln(stderr, "gateway: -h explains the flags")
		return exitUsage
	}
	return exitFailed
}

// gateway is the running program. open makes its parts and close ends what there is
// of them.
type gateway struct {
	cfg  *config
	log  *slog.Logger
	demo []*demoBackend // without -backends
	pool *lb.Pool

	trafficListener, adminListener net.Listener
	traffic, admin                 *http.Server
}

// open makes the pool and takes the ports. Faults of the flags come first, whatever
// else is wrong.
func (g *gateway) open() (err error) {
	if g.cfg.isDemo() {
		if g.demo, err = startDemo(g.cfg.healthPath); err != nil {
			return err
		}
		g.cfg.setDemo(g.demo)
	}
	if g.pool, err = g.cfg.newPool(g.log); err != nil {
		return err
	}
	var errTraffic, errAdmin error
	g.trafficListener, errTraffic = listen("addr", g.cfg.addr)
	g.adminListener, errAdmin = listen("admin-addr", g.cfg.adminAddr)
	return errors.Join(errTraffic, errAdmin)
}

// listen takes the address that the flag of that name has.
func listen(name, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err == nil {
		return l, nil
	}
	if e, ok := errors.AsType[*os.SyscallError](err); ok {
		err = e.Err // the rest of the text says again what is being done, and where
	}
	return nil, fmt.Errorf("cannot listen on -%s %s: %w", name, addr, err)
}

// serve answers requests until ctx has ended, or a listener has failed.
func (g *gateway) serve(ctx context.Context, stdout io.Writer) error {
	errorLog := slog.NewLogLogger(g.log.Handler(), slog.LevelWarn)
	g.traffic = &http.Server{
		Handler: g.pool,
		// Who is slow with the header, or idle, holds a connection for nothing. There is
		// no ReadTimeout and no WriteTimeout: they would cut long uploads and answers that
		// stream. What backends may take is bounded by the pool.
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          errorLog,
	}
	g.traffic.RegisterOnShutdown(g.pool.CloseWebSockets)
	g.admin = &http.Server{
		Handler: adminHandler(ctx, g.pool),
		// Everything here is short.
		ReadTimeout:  10 * time.Second,
		WriteTimeout: 10 * time.Second,
		IdleTimeout:  2 * time.Minute,
		ErrorLog:     errorLog,
	}
	ended := make(chan error, 2)
	go func() { ended <- g.traffic.Serve(g.trafficListener) }()
	go func() { ended <- g.admin.Serve(g.adminListener) }()
	g.announce(stdout) // both ports are open already: what comes now is served

	var err error
	select {
	case err = <-ended:
		err = fmt.Errorf("cannot go on serving: %w", err)
		g.close()
	case <-ctx.Done():
		err = g.shutdown(ctx)
		<-ended
	}
	<-ended
	return err
}

// shutdown lets the requests under way end, for as long as -shutdown-timeout allows.
//
//	readyz says no      since ctx has ended; see adminHandler
//	traffic.Shutdown    closes the port and waits for its requests; WebSockets are asked
//	                    to leave meanwhile
//	pool.Shutdown       waits for what was upgraded, which is not the server's any more
//	admin.Shutdown      last, so that one can watch
//
// The pool comes after the server: closed first, it would refuse the requests that
// still come on connections that are open.
func (g *gateway) shutdown(ctx context.Context) error {
	limit := g.cfg.shutdownTimeout
	g.log.Info("shutting down", "cause", context.Cause(ctx), "in_flight", g.pool.Stats().InFlight, "at_most", limit)
	grace, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := g.traffic.Shutdown(grace); err != nil && grace.Err() == nil {
		g.log.Warn("closing the traffic port", "error", err)
	}
	// That its time ran out says little: it also waits, for some seconds, for connections
	// on which no request has come yet. The pool knows whether one was cut.
	cut := g.pool.Shutdown(grace)
	g.traffic.Close() // what has not ended by now

	brief, cancel := context.WithTimeout(context.Background(), adminGrace)
	defer cancel()
	if g.admin.Shutdown(brief) != nil {
		g.admin.Close()
	}
	if cut != nil {
		return fmt.Errorf("requests were cut that had not ended within -shutdown-timeout %v", limit)
	}
	g.log.Info("shut down", "requests", g.pool.Stats().Requests)
	return nil
}

// close ends at once whatever was opened. What has ended already does not mind.
func (g *gateway) close() {
	for _, l := range []net.Listener{g.trafficListener, g.adminListener} {
		if l != nil {
			l.Close()
		}
	}
	for _, s := range []*http.Server{g.traffic, g.admin} {
		if s != nil {
			s.Close()
		}
	}
	if g.pool != nil {
		g.pool.Close()
	}
	for _, b := range g.demo {
		b.close()
	}
}

// announce says where the gateway is, with the ports that were taken if those of the
// flags are 0.
func (g *gateway) announce(w io.Writer) {
	traffic, admin := urlOf(g.trafficListener), urlOf(g.adminListener)
	fmt.Fprintf(w, "traffic on %s\nadmin on %s: /stats, /healthz, /readyz\n", traffic, admin)
	if g.demo == nil {
		return
	}
	patience := g.cfg.patience()
	if g.cfg.healthPath == "" {
		patience = 0
	}
	introduce(w, g.demo, traffic, admin, patience)
}

// urlOf is where l can be reached from this machine.
func urlOf(l net.Listener) string {
	host, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return l.Addr().String()
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsUnspecified() {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, port)
}
