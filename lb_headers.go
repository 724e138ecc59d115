package lb

import (
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

// The header rules, for requests on their way out and answers on their way back,
// upgrades included.

// isHopByHop tells whether a field is for one connection alone (RFC 9110, section
// 7.6.1), whether the Connection field names it or not.
func isHopByHop(name string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings":
		return true
	}
	return false
}

// mayTrail tells whether a field may come after a body (RFC 9110, section 6.5.1): not one
// that says how the message is framed, where it goes, who sends it or how it is to be
// processed, which a backend that merges trailers into the header would believe.
func mayTrail(name string) bool {
	switch name {
	case "Authorization", "Cache-Control", "Content-Encoding", "Content-Length", "Content-Range", "Content-Type",
		"Cookie", "Expect", "Host", "Max-Forwards", "Pragma", "Range", "Set-Cookie", "Www-Authenticate":
		return false
	}
	return !isHopByHop(name) && !isForwarded(name) && !strings.HasPrefix(name, "If-")
}

// connectionOptions returns the field names that the Connection fields of h list, all
// lines of them, in canonical form: these are for one connection too.
func connectionOptions(h http.Header) (names []string) {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			name = textproto.TrimString(name)
			switch {
			case name == "", equalFold(name, "close"), equalFold(name, "keep-alive"), equalFold(name, "upgrade"):
				continue // options of these names have no field, or one that goes anyway
			}
			names = append(names, textproto.CanonicalMIMEHeaderKey(name))
		}
	}
	return names
}

// equalFold tells whether two tokens are the same but for the case of ASCII letters. To
// strings.EqualFold others would be the same too: ſ and s, K and the sign of kelvin.
func equalFold(a, b string) bool {
	return len(a) == len(b) && strings.EqualFold(a, b)
}

// hasToken tells whether one of lines, each a list with commas, has token.
func hasToken(lines []string, token string) bool {
	for _, line := range lines {
		for t := range strings.SplitSeq(line, ",") {
			if equalFold(textproto.TrimString(t), token) {
				return true
			}
		}
	}
	return false
}

// isForwarded tells whether a field tells about the way of a request before it came
// here. What a client says there is not to be trusted, so all of them are taken out
// before the pool's own are set.
func isForwarded(name string) bool {
	switch name {
	case "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port",
		"X-Forwarded-Prefix", "X-Forwarded-Server", "X-Forwarded-Ssl", "X-Real-Ip":
		return true
	}
	// Many servers take X_Forwarded_For for the field with hyphens.
	return strings.IndexByte(name, '_') >= 0 && isForwarded(textproto.CanonicalMIMEHeaderKey(strings.ReplaceAll(name, "_", "-")))
}

// believable tells whether trusted proxies are believed about a field: about those that
// every proxy sets, or is told to. What else tells of a request's way is more likely the
// client's.
func (c *config) believable(name string) bool {
	switch name {
	case "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto":
		return true
	case "Forwarded":
		return c.forwarded
	}
	return false
}

// requestHeader is the header that goes out for in: a map of its own, whose values are
// in's. It has nothing that is for in's connection alone. What in says about its way is
// kept if it is believed, which only what trusted proxies say is, and what is known of
// its peer is added. upgrade is the protocol to ask for, empty for none.
func (c *config) requestHeader(in *http.Request, upgrade string, believed bool) http.Header {
	out := make(http.Header, len(in.Header)+6)
	options := connectionOptions(in.Header)
	for name, values := range in.Header {
		if isHopByHop(name) || isForwarded(name) && !(believed && c.believable(name)) || slices.Contains(options, name) {
			continue
		}
		out[name] = values[:len(values):len(values)]
	}
	if hasToken(in.Header["Te"], "trailers") {
		out["Te"] = []string{"trailers"}
	}
	if _, ok := out["User-Agent"]; !ok {
		out["User-Agent"] = nil // or net/http puts in its own
	}
	if upgrade != "" {
		out["Connection"] = []string{"Upgrade"}
		out["Upgrade"] = []string{upgrade}
	}
	setForwarded(out, in)
	if c.forwarded {
		addForwarded(out, in)
	}
	if c.via != "" {
		addVia(out, in.ProtoMajor, in.ProtoMinor, c.via)
	}
	return out
}

