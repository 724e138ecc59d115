package lb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// handlerTransport is how a target is reached that is a Handler in this process: it
// calls that in place of a server, on a goroutine of its own.
type handlerTransport struct {
	handler   atomic.Pointer[http.Handler]
	work      *gate
	panics    *panics
	abandoned *atomic.Int64
}

// RoundTrip returns as soon as the handler has written a header, or has returned. A
// Pool is asked through its own RoundTrip, so that its upgrades and its errors come
// through.
func (t *handlerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	h := *t.handler.Load()
	if p, ok := h.(*Pool); ok {
		resp, c, err := p.roundTrip(r)
		if err == nil {
			c.hideBackend(resp) // the pool around it does not know whose address to look for
		}
		return resp, err
	}
	ctx, cancel := context.WithCancel(withoutTrace{r.Context()})
	in := serverRequest(r, ctx)
	body, pipe := io.Pipe()
	w := &handlerWriter{r: r, header: make(http.Header), pipe: pipe, committed: make(chan struct{})}
	if !t.work.enter() {
		cancel()
		in.Body.Close()
		return nil, ErrClosed
	}
	stop := context.AfterFunc(ctx, func() { t.ended(ctx, w) })
	go func() {
		defer t.work.leave()
		defer cancel()
		t.serve(h, w, in)
		stop()
	}()
	select {
	case <-w.committed:
	case <-ctx.Done():
		select {
		case <-w.committed: // it has answered, and returned
		default:
			return nil, ctx.Err()
		}
	}
	if w.failure != nil {
		return nil, w.failure
	}
	return w.response(body, cancel), nil
}

// withoutTrace hides the client trace of a context: from a handler, which may well send
// requests of its own in its request's, and from who would call it a second time.
type withoutTrace struct{ context.Context }

func (c withoutTrace) Value(key any) any {
	v := c.Context.Value(key)
	if _, ok := v.(*httptrace.ClientTrace); ok {
		return (*httptrace.ClientTrace)(nil)
	}
	return v
}

// serverRequest is r as a server would hand it to its handler.
func serverRequest(r *http.Request, ctx context.Context) *http.Request {
	in := r.WithContext(ctx)
	u := *r.URL
	in.RequestURI = u.RequestURI()
	if raw := rawTarget(r.URL); raw != "" {
		if in.RequestURI = raw; u.RawQuery != "" || u.ForceQuery {
			in.RequestURI += "?" + u.RawQuery
		}
	}
	u.Scheme, u.Host, u.Opaque = "", "", ""
	in.URL = &u
	in.Proto, in.ProtoMajor, in.ProtoMinor = "HTTP/1.1", 1, 1
	in.Header = r.Header.Clone()
	if in.Header == nil {
		in.Header = make(http.Header)
	}
	if ua, ok := in.Header["User-Agent"]; ok && len(ua) == 0 {
		delete(in.Header, "User-Agent")
	}
	if in.Body == nil {
		in.Body = http.NoBody
	}
	return in
}

var errHandlerPanic = errors.New("handler panicked")

// serve calls h, whose panic is a failure of the backend, or a cut if the answer has
// begun.
func (t *handlerTransport) serve(h http.Handler, w *handlerWriter, in *http.Request) {
	defer in.Body.Close()
	failure := errors.New("handler ended its goroutine")
	defer func() {
		if v := recover(); v != nil {
			failure = http.ErrAbortHandler
			if v != http.ErrAbortHandler {
				t.panics.caught("the Handler of a target", v)
				failure = fmt.Errorf("%w: %v", errHandlerPanic, v)
			}
		}
		w.finish(failure)
	}()
	h.ServeHTTP(w, in)
	failure = nil
}

// ended counts a handler that goes on although its request has ended.
func (t *handlerTransport) ended(ctx context.Context, w *handlerWriter) {
	w.pipe.CloseWithError(ctx.Err())
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.returned {
		w.late = time.AfterFunc(closeGrace, func() { t.abandoned.Add(1) })
	}
}

// handlerBody is the body of a handler's answer. Closing it ends the request.
type handlerBody struct {
	*io.PipeReader
	w       *handlerWriter
	trailer http.Header // of the answer
	cancel  context.CancelFunc
}

