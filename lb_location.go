package lb

import (
	"net/http"
	"strings"
)

// hideBackend rewrites the locations of the answer, unless that is turned off.
func (c *call) hideBackend(resp *http.Response) {
	if e := &c.answering.backend.endpoint; e.scheme != "" && !c.pool.cfg.keepLocation {
		rewriteLocation(resp.Header, e)
	}
}

// rewriteLocation makes the fields of an answer that name the backend's own origin, or
// a path below the target's prefix, name what the client can ask for instead: clients
// are not shown addresses of backends (and could not reach many). They become paths
// alone (RFC 9110, section 10.2.2), which are right whatever the client knows this
// origin by.
func rewriteLocation(h http.Header, e *endpoint) {
	for _, name := range [...]string{"Location", "Content-Location"} {
		if values := h[name]; len(values) == 1 {
			if to, ok := clientLocation(values[0], e); ok {
				h[name] = []string{to}
			}
		}
	}
}

// clientLocation returns where location is for the client, and whether that is
// elsewhere than for the backend.
func clientLocation(location string, e *endpoint) (string, bool) {
	rest, hasScheme := cutPrefixFold(location, e.urlScheme()+":")
	switch {
	case strings.HasPrefix(rest, "//"):
	case hasScheme:
		return "", false
	case strings.HasPrefix(location, "/") && e.rawPrefix != "":
		return withoutPrefix(location, e.rawPrefix)
	default:
		return "", false
	}
	authority, path := rest[len("//"):], ""
	if i := strings.IndexAny(authority, "/?#"); i >= 0 {
		authority, path = authority[:i], authority[i:]
	}
	if !sameHost(authority[strings.LastIndexByte(authority, '@')+1:], e) {
		return "", false
	}
	if to, ok := withoutPrefix(path, e.rawPrefix); ok {
		return to, true
	}
	return withoutPrefix(path, "") // a place that the pool does not lead to; still, nobody is told where that is
}

// sameHost tells whether authority is the endpoint's, with or without the scheme's own
// port.
func sameHost(authority string, e *endpoint) bool {
	other := endpoint{scheme: e.scheme, host: strings.ToLower(authority)}
	return other.addr() == e.addr()
}

// withoutPrefix takes the target's prefix off a path, whatever follows it. One that
// begins with two slashes then would name a host; with a dot before them it does not.
func withoutPrefix(path, prefix string) (string, bool) {
	rest, ok := strings.CutPrefix(path, prefix)
	switch {
	case !ok:
		return "", false
	case strings.HasPrefix(rest, "//"):
		return "/." + rest, true
	case rest == "" || rest[0] == '?' || rest[0] == '#':
		return "/" + rest, true
	}
	return rest, rest[0] == '/'
}

func cutPrefixFold(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}
