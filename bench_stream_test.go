package lb_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"testing"
)

// BenchmarkIdleStreams measures what an event stream takes up in which nothing happens,
// in a pool and in a bare httputil.ReverseProxy: memory of heap and stacks, and
// goroutines. Clients and backends are in another process, so that each may have all the
// sockets that the system grants to one:
//
//	go test -run - -bench IdleStreams -benchtime 1x .
func BenchmarkIdleStreams(b *testing.B) {
	const streams = 8000
	for _, proxy := range []struct {
		name string
		make func(b *testing.B, backends []string) http.Handler
	}{{"bare", bareProxy}, {"lb", poolProxy()}} {
		b.Run(proxy.name, func(b *testing.B) {
			for b.Loop() {
				far := startProcess(b, "streams")
				addr := serveOn(b, proxy.make(b, []string{"http://" + far.addr}))
				memory, goroutines := taken()
				fmt.Fprintln(far.in, addr, streams)
				if got := far.line(b); got != "open" {
					b.Fatalf("streams: %s", got)
				}
				after, more := taken()
				b.ReportMetric(float64(after-memory)/streams, "B/stream")
				b.ReportMetric(float64(more-goroutines)/streams, "goroutines/stream")
				fmt.Fprintln(far.in)
				if got := far.line(b); got != "closed" {
					b.Fatalf("streams: %s", got)
				}
			}
		})
	}
}

// taken is the memory and the goroutines that this process has.
func taken() (memory int64, goroutines int) {
	runtime.GC()
	runtime.GC() // what the first has made free
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse), runtime.NumGoroutine()
}

// streamsProcess is the backend of event streams, and its clients: told of a proxy's
// address and a number it opens that many, and at the next line closes them.
func streamsProcess() error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go serveEvents(ln)
	fmt.Println(ln.Addr())
	var addr string
	var n int
	if _, err := fmt.Scanln(&addr, &n); err != nil {
		return err
	}
	var conns []net.Conn
	for range n {
		c, err := openStream(addr)
		if err != nil {
			fmt.Println(err)
			return err
		}
		conns = append(conns, c)
	}
	fmt.Println("open")
	fmt.Scanln()
	for _, c := range conns {
		c.Close()
	}
	fmt.Println("closed")
	_, err = io.Copy(io.Discard, os.Stdin) // until the benchmark has no use for it
	return errors.Join(err, ln.Close())
}

// serveEvents answers every request with one event of a stream that goes on.
func serveEvents(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			head := make([]byte, 4096)
			if _, err := c.Read(head); err != nil {
				return
			}
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
			c.Read(head) // until the other side has gone
		}()
	}
}

// openStream returns a connection on which the first event has come.
func openStream(addr string) (net.Conn, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: bench\r\n\r\n"); err != nil {
		return nil, err
	}
	for br := bufio.NewReaderSize(c, 512); ; {
		line, err := br.ReadString('\n')
		if err != nil {
			return nil, err
		}
		if line == "data: 1\n" {
			return c, nil
		}
	}
}
