package integration

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Backends that tell what they have read as requests.

// arrival is a request as a backend has read it.
type arrival struct {
	Line    string // the request line
	Length  string // Content-Length
	Coding  string // Transfer-Encoding
	Way     string // X-Forwarded-For: it came through the pool, and as a request
	Body    string
	Fault   string // why it is none; nginx says its status
	Whole   bool
	expects bool   // a 100 Continue; this and the following are the recorder's alone
	raw     string // all its bytes
}

// framed is how the body was framed, and the body.
func (a arrival) framed() string { return strings.TrimRight(a.Coding+a.Length+" "+a.Body, " ") }

// reader is a backend that tells what has arrived, once it has ended.
type reader struct {
	addr     string
	arrivals func(t *testing.T) []arrival
}

// readers are the backends.
var readers = []struct {
	name  string
	start func(t *testing.T) reader
}{
	{"recorder", func(t *testing.T) reader {
		r := startRecorder(t, echoed, nil)
		return reader{r.addr(), r.end}
	}},
	{"nginx", startNginxReader},
	{"node", func(t *testing.T) reader { return startNodeReader(t, "strict") }},
	{"lenient node", func(t *testing.T) reader { return startNodeReader(t, "lenient") }},
}

// startNginxReader starts an nginx that answers with method and target once it has read
// the whole body, because it sends it on to itself.
func startNginxReader(t *testing.T) reader {
	t.Helper()
	own, addr := t.TempDir(), freeAddr(t)
	p := startNginxWith(t, own, fmt.Sprintf(`
	log_format arrivals escape=json '{"line":"$request","length":"$http_content_length","coding":"$http_transfer_encoding",'
		'"way":"$http_x_forwarded_for","body":"$request_body","fault":"$status"}';
	client_max_body_size 0;
	keepalive_requests 100000;
	server {
		listen %[2]s;
		access_log %[1]s/arrivals arrivals;
		location / { proxy_pass http://unix:%[1]s/inner; }
	}
	server {
		listen unix:%[1]s/inner;
		access_log off;
		location / { return 200 "$request_method $request_uri\n"; }
	}`, own, addr), addr)
	return reader{addr, func(t *testing.T) []arrival {
		t.Helper()
		p.stop(t)
		log, err := os.ReadFile(filepath.Join(own, "arrivals"))
		if err != nil {
			t.Fatal(err)
		}
		got := decodeArrivals(t, string(log))
		for i := range got {
			got[i].Whole = got[i].Fault == "200"
		}
		return got
	}}
}

func startNodeReader(t *testing.T, mode string) reader {
	t.Helper()
	p := start(t, "node", "testdata/recorder.js", mode)
	return reader{p.line(t, "address "), func(t *testing.T) []arrival {
		t.Helper()
		p.stop(t)
		return decodeArrivals(t, p.output.String())
	}}
}

// decodeArrivals reads those lines of a log that are JSON.
func decodeArrivals(t *testing.T, log string) (got []arrival) {
	t.Helper()
	for line := range strings.Lines(log) {
		if !strings.HasPrefix(line, "{") {
			continue
		}
		var a arrival
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			t.Errorf("%v: %s", err, line)
		}
		got = append(got, a)
	}
	return got
}

// recorder is a backend that keeps all bytes that it has read, and takes nothing for a
// request but what can be read in one way alone.
type recorder struct {
	listener  net.Listener
	reply     func(arrival) string // hangUp at its end closes the connection
	early     func(arrival) string // to the head alone, in place of reply if it is not empty; may be nil
	accepting sync.WaitGroup
	serving   sync.WaitGroup
	conns     []net.Conn // the accepting goroutine's until that has ended

	mu  sync.Mutex // guards the following
	got []arrival
}

// hangUp at the end of an answer closes the connection after it.
const hangUp = "\x00hang up"

func startRecorder(t *testing.T, reply, early func(arrival) string) *recorder {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &recorder{listener: l, reply: reply, early: early}
	r.accepting.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.conns = append(r.conns, c)
			r.serving.Go(func() { r.serve(c) })
		}
	})
	t.Cleanup(func() { r.end(t) })
	return r
}

// echoed is an answer that tells which request it is for.
func echoed(a arrival) string {
	line := strings.TrimSuffix(a.Line, " HTTP/1.1") + "\n"
	if strings.HasPrefix(line, "HEAD ") {
		return "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
	}
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(line), line)
}

func (r *recorder) addr() string { return r.listener.Addr().String() }

// end ends it and returns what has arrived.
func (r *recorder) end(*testing.T) []arrival {
	r.listener.Close()
	r.accepting.Wait() // no connection comes after that
	for _, c := range r.conns {
		c.Close()
	}
	r.serving.Wait()
	return r.got
}

func (r *recorder) serve(c net.Conn) {
	defer c.Close()
	br := bufio.NewReader(c)
	for {
		in := strict{br: br}
		answered := false
		in.head = func(a arrival) {
			var s string
			if r.early != nil {
				s = r.early(a)
			}
			if answered = s != ""; !answered && a.expects {
				s = "HTTP/1.1 100 Continue\r\n\r\n"
			}
			_, _ = io.WriteString(c, s) // if nobody hears it, no more will come either
		}
		a := in.request()
		if a.raw == "" {
			return
		}
		r.mu.Lock()
		r.got = append(r.got, a)
		r.mu.Unlock()
		if !a.Whole {
			return
		}
		if answered {
			continue
		}
		s, hang := strings.CutSuffix(r.reply(a), hangUp)
		if _, err := io.WriteString(c, s); err != nil || hang {
			return
		}
	}
}

