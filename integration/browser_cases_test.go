//go:build unix

package integration

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// browserCases are those that can be had with a protocol.
func browserCases(protocol string) []browserCase {
	cases := []browserCase{
		{name: "the page comes with the protocol", path: "page", page: []string{protocol}},
	}
	cases = append(cases, browserStreams...)
	if protocol == "h2" {
		cases = append(cases, browserUploads...)
	}
	cases = append(cases, browserSockets...)
	return append(cases, browserCase{
		name: "what stays open", path: "left", serve: serveLeft, left: 2,
		killed: []string{"events: gone", "gorilla: the end", "stream: gone"},
	})
}

const (
	shortLine = "zwei ☕"
	lineBytes = 100_000
)

var longLine = strings.Repeat("x", lineBytes)

var browserStreams = []browserCase{
	{
		name: "events come one by one and go on after an end", path: "events", serve: serveEvents, cut: 1,
		page: []string{
			"open", "message 1: one", "note 2: größer\nals €", "again",
			"open", "message 3: three", "again",
			"open", "message 4: four", "again",
			"over",
		},
		backend: []string{`after ""`, `after "2"`, `after "3"`, `after "4"`},
	},
	{
		name: "a page that closes its events is gone", path: "events-close", left: 1,
		serve: func(c *call) {
			c.w.Header().Set("Content-Type", "text/event-stream")
			c.send("data: one\n\n")
			c.gone()
		},
		page: []string{"closed"}, backend: []string{"events: gone"},
	},
	{
		name: "an answer comes as it is sent", path: "stream", serve: serveStream,
		page: []string{
			"one", shortLine, "100000 times x", "last", "end",
			"one", shortLine, "100000 times x", "last", "end",
		},
	},
	{
		name: "a fetch that is aborted is cancelled", path: "abort", serve: serveAbort, left: 3,
		page:    []string{"AbortError", "AbortError", "cancelled"},
		backend: []string{"early: gone", "late: gone", "late: gone"},
	},
	{
		name: "an answer that breaks off is an error", path: "cut", serve: serveCut, cut: 4,
		page: []string{"part", "TypeError", "TypeError", "part", "TypeError", "TypeError"},
	},
}

// serveEvents ends with and without order, and asks for another try soon.
func serveEvents(c *call) {
	last := c.r.Header.Get("Last-Event-ID")
	c.seen.add("after " + strconv.Quote(last))
	if last == "4" {
		c.w.WriteHeader(http.StatusNoContent) // there is nothing to come back for
		return
	}
	c.w.Header().Set("Content-Type", "text/event-stream")
	c.send("") // the header alone
	c.heard("open")
	switch last {
	case "":
		c.send("retry: 10\nid: 1\ndata: one\n\n")
		c.heard("message 1: one")
		c.send(": still there\n\n")
		c.send("id: 2\nevent: note\ndata: größer\ndata: als €\n\n")
		c.heard("note 2: größer\nals €")
	case "2":
		c.send("id: 3\ndata: three\n\n")
		c.heard("message 3: three")
		panic(http.ErrAbortHandler)
	case "3":
		c.send("id: 4\ndata: four\n\n")
		c.heard("message 4: four")
	}
}

// plainBytes keeps the browser from waiting for more to guess a type from.
func plainBytes(c *call) {
	c.w.Header().Set("Content-Type", "application/octet-stream")
	c.w.Header().Set("X-Content-Type-Options", "nosniff")
}

func serveStream(c *call) {
	plainBytes(c)
	lines := []string{"one", shortLine, longLine}
	const last = "last\n" // not waited for: the connection is free for other requests once all has come
	if c.what() == "length" {
		c.w.Header().Set("Content-Length", strconv.Itoa(len(strings.Join(lines, "\n")+"\n"+last)))
	}
	c.send("")
	c.heard("200")
	for _, line := range lines {
		c.send(line + "\n")
		c.heard(line)
	}
	c.send(last)
}

func serveAbort(c *call) {
	if c.what() == "early" {
		c.tell("here")
		c.gone()
		return
	}
	plainBytes(c)
	c.send("part\n")
	c.heard("part")
	c.gone()
}

func serveCut(c *call) {
	plainBytes(c)
	if c.what() == "length" {
		c.w.Header().Set("Content-Length", "100")
	}
	c.send("part\n")
	c.heard("part")
	panic(http.ErrAbortHandler)
}

