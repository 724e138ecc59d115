package integration

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
)

// The gateway in front of servers that others wrote, each alone and all at once,
// driven by curl.

// kinds are the servers; each serves the files of dir and returns its address.
var kinds = []struct {
	name  string
	start func(t *testing.T, dir, addr string) (*process, string)
}{
	{"python", startPython},
	{"nginx", startNginx},
	{"node", startNode},
}

// startPython starts Python's http.server, on addr if there is one.
func startPython(t *testing.T, dir, addr string) (*process, string) {
	t.Helper()
	port := "0"
	if addr != "" {
		_, port, _ = strings.Cut(addr, ":")
	}
	p := start(t, "python3", "-u", "-m", "http.server", port, "--bind", "127.0.0.1", "--protocol", "HTTP/1.1", "--directory", dir)
	rest := p.line(t, "Serving HTTP on 127.0.0.1 port ")
	port, _, _ = strings.Cut(rest, " ")
	return p, "127.0.0.1:" + port
}

func startNginx(t *testing.T, dir, addr string) (*process, string) {
	t.Helper()
	own := t.TempDir()
	if addr == "" {
		addr = freeAddr(t)
	}
	p := startNginxWith(t, own, fmt.Sprintf(`
	access_log off;
	gzip on;
	gzip_types *;
	gzip_proxied any;
	server {
		listen %s;
		root %s;
	}`, addr, dir), addr)
	return p, addr
}

func startNode(t *testing.T, dir, _ string) (*process, string) {
	t.Helper()
	p := start(t, "node", "testdata/server.js", dir)
	return p, p.line(t, "address ")
}

// gateway is the running gateway and its two URLs.
type gateway struct {
	*process
	url, admin string
}

func startGateway(t *testing.T, backends []string, flags ...string) *gateway {
	t.Helper()
	args := append([]string{
		// The time-out follows the interval: a busy machine must not fail a probe.
		"-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0", "-health-path", "/healthz.txt", "-health-interval", "2s",
		"-backends", strings.Join(backends, ","),
	}, flags...)
	g := &gateway{process: start(t, gatewayPath, args...)}
	g.url = g.line(t, "traffic on ")
	g.admin, _, _ = strings.Cut(g.line(t, "admin on "), ": /")
	g.wait(t, len(backends))
	return g
}

// wait waits until n backends are healthy and all have been probed.
func (g *gateway) wait(t *testing.T, n int) {
	t.Helper()
	wait(t, fmt.Sprintf("%d healthy backends", n), func() bool {
		var stats struct {
			Healthy  int                      `json:"healthy_backends"`
			Backends []struct{ State string } `json:"backends"`
		}
		if err := json.Unmarshal([]byte(curl(t, g.admin+"/stats")), &stats); err != nil {
			t.Fatal(err)
		}
		for _, b := range stats.Backends {
			if b.State == "unknown" {
				return false
			}
		}
		return stats.Healthy == n
	})
}

// site makes a directory of files and returns it with the content of big.bin.
func site(t *testing.T) (dir string, big []byte) {
	t.Helper()
	dir = t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { // nginx may give up its rights
		t.Fatal(err)
	}
	big = make([]byte, 3<<20)
	chance := rand.NewChaCha8([32]byte{1})
	_, _ = chance.Read(big) // never fails
	for name, content := range map[string][]byte{
		"big.bin":     big,
		"healthz.txt": []byte("ok\n"),
		"text.txt":    []byte(strings.Repeat("the quick brown fox\n", 5000)),
		"empty.txt":   nil,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir, big
}

func TestGatewayInFrontOfEachServer(t *testing.T) {
	dir, big := site(t)
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			p, addr := kind.start(t, dir, "")
			g := startGateway(t, []string{"http://" + addr})
			if got := curl(t, g.url+"/big.bin"); got != string(big) {
				t.Errorf("GET of %d bytes gave %d others", len(big), len(got))
			}
			if got := curl(t, "-0", g.url+"/big.bin"); got != string(big) {
				t.Errorf("GET over HTTP/1.0 of %d bytes gave %d others", len(big), len(got))
			}
			if got := curl(t, "-w", "%{http_code}", g.url+"/empty.txt"); got != "200" {
				t.Errorf("GET of an empty file gave %q", got)
			}
			if got := curl(t, "-w", "%{http_code}", "-o", os.DevNull, g.url+"/none"); got != "404" {
				t.Errorf("GET of no file gave %s", got)
			}
			if got := curl(t, "--head", g.url+"/big.bin"); !regexp.MustCompile(`(?i)content-length: 3145728`).MatchString(got) {
				t.Errorf("HEAD gave %s", got)
			}
			codes := curl(t, "--parallel", "--parallel-max", "16", "-o", os.DevNull, "-w", "%{http_code}\n", g.url+"/text.txt?[1-200]")
			if n := strings.Count(codes, "200\n"); n != 200 {
				t.Errorf("%d of 200 requests were answered", n)
			}
			if code := g.stop(t); code != 0 {
				t.Errorf("the gateway ended with %d", code)
			}
			for _, noise := range []string{"Traceback", "Broken pipe", "reset by peer"} {
				if strings.Contains(p.output.String(), noise) {
					t.Errorf("probes make the server complain: %s", noise)
				}
			}
		})
	}
}

