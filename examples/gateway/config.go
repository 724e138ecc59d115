package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/lb"
)

const (
	// maxSize bounds -max-replay-body: beyond it a typing error is more likely.
	maxSize = 1 << 40
	// demoInterval is -health-interval for the backends of the demonstration, so that
	// one can watch.
	demoInterval = 500 * time.Millisecond
)

// config is what the flags say. parseFlags makes one.
type config struct {
	addr, adminAddr string
	targets         []lb.Target // nil: the demonstration
	strategy        lb.Balancer
	healthPath      string
	healthInterval  time.Duration
	healthTimeout   time.Duration // 0: the pool's default
	maxAttempts     int
	maxReplayBody   int64
	dialTimeout     time.Duration
	responseHeader  time.Duration
	shutdownTimeout time.Duration

	flags  *flag.FlagSet
	faults []error         // what is wrong with the flags, all of it
	unread map[string]bool // flags whose value could not be read
}

// usageError is everything that is wrong with the flags.
type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }

// parseFlags reads args. It does not stop at what is wrong: newPool reports that,
// together with what the pool has to say. help tells that args ask for it.
func parseFlags(args []string) (c *config, help bool) {
	c = &config{flags: flag.NewFlagSet("gateway", flag.ContinueOnError), unread: make(map[string]bool)}
	c.flags.SetOutput(io.Discard) // we report ourselves
	c.define()
	for len(args) > 0 {
		err := c.flags.Parse(args)
		left := c.flags.Args()
		switch {
		case errors.Is(err, flag.ErrHelp):
			return c, true
		case err != nil: // a flag that does not exist, or has no value
			c.fault(err)
			if len(left) == len(args) {
				left = left[1:] // bad syntax, which Parse does not step over
			}
		case len(left) > 0:
			c.fault(fmt.Errorf("argument %q: want flags only; -backends is one list, with commas and without spaces", left[0]))
			left = left[1:]
		}
		args = left
	}
	return c, false
}

// define declares the flags. The defaults take the same way as what is given.
func (c *config) define() {
	c.flag("addr", ":8080", "`address` for traffic, host:port; port 0 takes a free one", into(&c.addr, parseAddr))
	c.flag("admin-addr", ":8081", "`address` for /stats, /healthz and /readyz, for the operator alone: /stats names the backends", into(&c.adminAddr, parseAddr))
	c.flag("backends", "", "`URLs` of the backends, separated by commas; without it, three are started for a demonstration", into(&c.targets, parseBackends))
	c.flag("algo", "round-robin", "`strategy`: round-robin, least-connections or ip-hash", into(&c.strategy, parseAlgo))
	c.flag("health-path", "/healthz", "`path` that a working backend answers with 2xx; empty: it is enough that it accepts connections", into(&c.healthPath, parsePath))
	c.flag("health-interval", "5s", "`time` from one probe of a backend to the next", into(&c.healthInterval, parseDuration))
	c.flag("health-timeout", "2s", "`time` that a probe may take, at most -health-interval; if it is not given, a shorter -health-interval shortens it", into(&c.healthTimeout, parseDuration))
	c.flag("max-attempts", "3", "`number` of times that a request may reach a backend, the first included; dials that fail do not count", into(&c.maxAttempts, parseAttempts))
	c.flag("max-replay-body", "1MiB", "`size` up to which a request's body is kept to be sent again, in B, KiB, MiB or GiB; 0 keeps none; longer ones are sent once", into(&c.maxReplayBody, parseSize))
	c.flag("dial-timeout", "3s", "`time` that connecting to a backend may take", into(&c.dialTimeout, parseDuration))
	c.flag("response-header-timeout", "30s", "`time` that a backend may take to begin its answer", into(&c.responseHeader, parseDuration))
	c.flag("shutdown-timeout", "15s", "`time` that requests under way have to end after SIGINT or SIGTERM", into(&c.shutdownTimeout, parseDuration))
	// What these two do if they are not given is not a value they can have.
	c.targets, c.healthTimeout = nil, 0
}

// flag declares one flag, which store takes in.
func (c *config) flag(name, def, usage string, store func(string) error) {
	v := &value{text: def, set: func(s string) {
		if err := store(s); err != nil {
			c.unread[name] = true
			c.fault(fmt.Errorf("-%s is %q: %w", name, s, err))
		}
	}}
	v.set(def)
	c.flags.Var(v, name, usage)
}

// value is a flag.Value whose Set keeps what is wrong and goes on, because the flag
// package stops at the first error.
type value struct {
	text string
	set  func(string)
}

func (v *value) String() string { return v.text }

func (v *value) Set(s string) error {
	v.text = s
	v.set(s)
	return nil
}

// into returns a function that stores in p what parse reads.
func into[T any](p *T, parse func(string) (T, error)) func(string) error {
	return func(s string) error {
		v, err := parse(s)
		if err == nil {
			*p = v
		}
		return err
	}
}

// fault keeps one fault, once: Parse reports bad syntax each time it comes to it.
func (c *config) fault(err error) {
	same := func(other error) bool { return other.Error() == err.Error() }
	if !slices.ContainsFunc(c.faults, same) {
		c.faults = append(c.faults, err)
	}
}

// given tells whether one of the flags of those names was on the command line.
func (c *config) given(names ...string) (found bool) {
	c.flags.Visit(func(f *flag.Flag) { found = found || slices.Contains(names, f.Name) })
	return found
}

// isDemo tells that there are no backends but those of the demonstration. An empty
// -backends, perhaps a variable that is not set, is a fault and not a demonstration.
func (c *config) isDemo() bool { return !c.given("backends") }

