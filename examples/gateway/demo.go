package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// maxSlow bounds what /slow waits.
const maxSlow = time.Minute

// demoBackend is a backend of the demonstration. It answers with its name and the
// length of the request's body, and its probe can be switched:
//
//	POST /probe/off     its probe answers 503 from now on
//	POST /probe/on      and 200 again
//	GET /slow?ms=5000   answers after that time
type demoBackend struct {
	name, url string
	probe     string // what a probe asks for
	off       atomic.Bool
	server    *http.Server
	ended     chan struct{} // closed when server has
}

// startDemo starts the backends of the demonstration, on free ports that only this
// machine can reach.
func startDemo(probe string) (backends []*demoBackend, err error) {
	for _, name := range []string{"a", "b", "c"} {
		b, err := newDemoBackend(name, "127.0.0.1:0", probe)
		if err != nil {
			for _, b := range backends {
				b.close()
			}
			return nil, fmt.Errorf("cannot start the backends of the demonstration: %w", err)
		}
		backends = append(backends, b)
	}
	return backends, nil
}

func newDemoBackend(name, addr, probe string) (*demoBackend, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	b := &demoBackend{name: name, url: urlOf(l), probe: probe, ended: make(chan struct{})}
	b.server = &http.Server{Handler: b, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		defer close(b.ended)
		_ = b.server.Serve(l) // if it fails, the probes see it
	}()
	return b, nil
}

// close ends b at once, with whatever is under way.
func (b *demoBackend) close() {
	b.server.Close()
	<-b.ended
}

func (b *demoBackend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch path := r.URL.Path; {
	case r.Method == http.MethodPost && (path == "/probe/off" || path == "/probe/on"):
		b.off.Store(path == "/probe/off")
		fmt.Fprintf(w, "the probe of %s is now %s\n", b.name, path[len("/probe/"):])
	case r.RequestURI == b.probe && b.off.Load():
		http.Error(w, "switched off", http.StatusServiceUnavailable)
	case r.RequestURI == b.probe:
		fmt.Fprintln(w, "ok")
	default:
		n, _ := io.Copy(io.Discard, r.Body) // of a broken one, what there is
		if path == "/slow" {
			wait(r)
		}
		fmt.Fprintf(w, "%s, %d bytes\n", b.name, n)
	}
}

// wait waits for as long as r asks, or until its client has left.
func wait(r *http.Request) {
	ms, err := strconv.Atoi(r.URL.Query().Get("ms"))
	if err != nil {
		return
	}
	timer := time.NewTimer(min(time.Duration(ms)*time.Millisecond, maxSlow))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
	}
}

// introduce prints commands that show what the gateway does, to be copied line by
// line. They are for any shell. patience is how long it takes until a probe that was
// switched has an effect, 0 if it has none because the probes ask for no path.
func introduce(w io.Writer, backends []*demoBackend, traffic, admin string, patience time.Duration) {
	fmt.Fprintf(w, "\nThree backends run in this program:\n")
	for _, b := range backends {
		fmt.Fprintf(w, "%s on %s\n", b.name, b.url)
	}
	say := func(comment string, commands ...string) {
		fmt.Fprintf(w, "\n# %s\n%s\n", comment, strings.Join(commands, "\n"))
	}
	turns := "curl -s" + strings.Repeat(" "+traffic+"/", len(backends))
	stats := "curl -s " + admin + "/stats"
	fmt.Fprintf(w, "\nTry this in another terminal, and watch the log in this one.\n")
	say("who answers: with -algo round-robin each in turn", turns)
	say("an upload", "curl -s -d hello "+traffic+"/")
	if patience > 0 {
		off, on := "curl -s -X POST", "curl -s -X POST"
		for _, b := range backends {
			off += " " + b.url + "/probe/off"
			on += " " + b.url + "/probe/on"
		}
		b := backends[1]
		say(b.name+" lives on, but its probe fails: three in a row take it out", "curl -s -X POST "+b.url+"/probe/off")
		say(fmt.Sprintf("%v later: only the others answer", patience), turns, stats)
		say(b.name+"'s probe passes again: two in a row bring it back", "curl -s -X POST "+b.url+"/probe/on")
		say(fmt.Sprintf("%v later: it answers again", patience), turns)
		say("all probes fail", off)
		say(fmt.Sprintf("%v later: 503 at once, and when to ask again", patience), "curl -s -i "+traffic+"/")
		say("all probes pass again", on)
	}
	say("what was counted", stats)
	say("press Ctrl-C here while this runs: it is answered, and then the gateway ends", `curl -s "`+traffic+`/slow?ms=5000"`)
}
