package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"example.com/lb/lbtest"
)

// waitClosed waits until the traffic port takes no more connections.
func waitClosed(t *testing.T, c *client) {
	t.Helper()
	eventually(t, "the traffic port is closed", func() bool {
		nc, err := net.Dial("tcp", strings.TrimPrefix(c.traffic, "http://"))
		if err == nil {
			nc.Close()
		}
		return err != nil
	})
}

// upload is a request whose body the test writes bit by bit.
type upload struct {
	body   *io.PipeWriter
	answer chan answer // one, or closed if there is none
}

// startUpload begins an upload and waits until so many attempts are in flight.
func startUpload(t *testing.T, c *client, inFlight int64) *upload {
	t.Helper()
	r, w := io.Pipe()
	u := &upload{body: w, answer: make(chan answer, 1)}
	req, err := http.NewRequest(http.MethodPost, c.traffic, r)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(u.answer)
		if a, err := c.send(req); err == nil {
			u.answer <- a
		}
	}()
	u.write(t, "hello ")
	eventually(t, "the upload is under way", func() bool { return c.stats(t).InFlight == inFlight })
	return u
}

func (u *upload) write(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(u.body, text); err != nil {
		t.Fatal(err)
	}
}

func TestRequestUnderWayIsAnsweredAtTheEnd(t *testing.T) {
	t.Parallel()
	g := start(t)
	g.waitUsable(t, 3)
	slow := make(chan answer, 1)
	go func() { // the last line of the demonstration, made shorter
		a, _ := g.do(http.MethodGet, g.traffic+"/slow?ms=500", "")
		slow <- a
	}()
	eventually(t, "the request is under way", func() bool { return g.stats(t).InFlight == 1 })
	g.stop()
	if got := <-slow; got.status != http.StatusOK || !strings.HasSuffix(got.body, ", 0 bytes\n") {
		t.Errorf("the request under way was answered with %d %q, want 200 and all of it", got.status, got.body)
	}
	if <-g.ended; g.code != exitOK {
		t.Errorf("exit code %d, want %d", g.code, exitOK)
	}
}

func TestShutdownWaitsForWhatWasUpgraded(t *testing.T) {
	t.Parallel()
	b := newBackend(t, "b")
	b.Set(lbtest.Handle(http.HandlerFunc(echo)))
	g := start(t, backendsFlag(b))
	g.waitUsable(t, 1)
	nc, err := net.Dial("tcp", strings.TrimPrefix(g.traffic, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	fmt.Fprintf(nc, "GET / HTTP/1.1\r\nHost: gateway\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	in := bufio.NewReader(nc)
	resp, err := http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("the upgrade was answered with %v, %v, want 101", resp, err)
	}
	g.stop()
	waitClosed(t, g.client)
	fmt.Fprintln(nc, "still there")
	if line, err := in.ReadString('\n'); err != nil || line != "still there\n" {
		t.Errorf("the echo is %q, %v, want what was sent", line, err)
	}
	if g.hasEnded() {
		t.Error("the gateway has ended while something upgraded was under way")
	}
	nc.Close()
	if <-g.ended; g.code != exitOK {
		t.Errorf("exit code %d, want %d", g.code, exitOK)
	}
}

// echo takes the connection over and sends back what comes.
func echo(w http.ResponseWriter, _ *http.Request) {
	nc, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer nc.Close()
	fmt.Fprintf(nc, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	_, _ = io.Copy(nc, buffered) // ends when either side does
}

func TestShutdownCutsWhatTakesTooLong(t *testing.T) {
	t.Parallel()
	g := start(t, "-shutdown-timeout", "50ms")
	g.waitUsable(t, 3)
	u := startUpload(t, g.client, 1)
	defer u.body.Close()
	g.stop()
	<-g.ended
	want := "gateway: requests were cut that had not ended within -shutdown-timeout 50ms\n"
	if g.code != exitFailed || !strings.HasSuffix(g.stderr.String(), want) {
		t.Errorf("exit code %d, want %d and the last line %q", g.code, exitFailed, want)
	}
	u.body.Close() // http.Client may go on reading it although the connection is gone
	if a, ok := <-u.answer; ok && a.status == http.StatusOK {
		t.Errorf("the upload was answered with %d %q although it was cut", a.status, a.body)
	}
}

// TestUnusedConnectionIsNoRequestThatWasCut: net/http waits for connections that have
// brought no request yet, as browsers open them, and reports that its time ran out.
func TestUnusedConnectionIsNoRequestThatWasCut(t *testing.T) {
	t.Parallel()
	g := start(t, "-shutdown-timeout", "50ms")
	g.waitUsable(t, 3)
	nc, err := net.Dial("tcp", strings.TrimPrefix(g.traffic, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	g.get(t, g.traffic) // the port accepts in order: it has the connection
	g.stop()
	if <-g.ended; g.code != exitOK {
		t.Errorf("exit code %d, want %d", g.code, exitOK)
	}
}
