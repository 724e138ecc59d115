package integration

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/lb"
)

// HTTP/2 on both sides of a pool, with clients and servers that were written by others.

const early = "no need for more\n"

// startHTTP2 starts a server of net/http over HTTP/2: of the files of dir, of uploads,
// which it answers with their length and hash, of trailers and of early answers.
func startHTTP2(t *testing.T, dir string, secure bool) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("/", http.FileServer(http.Dir(dir)))
	mux.HandleFunc("/upload", upload)
	mux.HandleFunc("/early", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, early) })
	mux.HandleFunc("/trailers", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Announced")
		io.WriteString(w, "body\n")
		_ = http.NewResponseController(w).Flush() // curl does not look behind a Content-Length
		w.Header().Set("X-Announced", "one")
		w.Header().Set(http.TrailerPrefix+"X-Other", "two")
	})
	return startFront(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Spoken", r.Proto)
		mux.ServeHTTP(w, r)
	}), secure)
}

func upload(w http.ResponseWriter, r *http.Request) {
	hash := sha256.New()
	n, err := io.Copy(hash, r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	fmt.Fprintf(w, "%d %x\n", n, hash.Sum(nil))
}

// startNginx2 starts nginx with HTTP/2 on two addresses, on the second with TLS. It does
// what startHTTP2's server does, but for trailers.
func startNginx2(t *testing.T, dir string) (plain, secure string, roots *x509.CertPool) {
	t.Helper()
	own := t.TempDir()
	uploads := httptest.NewServer(http.HandlerFunc(upload))
	t.Cleanup(uploads.Close)
	cert, roots := certificate(t)
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, filepath.Join(own, "cert"), "CERTIFICATE", cert.Certificate[0])
	writePEM(t, filepath.Join(own, "key"), "PRIVATE KEY", key)
	plain, secure = freeAddr(t), freeAddr(t)
	startNginxWith(t, own, fmt.Sprintf(`
	access_log off;
	client_max_body_size 0;
	add_header X-Spoken $server_protocol;
	server {
		listen %[2]s http2;
		listen %[3]s http2 ssl;
		ssl_certificate %[1]s/cert;
		ssl_certificate_key %[1]s/key;
		root %[4]s;
		location /upload { proxy_pass http://%[5]s; }
		location /early { return 200 "%[6]s"; }
	}`, own, plain, secure, dir, uploads.Listener.Addr(), early), plain, secure)
	return plain, secure, roots
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// http2Front is a pool with one backend, and how it is asked.
type http2Front struct {
	pool   *lb.Pool
	url    string
	args   []string // of curl
	client *http.Client
}

func startHTTP2Front(t *testing.T, secure bool, backend lb.Target) *http2Front {
	t.Helper()
	pool, err := lb.New([]lb.Target{backend})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	s := startFront(t, pool, secure)
	f := &http2Front{pool: pool, url: s.URL, args: []string{"--http2-prior-knowledge"}, client: s.Client()}
	if !secure {
		protocols := new(http.Protocols)
		protocols.SetUnencryptedHTTP2(true)
		f.client.Transport.(*http.Transport).Protocols = protocols
		return f
	}
	roots := filepath.Join(t.TempDir(), "roots")
	writePEM(t, roots, "CERTIFICATE", s.Certificate().Raw)
	f.args = []string{"--http2", "--cacert", roots}
	return f
}

// curl returns what curl wrote, behind it the version that it spoke.
func (f *http2Front) curl(t *testing.T, path string, args ...string) string {
	t.Helper()
	args = append(append([]string{"-w", "%{http_version}"}, f.args...), args...)
	return curl(t, append(args, f.url+path)...)
}

func TestHTTP2OnBothSides(t *testing.T) {
	dir, big := site(t)
	plain, secure, roots := startNginx2(t, dir)
	goPlain, goSecure := startHTTP2(t, dir, false), startHTTP2(t, dir, true)
	for _, b := range []struct {
		name     string
		target   lb.Target
		trailers bool
	}{
		{"nginx over h2c", target(false, plain, nil), false},
		{"nginx over TLS", target(true, secure, roots), false},
		{"net/http over h2c", target(false, goPlain.Listener.Addr().String(), nil), true},
		{"net/http over TLS", target(true, goSecure.Listener.Addr().String(), rootsOf(goSecure.Certificate())), true},
	} {
		for _, front := range []string{"h2c", "TLS"} {
			t.Run(front+" to "+b.name, func(t *testing.T) {
				t.Parallel()
				f := startHTTP2Front(t, front == "TLS", b.target)
				if got := f.curl(t, "/big.bin"); got != string(big)+"2" {
					t.Errorf("GET of %d bytes gave %d others", len(big), len(got)-1)
				}
				if got := f.curl(t, "/text.txt", "--head"); !strings.HasPrefix(got, "HTTP/2 200") || !strings.Contains(got, "x-spoken: HTTP/2.0\r\n") {
					t.Errorf("HEAD gave %q", got)
				}
				f.tryUploads(t, dir, big)
				f.tryEarly(t)
				if b.trailers {
					if got := f.curl(t, "/trailers", "-i"); !strings.Contains(got, "body\nx-announced: one\r\nx-other: two\r\n") {
						t.Errorf("trailers gave %q", got)
					}
				}
				s := f.pool.Stats()
				if c := s.Backends[0].Connections; c.Opened != 1 || s.Failures != 0 || s.Backends[0].Failures != 0 {
					t.Errorf("%d requests failed, %d by the backend's fault (%s), connections %+v; want none, and one connection", s.Failures, s.Backends[0].Failures, s.Backends[0].LastError, *c)
				}
			})
		}
	}
}

// tryUploads sends with a length, without, and after Expect: 100-continue.
func (f *http2Front) tryUploads(t *testing.T, dir string, big []byte) {
	file := filepath.Join(dir, "big.bin")
	want := fmt.Sprintf("%d %x\n2", len(big), sha256.Sum256(big))
	for _, args := range [][]string{
		{"--data-binary", "@" + file},
		{"--data-binary", "@" + file, "-H", "Expect: 100-continue"},
		{"-X", "POST", "-T", file, "-H", "Transfer-Encoding: chunked"},
	} {
		if got := f.curl(t, "/upload", args...); got != want {
			t.Errorf("curl %s: %q, want %q", strings.Join(args, " "), got, want)
		}
	}
}

// tryEarly uploads what nobody reads, without an end. The client is that of net/http: curl
// 7.88 takes the RST_STREAM behind an early answer (RFC 9113, section 8.1) for an error,
// of a server without a proxy too.
func (f *http2Front) tryEarly(t *testing.T) {
	body, upload := io.Pipe()
	var uploading sync.WaitGroup
	uploading.Go(func() {
		for err := error(nil); err == nil; {
			_, err = upload.Write(make([]byte, 32<<10))
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "POST", f.url+"/early", body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := f.client.Do(r)
	if err != nil {
		t.Fatalf("early answer: %v", err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err != nil || string(got) != early || resp.ProtoMajor != 2 {
		t.Errorf("early answer = %s %q, %v; want %q", resp.Proto, got, err, early)
	}
	uploading.Wait()
}

// Many streams at once, over few connections to the backends that speak HTTP/2.
func TestHTTP2UnderLoad(t *testing.T) {
	const requests, clients, streams = 20_000, 10, 20
	hello := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello\n") })
	var targets []lb.Target
	for range 2 {
		targets = append(targets, target(false, startFront(t, hello, false).Listener.Addr().String(), nil))
	}
	first := httptest.NewServer(hello)
	defer first.Close()
	pool, err := lb.New(append(targets, lb.Target{URL: first.URL}))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	front := startFront(t, pool, false)

	p := start(t, "h2load", "-n", fmt.Sprint(requests), "-c", fmt.Sprint(clients), "-m", fmt.Sprint(streams), front.URL)
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Fatal("h2load does not end")
	}
	for _, line := range []string{
		`(?m)^Application protocol: h2c$`,
		fmt.Sprintf(`(?m)^requests: %[1]d total, %[1]d started, %[1]d done, %[1]d succeeded, 0 failed, 0 errored, 0 timeout$`, requests),
		fmt.Sprintf(`(?m)^status codes: %d 2xx, 0 3xx, 0 4xx, 0 5xx$`, requests),
	} {
		if !regexp.MustCompile(line).MatchString(p.output.String()) {
			t.Errorf("h2load did not write %s", line)
		}
	}
	s := pool.Stats()
	if s.Requests != requests || s.Failures != 0 || s.Retries != 0 {
		t.Errorf("%d requests, %d failures, %d retries; want %d and none", s.Requests, s.Failures, s.Retries, requests)
	}
	for i, b := range s.Backends {
		atMost := int64(2)
		if i == 2 { // HTTP/1.1
			atMost = clients * streams
		}
		if b.Requests < requests/3-10 || b.Requests > requests/3+10 || b.Connections.Opened > atMost {
			t.Errorf("backend %s had %d requests over %+v, want %d ± 10 over %d connections at most", b.Name, b.Requests, *b.Connections, requests/3, atMost)
		}
	}
}