var browserUploads = []browserCase{
	{
		name: "an upload arrives as it is sent", path: "upload", serve: serveUpload,
		page: []string{"lines: 3, error: <nil>"},
	},
	{
		name: "an upload that breaks off is cancelled", path: "upload-abort", serve: serveBrokenUpload, left: 2,
		page:    []string{"AbortError", "TypeError"},
		backend: []string{"abort: gone", "break: lines: 1, error: unexpected EOF", "break: gone"},
	},
}

// lines tells the page each line of the body that has come.
func (c *call) lines() string {
	lines := bufio.NewScanner(c.r.Body)
	lines.Buffer(nil, lineBytes+1)
	n := 0
	for ; lines.Scan(); n++ {
		c.tell(lines.Text())
	}
	return fmt.Sprintf("lines: %d, error: %v", n, lines.Err())
}

func serveUpload(c *call) { c.send(c.lines()) }

func serveBrokenUpload(c *call) {
	// Chromium ends the body of a request that it is told to abort before it cancels it.
	if end := c.lines(); c.what() != "abort" {
		c.seen.add(c.what() + ": " + end)
	}
	c.gone()
}

var browserSockets = []browserCase{
	{
		name: "messages come back", path: "echo",
		serve: serveSocket(func(s socket) error { return echo(&session{socket: s}) }),
		page: []string{
			"gorilla: v2.chat ", `closed with 1000 ""`,
			"gorilla?deflate: v2.chat permessage-deflate", `closed with 1000 ""`,
			"coder: v2.chat ", `closed with 1000 ""`,
			"coder?deflate: v2.chat permessage-deflate", `closed with 1000 ""`,
		},
		backend: []string{`gorilla: 1000 ""`, `gorilla: 1000 ""`, `coder: 1000 ""`, `coder: 1000 ""`},
	},
	{
		name: "the page's closing code arrives", path: "page-closes",
		serve:   serveSocket(func(s socket) error { return read(s, func() {}).err }),
		page:    []string{`closed with 4001 ""`, `closed with 4001 "gone for tea ☕"`}, // gorilla answers with the code
		backend: []string{`gorilla: 4001 "gone for tea ☕"`, `coder: 4001 "gone for tea ☕"`},
	},
	{
		name: "the backend's closing code arrives", path: "backend-closes",
		serve: serveSocket(func(s socket) error {
			if err := s.shut(wsCode, wsReason); err != nil {
				return err
			}
			return read(s, func() {}).err
		}),
		page:    []string{`closed with 4001 "gone for tea ☕"`, `closed with 4001 "gone for tea ☕"`},
		backend: []string{`gorilla: 4001 "gone for tea ☕"`, `coder: closed`}, // coder takes the answer itself
	},
	{
		name: "a backend that dies has not closed", path: "backend-dies",
		serve:   serveSocket(func(s socket) error { return read(s, func() {}).err }),
		page:    []string{`closed with 1006 "", not cleanly`, `closed with 1006 "", not cleanly`},
		backend: []string{"gorilla: the end", "coder: the end"},
	},
	{
		name: "a refusal is an error", path: "refused",
		serve: func(c *call) { http.Error(c.w, "not you", http.StatusForbidden) },
		page:  []string{"error", `closed with 1006 "", not cleanly`},
	},
}

// serveSocket accepts WebSockets with the library that the path names. They end when
// serve does.
func serveSocket(serve func(socket) error) func(*call) {
	return func(c *call) {
		lib := libraries[slices.IndexFunc(libraries, func(l library) bool { return l.name == c.what() })]
		s, err := lib.accept(c.w, c.r, wsOptions{protocols: []string{"v2.chat"}, deflate: c.r.URL.Query().Has("deflate")})
		if err != nil {
			c.giveUp("%v", err)
		}
		defer s.abort()
		end := "the end"
		if err := serve(s); errors.Is(err, net.ErrClosed) {
			end = "closed"
		} else if code, reason := wsClosed(err); code != -1 {
			end = fmt.Sprintf("%d %q", code, reason)
		} else if err != nil {
			end = err.Error()
		}
		c.seen.add(c.what() + ": " + end)
	}
}

// serveLeft answers and stays.
func serveLeft(c *call) {
	switch c.what() {
	case "events":
		c.w.Header().Set("Content-Type", "text/event-stream")
		c.send("data: one\n\n")
	case "stream":
		plainBytes(c)
		c.send("one\n")
	default:
		serveSocket(func(s socket) error { return noClose(read(s, func() {}).err) })(c)
		return
	}
	c.gone()
}
