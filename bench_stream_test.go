package lb_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"runtime"
	"testing"
)

// BenchmarkIdleStreams measures what an event stream takes up in which nothing happens,
// through a pool and through a bare httputil.ReverseProxy: memory of heap and stacks, and
// goroutines. "direct" is what client and backend take up, which is in the other numbers
// too:
//
//	go test -run - -bench IdleStreams -benchtime 1x .
func BenchmarkIdleStreams(b *testing.B) {
	const streams = 4000 // four sockets each
	for _, proxy := range []struct {
		name string
		make func(b *testing.B, backends []string) http.Handler
	}{{"direct", nil}, {"bare", bareProxy}, {"lb", poolProxy()}} {
		b.Run(proxy.name, func(b *testing.B) {
			for b.Loop() {
				addr := eventBackend(b)
				if proxy.make != nil {
					addr = serveOn(b, proxy.make(b, []string{"http://" + addr}))
				}
				memory, goroutines := taken()
				conns := make([]net.Conn, streams)
				for i := range conns {
					conns[i] = openStream(b, addr)
				}
				after, more := taken()
				b.ReportMetric(float64(after-memory)/streams, "B/stream")
				b.ReportMetric(float64(more-goroutines)/streams, "goroutines/stream")
				for _, c := range conns {
					c.Close()
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

// eventBackend answers every request with one event of a stream that goes on.
func eventBackend(b *testing.B) (addr string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ln.Close() })
	go func() {
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
	}()
	return ln.Addr().String()
}

// openStream returns a connection on which the first event has come.
func openStream(b *testing.B, addr string) net.Conn {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: bench\r\n\r\n"); err != nil {
		b.Fatal(err)
	}
	for br := bufio.NewReaderSize(c, 512); ; {
		line, err := br.ReadString('\n')
		if err != nil {
			b.Fatal(err)
		}
		if line == "data: 1\n" {
			return c
		}
	}
}