// Uploads arrive whole: with a length, chunked, and after Expect: 100-continue, which
// curl sends with long ones.
func TestGatewayPassesUploadsOn(t *testing.T) {
	dir, big := site(t)
	_, addr := startNode(t, dir, "")
	g := startGateway(t, []string{"http://" + addr})
	want := fmt.Sprintf("%d %x\n", len(big), sha256.Sum256(big))
	file := filepath.Join(dir, "big.bin")
	for _, args := range [][]string{
		{"--data-binary", "@" + file},
		{"--data-binary", "@" + file, "-H", "Expect: 100-continue"},
		{"--data-binary", "@" + file, "-H", "Expect:"},
		{"-T", file},
		{"-T", file, "-H", "Transfer-Encoding: chunked"},
	} {
		if got := curl(t, append(args, g.url+"/upload")...); got != want {
			t.Errorf("curl %s: %q, want %q", strings.Join(args, " "), got, want)
		}
	}
	var header map[string]string
	echo := curl(t, "-H", "X-Forwarded-For: 1.2.3.4", "-H", "Forwarded: for=1.2.3.4", "-H", "X-Own: kept", g.url+"/echo")
	if err := json.Unmarshal([]byte(echo), &header); err != nil {
		t.Fatal(err)
	}
	if header["x-forwarded-for"] != "127.0.0.1" || header["forwarded"] != "" || header["x-own"] != "kept" {
		t.Errorf("the backend was sent %v", header)
	}
}

// What nginx compresses stays compressed, and what curl asks for in part comes in part.
func TestGatewayLeavesAnswersAsTheyAre(t *testing.T) {
	dir, big := site(t)
	_, addr := startNginx(t, dir, "")
	g := startGateway(t, []string{"http://" + addr})
	plain, err := os.ReadFile(filepath.Join(dir, "text.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if got := curl(t, "--compressed", g.url+"/text.txt"); got != string(plain) {
		t.Errorf("--compressed gave %d bytes, want %d", len(got), len(plain))
	}
	if got := curl(t, "-H", "Accept-Encoding: gzip", g.url+"/text.txt"); len(got) >= len(plain) || !strings.HasPrefix(got, "\x1f\x8b") {
		t.Errorf("the compressed answer is %d bytes long and begins with %.2q", len(got), got)
	}
	if got := curl(t, "-r", "1000-1999", g.url+"/big.bin"); got != string(big[1000:2000]) {
		t.Errorf("a range of 1000 bytes gave %d others", len(got))
	}
	etag := regexp.MustCompile(`(?i)etag: (\S+)`).FindStringSubmatch(curl(t, "--head", g.url+"/big.bin"))
	if etag == nil {
		t.Fatal("nginx sent no ETag")
	}
	if got := curl(t, "-o", os.DevNull, "-w", "%{http_code}", "-H", "If-None-Match: "+etag[1], g.url+"/big.bin"); got != "304" {
		t.Errorf("If-None-Match gave %s", got)
	}
}

// All three serve one site; one of them is killed under load, which fails nothing, and
// comes back on the same port. The file is empty: an answer that was cut in its body
// could not be made good.
func TestGatewaySurvivesTheKillOfAServer(t *testing.T) {
	dir, _ := site(t)
	var processes []*process
	var addrs, urls []string
	for _, kind := range kinds {
		p, addr := kind.start(t, dir, "")
		processes, addrs, urls = append(processes, p), append(addrs, addr), append(urls, "http://"+addr)
	}
	g := startGateway(t, urls)
	for i, kill := range []int{0, 1} {
		var load sync.WaitGroup
		began := make(chan struct{})
		var once sync.Once
		for range 4 {
			load.Go(func() {
				for range 5 {
					codes, err := tryCurl(t.Context(), nil, "--parallel", "--parallel-max", "4", "-o", os.DevNull, "-w", "%{http_code}\n", g.url+"/empty.txt?[1-50]")
					if n := strings.Count(codes, "200\n"); n != 50 || err != nil {
						t.Errorf("%d of 50 requests were answered: %v", n, err)
					}
					once.Do(func() { close(began) })
				}
			})
		}
		<-began
		processes[kill].kill()
		load.Wait()
		g.wait(t, 2)
		kinds[i].start(t, dir, addrs[kill])
		g.wait(t, 3)
	}
	log := g.output.String()
	for _, addr := range addrs[:2] {
		if !strings.Contains(log, "backend=http://"+addr+" from=healthy to=ejected") && !strings.Contains(log, "backend=http://"+addr+" from=healthy to=unhealthy") {
			t.Errorf("the log does not tell that %s was taken out", addr)
		}
	}
}
