package lb

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"example.com/lb/internal/h1"
)

// ProxyRequest is what a hook of WithRewrite may change of a request on its way to a
// backend.
type ProxyRequest struct {
	// In is the request as it came: to ServeHTTP or to RoundTrip. ClientIP knows its
	// client. It must not be changed.
	In *http.Request
	// Out is what goes out: without hop-by-hop fields and with the X-Forwarded fields
	// set, if it came to ServeHTTP. Its header, Host, and the path and query of its URL
	// may be changed; they are this attempt's own. The path has that of the target's URL
	// in front already; who changes Path changes RawPath along with it, or clears it, and
	// the path is escaped anew. Whatever is done to its Method, Body, ContentLength and
	// to the scheme and host of its URL is undone.
	Out *http.Request
	// Backend is where it goes.
	Backend *Backend
}

// errHook is the error of an attempt that a hook has made impossible.
var errHook = errors.New("hook went wrong")

// rewrite lets the user's hook change out, which is this attempt's alone.
func (a *attempt) rewrite(hook func(*ProxyRequest), out *http.Request) (err error) {
	raw := a.url.Opaque
	a.url.Opaque = ""
	before, u := a.url, a.url
	kept := *out
	out.URL, out.Header = &u, out.Header.Clone()
	defer func() {
		if v := recover(); v != nil {
			a.call.pool.set.panics.caught("the hook of WithRewrite", v)
			err = fmt.Errorf("%w: WithRewrite panicked: %v", errHook, v)
		}
	}()
	hook(&ProxyRequest{In: a.call.asked, Out: out, Backend: a.backend})

	out.Method, out.Body, out.GetBody, out.ContentLength = kept.Method, kept.Body, kept.GetBody, kept.ContentLength
	out.TransferEncoding, out.Trailer, out.Close = kept.TransferEncoding, kept.Trailer, kept.Close
	if out.Header == nil {
		out.Header = make(http.Header)
	}
	if out.URL == nil {
		out.URL = new(url.URL)
	}
	a.url = *out.URL
	a.url.Scheme, a.url.Host, a.url.User, a.url.Opaque = before.Scheme, before.Host, nil, ""
	if a.url.Path == before.Path && a.url.RawPath == before.RawPath {
		a.url.Opaque = raw // nobody has touched the path: byte for byte as it came
	}
	if a.url.Path != "" && a.url.Path[0] != '/' && a.url.Path != "*" {
		a.url.Path, a.url.RawPath = "/"+a.url.Path, ""
	}
	out.URL = &a.url
	var sends h1.Request
	fillRequest(&sends, out)
	if err := sends.Check(); err != nil {
		return fmt.Errorf("%w: WithRewrite: %w", errHook, err)
	}
	return nil
}

// modify lets the user's hook change the answer.
func (s *serving) modify(hook func(*http.Response) error, resp *http.Response) (err error) {
	body, status := resp.Body, resp.StatusCode
	defer func() {
		if v := recover(); v != nil {
			s.pool.set.panics.caught("the hook of WithModifyResponse", v)
			err = fmt.Errorf("%w: WithModifyResponse panicked: %v", errHook, v)
		}
		if code := resp.StatusCode; err == nil && (code < 200 && code != status || code > 999) {
			err = fmt.Errorf("%w: WithModifyResponse made it status %d", errHook, code)
		}
		if resp.Body == nil {
			resp.Body = http.NoBody
		}
		if resp.Body != body {
			s.replaced = resp.Body
		}
	}()
	resp.Request = s.asked.WithContext(s.call.answering)
	return hook(resp)
}

type backendKey struct{}

// BackendFrom returns the backend that a request is on, from the context of
// ProxyRequest.Out in a hook of WithRewrite, or of Response.Request in one of
// WithModifyResponse; nil elsewhere.
func BackendFrom(ctx context.Context) *Backend {
	b, _ := ctx.Value(backendKey{}).(*Backend)
	return b
}