// addForwarded adds what is known of in's peer to the Forwarded field (RFC 7239).
func addForwarded(out http.Header, in *http.Request) {
	element := "for=unknown"
	if peer := peerOf(in); peer.Is4() {
		element = "for=" + peer.String()
	} else if peer.IsValid() {
		element = `for="[` + peer.String() + `]"`
	}
	if in.Host != "" {
		element += ";host=" + quoted(in.Host)
	}
	element += ";proto=http"
	if in.TLS != nil {
		element += "s"
	}
	out["Forwarded"] = []string{strings.Join(append(slices.Clip(out["Forwarded"]), element), ", ")}
}

// quoted returns s as a token if it is one, else as a quoted string (RFC 9110, section
// 5.6.4).
func quoted(s string) string {
	if s != "" && !strings.ContainsFunc(s, notInToken) {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// addVia says that a message was received in that version of HTTP by a proxy called
// name (RFC 9110, section 7.6.3).
func addVia(h http.Header, major, minor int, name string) {
	version := strconv.Itoa(major)
	if major < 2 {
		version += "." + strconv.Itoa(minor)
	}
	h["Via"] = []string{strings.Join(append(slices.Clip(h["Via"]), version+" "+name), ", ")}
}

// setForwarded makes the X-Forwarded-For, -Host and -Proto fields of out say what
// is known of in's peer. Where they are there already, a trusted proxy has said it: then
// only the peer is added to its list.
func setForwarded(out http.Header, in *http.Request) {
	values := [...]string{"", in.Host, "http"} // one allocation for all three
	if in.TLS != nil {
		values[2] = "https"
	}
	ip, _, err := net.SplitHostPort(in.RemoteAddr)
	if peer := peerOf(in); err != nil && peer.IsValid() {
		ip = peer.String() // a middleware has put an address alone in there
	}
	if ip != "" {
		values[0] = ip
		if before := out["X-Forwarded-For"]; len(before) > 0 {
			values[0] = strings.Join(before, ", ") + ", " + ip
		}
		out["X-Forwarded-For"] = values[0:1:1]
	}
	if in.Host != "" && len(out["X-Forwarded-Host"]) == 0 { // HTTP/1.0 may have none
		out["X-Forwarded-Host"] = values[1:2:2]
	}
	if len(out["X-Forwarded-Proto"]) == 0 {
		out["X-Forwarded-Proto"] = values[2:3:3]
	}
}

// copyHeader adds the fields of an answer to those that are in dst already, but for
// those that are for the backend's connection alone.
func copyHeader(dst, src http.Header) {
	options := connectionOptions(src)
	for name, values := range src {
		if isHopByHop(name) || slices.Contains(options, name) {
			continue
		}
		if old := dst[name]; len(old) > 0 {
			dst[name] = append(old[:len(old):len(old)], values...)
			continue
		}
		dst[name] = values[:len(values):len(values)]
	}
}

// upgradeOf returns the protocols of allowed that r asks to switch to, empty if none
// or if r does not ask as it should (RFC 9110, section 7.8).
func upgradeOf(r *http.Request, allowed []string) string {
	lines := r.Header["Upgrade"]
	if len(lines) == 0 || !r.ProtoAtLeast(1, 1) || r.ProtoMajor != 1 || !hasToken(r.Header["Connection"], "upgrade") {
		return ""
	}
	var asked []string
	for _, line := range lines {
		for protocol := range strings.SplitSeq(line, ",") {
			protocol = textproto.TrimString(protocol)
			name, _, _ := strings.Cut(protocol, "/")
			if slices.ContainsFunc(allowed, func(a string) bool { return equalFold(a, name) || equalFold(a, protocol) }) {
				asked = append(asked, protocol)
			}
		}
	}
	return strings.Join(asked, ", ")
}