// strict reads a request that is written as it should be.
type strict struct {
	br   *bufio.Reader
	head func(arrival) // called with it
	raw  strings.Builder
	a    arrival
}

const token = "[!#$%&'*+.^_`|~0-9A-Za-z-]+"

var (
	requestLine = regexp.MustCompile(`^` + token + ` [!-~\x80-\xff]+ HTTP/1\.1$`)
	fieldLine   = regexp.MustCompile(`^` + token + `: ([!-~\x80-\xff]([\t -~\x80-\xff]*[!-~\x80-\xff])?)?$`)
	lengthOf    = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)
	chunkLine   = regexp.MustCompile(`^(0|[1-9a-f][0-9a-f]{0,7})$`)
)

var errMalformed = errors.New("malformed")

func (s *strict) request() arrival {
	err := s.read()
	if errors.Is(err, errMalformed) {
		s.a.Fault = err.Error()
	}
	s.a.Whole = err == nil // else it may have broken off
	s.a.raw = s.raw.String()
	return s.a
}

// line reads a line, which must match want unless it is empty.
func (s *strict) line(want *regexp.Regexp) (string, error) {
	line, err := s.br.ReadString('\n')
	s.raw.WriteString(line)
	if err != nil {
		return "", err
	}
	// Bytes are made characters, for the sake of those that are not UTF-8.
	text, ok := strings.CutSuffix(line, "\r\n")
	if !ok || text != "" && !want.MatchString(latin1(text)) {
		return text, fmt.Errorf("%w line %q", errMalformed, line)
	}
	return text, nil
}

// latin1 makes a character of each byte.
func latin1(s string) string {
	runes := make([]rune, len(s))
	for i := range len(s) {
		runes[i] = rune(s[i])
	}
	return string(runes)
}

// bytes reads n of them.
func (s *strict) bytes(n int64) (string, error) {
	var b strings.Builder
	_, err := io.CopyN(io.MultiWriter(&s.raw, &b), s.br, n)
	return b.String(), err
}

func (s *strict) read() (err error) {
	if s.a.Line, err = s.line(requestLine); err != nil {
		return err
	}
	count := map[string]int{}
	for {
		line, err := s.line(fieldLine)
		if err != nil {
			return err
		}
		if line == "" {
			break
		}
		name, value, _ := strings.Cut(line, ": ")
		count[name]++
		switch name {
		case "Content-Length":
			s.a.Length = value
		case "Transfer-Encoding":
			s.a.Coding = value
		case "Expect":
			s.a.expects = strings.EqualFold(value, "100-continue")
		case "X-Forwarded-For":
			s.a.Way = value
		}
	}
	lengths, codings := count["Content-Length"], count["Transfer-Encoding"]
	if count["Host"] != 1 || lengths+codings > 1 || codings > 0 && s.a.Coding != "chunked" || lengths > 0 && !lengthOf.MatchString(s.a.Length) {
		return fmt.Errorf("%w head: %v, %q, %q", errMalformed, count, s.a.Length, s.a.Coding)
	}
	s.a.expects = s.a.expects && (codings > 0 || lengths > 0 && s.a.Length != "0")
	s.head(s.a)
	if codings > 0 {
		return s.chunks()
	}
	n := int64(0)
	if lengths > 0 {
		if n, err = strconv.ParseInt(s.a.Length, 10, 64); err != nil {
			return err
		}
	}
	s.a.Body, err = s.bytes(n)
	return err
}

func (s *strict) chunks() error {
	for {
		line, err := s.line(chunkLine)
		if err != nil {
			return err
		}
		if line == "0" {
			break
		}
		n, err := strconv.ParseInt(line, 16, 64)
		if err != nil {
			return err
		}
		part, err := s.bytes(n)
		if err != nil {
			return err
		}
		s.a.Body += part
		if end, err := s.bytes(2); err != nil {
			return err
		} else if end != "\r\n" {
			return fmt.Errorf("%w end of a chunk: %q", errMalformed, end)
		}
	}
	for {
		if line, err := s.line(fieldLine); err != nil || line == "" {
			return err
		}
	}
}

// fields are the field lines of a request as the recorder has it, but for those that
// are as they always are.
func (a arrival) fields() string {
	head, _, _ := strings.Cut(a.raw, "\r\n\r\n")
	lines := strings.Split(head, "\r\n")[1:]
	return strings.Join(slices.DeleteFunc(lines, func(line string) bool {
		switch line {
		case "Host: front.test", "X-Forwarded-For: 127.0.0.1", "X-Forwarded-Host: front.test", "X-Forwarded-Proto: http":
			return true
		}
		return strings.HasPrefix(line, "Content-Length: ") || strings.HasPrefix(line, "Transfer-Encoding: ")
	}), " | ")
}

// barrier has addr answer a request that comes after all that was sent to it.
func barrier(t *testing.T, addr string) {
	t.Helper()
	resp, err := http.Get("http://" + addr + "/barrier")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
}
