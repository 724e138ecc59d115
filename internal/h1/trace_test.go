package h1_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// trail is what the hooks of a trace are called with, in their order.
type trail struct {
	fall string // panic in that hook

	mu    sync.Mutex // guards the following
	heard []string
}

func (l *trail) add(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	l.mu.Lock()
	l.heard = append(l.heard, s)
	l.mu.Unlock()
	if name, _, _ := strings.Cut(s, " "); name == l.fall {
		panic(l.fall)
	}
}

func (l *trail) hooks() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GetConn: func(string) { l.add("GetConn") },
		GotConn: func(i httptrace.GotConnInfo) {
			l.add("GotConn reused %v idle %v for %v", i.Reused, i.WasIdle, i.IdleTime)
		},
		PutIdleConn:          func(err error) { l.add("PutIdleConn %v", err) },
		GotFirstResponseByte: func() { l.add("GotFirstResponseByte") },
		Got100Continue:       func() { l.add("Got100Continue") },
		WroteHeaders:         func() { l.add("WroteHeaders") },
		Wait100Continue:      func() { l.add("Wait100Continue") },
		WroteRequest:         func(i httptrace.WroteRequestInfo) { l.add("WroteRequest %v", i.Err) },
	}
}

// Informational makes trail hear the hints of an exchange.
func (l *trail) Informational(int, textproto.MIMEHeader) error { l.add("Informational"); return nil }

// sendTraced sends req with the hooks of l.
func (r *rig) sendTraced(req *http.Request, l *trail) (*http.Response, error) {
	if r.transport != nil {
		return r.send(req.WithContext(httptrace.WithClientTrace(req.Context(), l.hooks())))
	}
	out := outgoing(req)
	out.Trace = l.hooks()
	return r.pool.RoundTrip(req.Context(), new(h1.Exchange), out, silent{}, req)
}

// TestHooksAreCalledInOrder compares with net/http what has an order there. A bubble's
// clock makes that of the rest plain: the server waits before each thing it says.
func TestHooksAreCalledInOrder(t *testing.T) {
	const (
		first = "GotConn reused false idle false for 0s"
		again = "GotConn reused true idle true for 1m0s"
		wrote = "WroteRequest <nil>"
		put   = "PutIdleConn <nil>"
	)
	later := func(answers ...string) func(*peer) {
		return func(p *peer) {
			for {
				req, err := http.ReadRequest(p.br)
				if err != nil {
					return
				}
				for i, answer := range answers {
					if linger(time.Millisecond); i == len(answers)-1 {
						io.ReadAll(req.Body)
						linger(time.Millisecond)
					}
					p.say(answer)
				}
			}
		}
	}
	for _, c := range []struct {
		name    string
		serve   func(*peer)
		request func(t *testing.T) *http.Request
		second  bool // of two requests, a minute apart
		want    []string
	}{
		{name: "a GET", serve: later(ok), request: func(t *testing.T) *http.Request { return request(t, "GET", nil) },
			want: []string{"GetConn", first, "WroteHeaders", wrote, "GotFirstResponseByte", put}},
		{name: "a GET over a connection that was used", second: true, serve: later(ok), request: func(t *testing.T) *http.Request { return request(t, "GET", nil) },
			want: []string{"GetConn", again, "WroteHeaders", wrote, "GotFirstResponseByte", put}},
		{name: "a POST", serve: later(ok), request: func(t *testing.T) *http.Request { return request(t, "POST", strings.NewReader("hello")) },
			want: []string{"GetConn", first, "WroteHeaders", wrote, "GotFirstResponseByte", put}},
		{name: "a POST that waits for 100", serve: later(goOn, ok), request: func(t *testing.T) *http.Request { return expecting(t, strings.NewReader("hello")) },
			want: []string{"GetConn", first, "WroteHeaders", "Wait100Continue", "GotFirstResponseByte", "Got100Continue", wrote, put}},
		{name: "a POST that waits in vain", serve: func(p *peer) {
			for p.hear() != nil {
				linger(time.Millisecond)
				p.say(ok)
			}
		}, request: func(t *testing.T) *http.Request { return expecting(t, strings.NewReader("hello")) },
			want: []string{"GetConn", first, "WroteHeaders", "Wait100Continue", wrote, "GotFirstResponseByte", put}},
	} {
		both(t, c.name, h1.Config{}, c.serve, func(t *testing.T, r *rig) {
			if c.second {
				r.must()
				linger(time.Minute)
			}
			var l trail
			resp, err := r.sendTraced(c.request(t), &l)
			if err != nil {
				t.Fatal(err)
			}
			io.ReadAll(resp.Body)
			synctest.Wait()
			if !slices.Equal(l.heard, c.want) {
				t.Errorf("the hooks were called as\n%q, want\n%q", l.heard, c.want)
			}
		})
	}
}

func TestWroteHeaderFieldHearsOfTheHeader(t *testing.T) {
	bubble(t, "of a GET", h1.Config{}, always(noContent), func(t *testing.T, r *rig) {
		req := request(t, "GET", nil)
		req.Header = http.Header{"A": {"1", "2"}}
		out, heard := outgoing(req), ""
		out.Trace = &httptrace.ClientTrace{WroteHeaderField: func(name string, values []string) { heard += fmt.Sprint(name, values) }}
		if _, err := r.pool.RoundTrip(t.Context(), new(h1.Exchange), out, silent{}, req); err != nil || heard != "A[1 2]" {
			t.Errorf("heard %q, %v, want A[1 2]", heard, err)
		}
	})
}

// TestAPanicInAHookLeavesNothingBehind has a panic in each that is called within
// RoundTrip.
func TestAPanicInAHookLeavesNothingBehind(t *testing.T) {
	serve := func(p *peer) {
		if _, err := http.ReadRequest(p.br); err == nil {
			p.say(goOn + ok)
		}
	}
	for _, c := range []struct {
		hook string
		ask  bool
	}{
		{hook: "GetConn"}, {hook: "GotConn"}, {hook: "WroteHeaders"}, {hook: "GotFirstResponseByte"},
		{hook: "Informational"}, {hook: "Wait100Continue", ask: true}, {hook: "Got100Continue", ask: true},
		{hook: "GotFirstResponseByte", ask: true}, {hook: "Informational", ask: true},
	} {
		bubble(t, fmt.Sprintf("%s, asking: %v", c.hook, c.ask), h1.Config{}, serve, func(t *testing.T, r *rig) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			body := &tracked{Reader: newPipe()}
			l := &trail{fall: c.hook}
			req := request(t, "POST", body)
			if c.ask {
				req.Header.Set("Expect", "100-continue")
			}
			out := outgoing(req)
			out.Trace = l.hooks()
			out.Trace.WroteRequest = nil // is called on the goroutine of the upload
			func() {
				defer func() {
					if v := recover(); v != c.hook {
						t.Errorf("recovered %v, want %s", v, c.hook)
					}
				}()
				_, err := r.pool.RoundTrip(ctx, new(h1.Exchange), out, l, req)
				t.Errorf("RoundTrip() = %v, want a panic", err)
			}()
			synctest.Wait()
			if s := r.pool.Stats(); !body.closed() || s.Open != 0 || s.Opened != s.Closed[h1.ReasonFailed] {
				t.Errorf("body closed: %v, %+v, want true, no connection", body.closed(), s)
			}
		})
	}
}
