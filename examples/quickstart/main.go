// Command quickstart shows what a pool does, in a few seconds and without
// arguments: it starts three servers on the loopback interface, puts a pool in
// front of them and sends real requests through it.
//
//	$ go run ./examples/quickstart
//	1. rotation: 9 requests, one after the other
//	2. b lives but fails its probe: it leaves, and comes back
//	3. c is killed while 4 workers send GET and POST: no request fails
//	4. c comes back: ejected, on trial, in again
//	5. c is slow: two strategies side by side
//	done: 7650 requests, 0 failed
//
// Each part also prints a table. It ends with an error unless all requests were
// answered and both came back.
package main

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"example.com/lb"
)

const (
	workers   = 4
	serveTime = 2 * time.Millisecond  // of a server in order
	slowTime  = 80 * time.Millisecond // of c in part 5
	ejection  = time.Second
	probing   = 100 * time.Millisecond // from one probe to the next; the default is 5 s
)

func main() {
	d := newDemo(os.Stdout)
	err := d.run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
	}
	fmt.Printf("done: %d requests, %d failed\n", d.sent.Load(), d.failed.Load())
	if err != nil || d.failed.Load() > 0 {
		os.Exit(1)
	}
}

// run starts the servers and shows the five parts.
func (d *demo) run() error {
	var targets []lb.Target
	for _, name := range []string{"a", "b", "c"} {
		s, err := startServer(name)
		if err != nil {
			return err
		}
		defer s.kill()
		d.servers = append(d.servers, s)
		targets = append(targets, lb.Target{Name: name, URL: "http://" + s.addr})
	}
	f, err := d.newFront(targets)
	if err != nil {
		return err
	}
	defer f.close()

	d.rotation(f)
	if err := d.probe(targets); err != nil {
		return err
	}
	d.kill(f)
	if err := d.comeBack(f); err != nil {
		return err
	}
	return d.compare(targets)
}

// newFront puts a pool in front of targets, behind a listener of its own.
func (d *demo) newFront(targets []lb.Target, opts ...lb.Option) (*front, error) {
	opts = append([]lb.Option{
		// Short, so that the return can be seen; the defaults are 5 s and 60 s.
		lb.WithPassiveHealth(lb.PassiveHealth{Ejection: ejection, MaxEjection: 2 * ejection}),
		lb.WithLogger(d.logger()),
	}, opts...)
	pool, err := lb.New(targets, opts...)
	if err != nil {
		return nil, err
	}
	return serve(pool)
}

// rotation sends requests one after the other.
func (d *demo) rotation(f *front) {
	const n = 9
	d.begin(f, "1. rotation: %d requests, one after the other", n)
	var order []string
	for range n {
		order = append(order, d.send(f.url, http.MethodGet, ""))
	}
	d.printf("   order: %s\n", strings.Join(order, " "))
	d.table(f)
}

// probe makes b fail its probe, and pass it again, while it answers all else. The pool
// is one that probes.
func (d *demo) probe(targets []lb.Target) error {
	d.begin(nil, "2. b lives but fails its probe: it leaves, and comes back")
	f, err := d.newFront(targets, lb.WithHealthCheck(lb.HealthCheck{Path: probePath, Interval: probing}))
	if err != nil {
		return err
	}
	defer f.close()
	d.before = f.Stats()
	if err := d.await(f, 1, lb.HealthHealthy); err != nil {
		return err
	}
	stop := d.traffic(f.url)
	defer stop()
	d.servers[1].ill.Store(true)
	d.event("b", "fails its probe from now on, and answers everything else")
	if err := d.await(f, 1, lb.HealthUnhealthy); err != nil {
		return err
	}
	time.Sleep(probing)
	before := d.answered("b")
	time.Sleep(5 * probing)
	d.event("b", fmt.Sprintf("requests in the last %v: %d", 5*probing, d.answered("b")-before))
	d.servers[1].ill.Store(false)
	if err := d.await(f, 1, lb.HealthHealthy); err != nil {
		return err
	}
	time.Sleep(5 * probing)
	stop()
	d.table(f)
	return nil
}

// kill kills c in the middle of traffic.
func (d *demo) kill(f *front) {
	d.begin(f, "3. c is killed while %d workers send GET and POST: no request fails", workers)
	d.printf("   Each POST carries an Idempotency-Key, which says that it may be sent twice.\n")
	d.printf("   Without one, a POST that c had already seen would be answered with 502.\n")
	stop := d.traffic(f.url)
	time.Sleep(ejection / 2)
	d.event("c", fmt.Sprintf("killed; requests on it: %d", f.Backends()[2].InFlight()))
	d.servers[2].kill()
	time.Sleep(2 * ejection)
	stop()
	d.table(f)
}

// comeBack starts c again and waits until the pool uses it.
func (d *demo) comeBack(f *front) error {
	d.begin(f, "4. c comes back: ejected, on trial, in again")
	stop := d.traffic(f.url)
	defer stop()
	time.Sleep(ejection / 4)
	c := d.servers[2]
	if err := c.listen(c.addr); err != nil {
		return fmt.Errorf("starting c again: %w", err)
	}
	d.event("c", "started again")
	if err := d.await(f, 2, lb.HealthUnknown); err != nil { // of which nothing bad is known
		return err
	}
	time.Sleep(ejection / 2) // for its share to show
	stop()
	d.table(f)
	return nil
}

// await waits until the i-th backend of f is as it should be.
func (d *demo) await(f *front, i int, health lb.Health) error {
	const patience, step = 5 * ejection, ejection / 100 // an ejection that began before takes two at most
	b := f.Backends()[i]
	for waited := time.Duration(0); b.Status().Health != health; waited += step {
		if waited > patience {
			return fmt.Errorf("%s is not %s after %v but %s: %s", b, health, patience, b.Status(), b.Status().Reason)
		}
		time.Sleep(step)
	}
	return nil
}

// compare makes c slow and shows who gets how much.
func (d *demo) compare(targets []lb.Target) error {
	const n = 120
	d.servers[2].delay.Store(int64(slowTime))
	d.begin(nil, "5. c is slow: two strategies side by side")
	d.printf("   c takes %v a request, a and b %v; %d workers send %d requests\n", slowTime, serveTime, workers, n)
	d.printf("   %-18s %6s %6s %6s %8s\n", "strategy", "a", "b", "c", "time")
	for _, strategy := range []lb.Balancer{lb.RoundRobin(), lb.LeastConnections()} {
		f, err := d.newFront(targets, lb.WithBalancer(strategy))
		if err != nil {
			return err
		}
		d.reset()
		began := time.Now()
		d.burst(f.url, n)
		took := time.Since(began)
		d.printf("   %-18s %6d %6d %6d %6.2f s\n", strategy, d.answered("a"), d.answered("b"), d.answered("c"), took.Seconds())
		f.close()
	}
	d.printf("\n")
	return nil
}
