package h1_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// heeding hears of informational answers, and refuses those of code stop.
type heeding struct {
	heard []string
	stop  int
	err   error
}

func (h *heeding) Informational(code int, header textproto.MIMEHeader) error {
	h.heard = append(h.heard, fmt.Sprint(code, header.Get("Link")))
	if code == h.stop {
		return h.err
	}
	return nil
}

func TestInformationalAnswersArePassedOn(t *testing.T) {
	const hint = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
	errStop := errors.New("stop")
	for _, c := range []struct {
		name   string
		answer string
		stop   int
		want   []string
		err    error
	}{
		{name: "none", answer: ok},
		{name: "one", answer: hint + ok, want: []string{"103</a>"}},
		{name: "one of each", answer: goOn + "HTTP/1.1 102 x\r\n\r\n" + hint + "HTTP/1.1 199 x\r\n\r\n" + ok, want: []string{"100", "102", "103</a>", "199"}},
		{name: "one with a length, which has no body", answer: "HTTP/1.1 103 x\r\nContent-Length: 9\r\n\r\n" + ok, want: []string{"103"}},
		{name: "one that is refused", answer: goOn + hint + ok, stop: 103, want: []string{"100", "103</a>"}, err: errStop},
		{name: "one and an end", answer: hint, want: []string{"103</a>"}, err: io.EOF},
	} {
		bubble(t, c.name, h1.Config{}, once(c.answer), func(t *testing.T, r *rig) {
			events := &heeding{stop: c.stop, err: errStop}
			req := request(t, "GET", nil)
			resp, err := r.pool.RoundTrip(t.Context(), new(h1.Exchange), outgoing(req), events, req)
			if !errors.Is(err, c.err) || (resp == nil) != (c.err != nil) {
				t.Errorf("RoundTrip() = %v, want %v", err, c.err)
			}
			if resp != nil {
				resp.Body.Close()
			}
			if !slices.Equal(events.heard, c.want) {
				t.Errorf("heard %q, want %q", events.heard, c.want)
			}
		})
	}
}

const switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n"

// TestA101IsATunnel has a server that greets with the head of its answer, echoes, and
// says goodbye.
func TestA101IsATunnel(t *testing.T) {
	serve := func(p *peer) {
		p.hear()
		p.say(switching + "hello ")
		io.Copy(p, p.br)
		p.say("bye")
		p.Close()
	}
	both(t, "with an echo", h1.Config{HeaderTimeout: time.Second}, serve, func(t *testing.T, r *rig) {
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := r.send(request(t, "GET", nil).WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("Upgrade") != "echo" {
			t.Errorf("answer %+v", resp)
		}
		tunnel, isTunnel := resp.Body.(io.ReadWriteCloser)
		if !isTunnel {
			t.Fatalf("the body is a %T, want an io.ReadWriteCloser", resp.Body)
		}
		linger(time.Hour) // no time-out of the head's is left
		if r.transport == nil {
			cancel() // was for the handshake
			synctest.Wait()
		}
		io.WriteString(tunnel, "echo ")
		if b := make([]byte, len("hello echo ")); true {
			if _, err := io.ReadFull(tunnel, b); string(b) != "hello echo " || err != nil {
				t.Errorf("read %q, %v", b, err)
			}
		}
		cw, half := tunnel.(interface{ CloseWrite() error })
		if !half && r.transport == nil {
			t.Fatal("the tunnel has no CloseWrite")
		}
		if half {
			if err := cw.CloseWrite(); err != nil {
				t.Errorf("CloseWrite() = %v", err)
			}
			if b, err := io.ReadAll(tunnel); string(b) != "bye" || err != nil {
				t.Errorf("read %q, %v, want bye", b, err)
			}
		}
		tunnel.Close()
		cancel()
		if r.transport == nil {
			r.wantClosed(h1.ReasonAnswer, 1)
		}
	})
}

func TestA101BeforeTheWholeRequestIsMalformed(t *testing.T) {
	serve := func(p *peer) {
		http.ReadRequest(p.br)
		p.say(switching)
		io.Copy(io.Discard, p.br)
	}
	for name, make := range map[string]func(t *testing.T, body io.Reader) *http.Request{
		"of a body that is on its way":    func(t *testing.T, body io.Reader) *http.Request { return request(t, "POST", body) },
		"of a body that is not asked for": expecting,
	} {
		bubble(t, name, h1.Config{}, serve, func(t *testing.T, r *rig) {
			body := newPipe()
			if _, err := r.send(make(t, body)); !errors.Is(err, h1.ErrAnswer) || !body.isClosed() {
				t.Errorf("RoundTrip() = %v, body closed: %v, want ErrAnswer, true", err, body.isClosed())
			}
		})
	}
}