// setDemo makes the backends of the demonstration the targets.
func (c *config) setDemo(backends []*demoBackend) {
	for _, b := range backends {
		c.targets = append(c.targets, lb.Target{Name: b.name, URL: b.url})
	}
	if !c.given("health-interval", "health-timeout") {
		c.healthInterval = demoInterval
	}
}

// patience is how long it takes at most until probes that fail take a backend out, in
// whole seconds.
func (c *config) patience() time.Duration {
	fast := min(c.healthInterval, lb.DefaultFastCheckInterval)
	longest := c.healthInterval + (lb.DefaultFall-1)*fast
	longest += longest / 10 // by as much intervals differ
	return longest.Truncate(time.Second) + time.Second
}

// newPool makes the pool, or reports everything that is wrong with the flags. What
// they say as values is asked of the pool also if there are faults already, so that
// one run shows all of them.
func (c *config) newPool(log *slog.Logger) (*lb.Pool, error) {
	options := []lb.Option{
		lb.WithBalancer(c.strategy),
		lb.WithHealthCheck(c.healthCheck()),
		// The first failure takes a backend out, and only a probe brings it back: the
		// probes are frequent, and no request has to find out.
		lb.WithPassiveHealth(lb.PassiveHealth{Failures: 1, RecoverByProbe: true}),
		// What is in front of a gateway wants to hear at once that nothing is behind it.
		lb.WithFailClosed(),
		lb.WithRetry(c.retry()),
		lb.WithTimeouts(lb.Timeouts{Dial: c.dialTimeout, ResponseHeader: c.responseHeader}),
	}
	if len(c.faults) == 0 {
		options = append(options, lb.WithLogger(log))
	}
	pool, err := lb.New(c.targets, options...)
	if err != nil {
		c.faults = append(c.faults, inFlags(err)...)
	}
	if len(c.faults) == 0 {
		return pool, nil
	}
	if pool != nil {
		pool.Close()
	}
	return nil, &usageError{errors.Join(c.faults...)}
}

func (c *config) healthCheck() lb.HealthCheck {
	h := lb.HealthCheck{Path: c.healthPath, Interval: c.healthInterval, Timeout: c.healthTimeout}
	if c.unread["health-interval"] {
		h.Timeout = 0 // whether it fits cannot be said
	}
	return h
}

func (c *config) retry() lb.RetryPolicy {
	r := lb.RetryPolicy{
		Attempts:       c.maxAttempts,
		MaxReplayBytes: c.maxReplayBody,
		// The pool's default, or more if a body of the longest kind would not fit.
		MaxPoolReplayBytes: max(lb.DefaultMaxPoolReplayBytes, 2*c.maxReplayBody),
	}
	if c.maxReplayBody == 0 {
		r.MaxReplayBytes = -1 // 0 is the pool's word for its default
	}
	return r
}

// inFlags returns the faults that lb.New has found, one by one, in the words of the
// command line. It only replaces words: what it does not know it leaves as it is.
func inFlags(err error) (faults []error) {
	words := strings.NewReplacer(
		"HealthCheck.Path", "-health-path",
		"HealthCheck.Timeout", "-health-timeout",
		"the Interval", "-health-interval",
	)
	for line := range strings.Lines(strings.TrimPrefix(err.Error(), "lb: ")) {
		line = words.Replace(strings.TrimSuffix(line, "\n"))
		if strings.HasPrefix(line, "target ") {
			line = "-backends: " + line
		}
		faults = append(faults, errors.New(line))
	}
	return faults
}

func (c *config) usage(w io.Writer) {
	fmt.Fprint(w, `Usage: gateway [flags]

Gateway spreads HTTP requests over backends and probes these. Without -backends it starts
three of its own and prints what to try. SIGINT or SIGTERM ends it once the requests
under way are answered, a second one at once.

One failed request takes a backend out, and only a probe brings it back. A request goes
to another backend if that can do no harm: a POST that one may have seen is not sent
again. While no backend is healthy, all requests are answered with 503.

`)
	c.flags.SetOutput(w)
	c.flags.PrintDefaults()
}

func parseAddr(s string) (string, error) {
	_, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return "", errors.New("want host:port, like 127.0.0.1:8080 or :8080")
	}
	return s, nil
}

// parseBackends only takes the list apart: the pool looks at the URLs.
func parseBackends(s string) ([]lb.Target, error) {
	urls := strings.Split(s, ",")
	for i := range urls {
		urls[i] = strings.TrimSpace(urls[i])
	}
	return lb.Targets(urls...), nil
}

func parseAlgo(s string) (lb.Balancer, error) {
	switch s {
	case "round-robin":
		return lb.RoundRobin(), nil
	case "least-connections":
		return lb.LeastConnections(), nil
	case "ip-hash":
		return lb.IPHash(), nil
	}
	return nil, errors.New("want round-robin, least-connections or ip-hash")
}

// parsePath leaves everything to the pool.
func parsePath(s string) (string, error) { return s, nil }

func parseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, errors.New("want a time above zero with its unit, like 5s or 500ms")
	}
	return d, nil
}

func parseAttempts(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return 0, errors.New("want a number, 1 or more")
	}
	return n, nil
}

// parseSize reads a number of bytes: digits and a unit, in letters of any case.
func parseSize(s string) (int64, error) {
	number := strings.ToLower(s)
	factor := int64(1)
	for _, unit := range []struct { // "b" is the end of all of them and comes last
		name  string
		bytes int64
	}{
		{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30},
		{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"b", 1},
	} {
		if before, ok := strings.CutSuffix(number, unit.name); ok {
			number, factor = strings.TrimRight(before, " "), unit.bytes
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 63) // unsigned: a sign is no digit
	if err != nil || int64(n) > maxSize/factor {
		return 0, errors.New("want a size up to 1024GiB, like 1048576, 64KiB or 1MiB, or 0 for none")
	}
	return int64(n) * factor, nil
}