// Read fills in the trailers at the end of the body, where their reader looks for them.
func (b *handlerBody) Read(p []byte) (int, error) {
	n, err := b.PipeReader.Read(p)
	if err == io.EOF {
		maps.Copy(b.trailer, b.w.trailing)
	}
	return n, err
}

func (b *handlerBody) Close() error {
	b.cancel()
	return b.PipeReader.Close()
}

// handlerWriter is the http.ResponseWriter of a handler in this process. It supports
// Flush and full duplex, but cannot be taken over.
type handlerWriter struct {
	r         *http.Request
	header    http.Header // the handler's
	pipe      *io.PipeWriter
	committed chan struct{} // closed when the answer has begun, or failed before

	once      sync.Once
	status    int         // written before committed is closed, as are the following
	sent      http.Header // header when it was committed
	announced []string    // names of trailers
	length    int64
	failure   error

	trailing http.Header // the trailers, before pipe comes to its end

	mu       sync.Mutex // guards the following
	returned bool       // the handler has
	late     *time.Timer
}

func (w *handlerWriter) Header() http.Header { return w.header }

// EnableFullDuplex does nothing: reading never ends because of writing.
func (w *handlerWriter) EnableFullDuplex() error { return nil }

func (w *handlerWriter) WriteHeader(code int) {
	if code >= 100 && code < 200 && code != http.StatusSwitchingProtocols {
		if trace := httptrace.ContextClientTrace(w.r.Context()); trace != nil && trace.Got1xxResponse != nil {
			// An error would end a connection, of which there is none.
			_ = trace.Got1xxResponse(code, textproto.MIMEHeader(w.header.Clone()))
		}
		return
	}
	w.commit(code)
}

// commit begins the answer, once.
func (w *handlerWriter) commit(code int) {
	w.once.Do(func() {
		w.status, w.sent = code, w.header.Clone()
		w.length = -1
		if n, err := strconv.ParseInt(w.sent.Get("Content-Length"), 10, 64); err == nil && n >= 0 {
			w.length = n
		}
		for _, line := range w.sent["Trailer"] {
			for name := range strings.SplitSeq(line, ",") {
				w.announced = append(w.announced, textproto.CanonicalMIMEHeaderKey(textproto.TrimString(name)))
			}
		}
		close(w.committed)
	})
}

func (w *handlerWriter) Write(p []byte) (int, error) {
	w.commit(http.StatusOK)
	switch {
	case w.r.Method == http.MethodHead:
		return len(p), nil
	case w.status == http.StatusNoContent || w.status == http.StatusNotModified:
		return 0, http.ErrBodyNotAllowed
	}
	return w.pipe.Write(p)
}

// FlushError begins the answer; what is written is with the reader at once.
func (w *handlerWriter) FlushError() error {
	w.commit(http.StatusOK)
	return nil
}

// Flush is FlushError for handlers that know no other.
func (w *handlerWriter) Flush() { w.commit(http.StatusOK) }

// finish ends the answer: with its trailers, or with failure.
func (w *handlerWriter) finish(failure error) {
	w.mu.Lock()
	w.returned = true
	if w.late != nil {
		w.late.Stop()
	}
	w.mu.Unlock()
	if failure != nil {
		w.once.Do(func() {
			w.failure = failure
			close(w.committed)
		})
		w.pipe.CloseWithError(failure)
		return
	}
	w.once.Do(func() { // an answer without a body, whose length is known
		w.status, w.sent = http.StatusOK, w.header.Clone()
		close(w.committed)
	})
	w.trailing = make(http.Header)
	for name, values := range w.header {
		if plain, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			w.trailing[textproto.CanonicalMIMEHeaderKey(plain)] = values
		} else if slices.Contains(w.announced, name) {
			w.trailing[name] = values
		}
	}
	w.pipe.Close()
}

// response is the answer with body.
func (w *handlerWriter) response(body *io.PipeReader, end context.CancelFunc) *http.Response {
	trailer := make(http.Header, len(w.announced))
	for _, name := range w.announced {
		trailer[name] = nil
	}
	for name := range w.sent {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			delete(w.sent, name)
		}
	}
	return &http.Response{
		Status:     fmt.Sprintf("%03d %s", w.status, http.StatusText(w.status)),
		StatusCode: w.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: w.sent, ContentLength: w.length, Trailer: trailer, Request: w.r,
		Body: &handlerBody{PipeReader: body, w: w, trailer: trailer, cancel: end},
	}
}
