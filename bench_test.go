package lb_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/lb"
)

// BenchmarkProxy measures what a request costs through a pool with its defaults,
// beside a bare httputil.ReverseProxy whose transport is set alike. Client and
// backend are a few lines over raw connections and the same for both; "direct" is
// what they cost without a proxy. cpu-ns/op is processor time of the whole process,
// so what a proxy costs is its number less that of direct. Compare runs of one
// invocation only:
//
//	go test -run - -bench Proxy -count 6 .
func BenchmarkProxy(b *testing.B) {
	for _, request := range []struct{ name, method, body string }{{"GET", "GET", ""}, {"POST1KiB", "POST", strings.Repeat("x", 1024)}} {
		for _, proxy := range []struct {
			name string
			make func(b *testing.B, backends []string) http.Handler
		}{{"direct", nil}, {"bare", bareProxy}, {"lb", poolProxy()}, {"lb-checked", poolProxy(checkEachSecond())}} {
			b.Run(request.name+"/"+proxy.name, func(b *testing.B) {
				addr := rawBackend(b)
				if proxy.make != nil {
					addr = serveOn(b, proxy.make(b, []string{"http://" + addr, "http://" + rawBackend(b), "http://" + rawBackend(b)}))
				}
				head := fmt.Sprintf("%s /path HTTP/1.1\r\nHost: bench\r\nUser-Agent: bench\r\n", request.method)
				if request.body != "" {
					head += fmt.Sprintf("Content-Length: %d\r\n", len(request.body))
				}
				benchClients(b, addr, head+"\r\n"+request.body)
			})
		}
	}
}

// bareProxy turns in rotation, which takes no thought, and nothing else.
func bareProxy(b *testing.B, backends []string) http.Handler {
	var mu sync.Mutex // guards the following
	next := 0
	var urls []*url.URL
	for _, s := range backends {
		u, err := url.Parse(s)
		if err != nil {
			b.Fatal(err)
		}
		urls = append(urls, u)
	}
	t := &http.Transport{
		DialContext:           (&net.Dialer{Timeout: lb.DefaultDialTimeout}).DialContext,
		DisableCompression:    true,
		MaxIdleConnsPerHost:   lb.DefaultMaxIdleConns,
		IdleConnTimeout:       lb.DefaultIdleConnTimeout,
		ResponseHeaderTimeout: lb.DefaultResponseHeaderTimeout,
		ExpectContinueTimeout: lb.DefaultExpectContinueTimeout,
	}
	b.Cleanup(t.CloseIdleConnections)
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			mu.Lock()
			u := urls[next%len(urls)]
			next++
			mu.Unlock()
			r.SetURL(u)
			r.SetXForwarded()
		},
		Transport:  t,
		BufferPool: &buffers{},
		ErrorLog:   log.New(io.Discard, "", 0),
	}
}

type buffers struct{ sync.Pool }

func (p *buffers) Get() []byte {
	if b, ok := p.Pool.Get().(*[]byte); ok {
		return *b
	}
	return make([]byte, 32<<10)
}

func (p *buffers) Put(b []byte) { p.Pool.Put(&b) }

func poolProxy(opts ...lb.Option) func(*testing.B, []string) http.Handler {
	return func(b *testing.B, backends []string) http.Handler {
		p, err := lb.New(lb.Targets(backends...), opts...)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { p.Close() })
		return p
	}
}

// checkEachSecond shows that active checks cost requests nothing.
func checkEachSecond() lb.Option {
	return lb.WithHealthCheck(lb.HealthCheck{Path: "/healthz", Interval: time.Second})
}

func serveOn(b *testing.B, h http.Handler) (addr string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	s := &http.Server{Handler: h}
	go s.Serve(ln)
	b.Cleanup(func() { s.Close() })
	return ln.Addr().String()
}

// rawBackend answers every request with the same 1 KiB, parsing as little as
// it can.
func rawBackend(b *testing.B) (addr string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ln.Close() })
	answer := []byte("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1024\r\n\r\n" + strings.Repeat("y", 1024))
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for br := bufio.NewReader(c); skipMessage(br) == nil; {
					if _, err := c.Write(answer); err != nil {
						return
					}
				}
			}()
		}
	}()
	return ln.Addr().String()
}

// skipMessage reads one message with an optional Content-Length.
func skipMessage(br *bufio.Reader) error {
	length := 0
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) <= 2 {
			_, err := br.Discard(length)
			return err
		}
		if v, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(v))); err != nil {
				return err
			}
		}
	}
}

func benchClients(b *testing.B, addr, request string) {
	b.ReportAllocs()
	b.SetParallelism(8)
	raw := []byte(request)
	cpu := cpuTime()
	b.RunParallel(func(pb *testing.PB) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			b.Error(err)
			return
		}
		defer c.Close()
		br := bufio.NewReader(c)
		for pb.Next() {
			if _, err := c.Write(raw); err != nil {
				b.Error(err)
				return
			}
			if err := skipMessage(br); err != nil {
				b.Error(err)
				return
			}
		}
	})
	if used := cpuTime() - cpu; used > 0 {
		b.ReportMetric(float64(used)/float64(time.Duration(b.N)), "cpu-ns/op")
	}
}
