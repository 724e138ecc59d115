package lb

import (
	"net"
	"net/http"
	"strings"
)

// forwardedFields tell about the way of a request before it came here. What a
// client says there is not to be trusted, so all of them are taken out before the
// pool's own are set.
var forwardedFields = [...]string{
	"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port",
	"X-Forwarded-Prefix", "X-Forwarded-Server", "X-Forwarded-Ssl", "X-Real-Ip",
}

// setForwarded makes the X-Forwarded-For, -Host and -Proto fields of out say what
// is known of in's peer, and nothing that the client claims.
func setForwarded(out http.Header, in *http.Request) {
	for _, name := range forwardedFields {
		delete(out, name)
	}
	dropLookalikes(out)
	values := [...]string{"", in.Host, "http"} // one allocation for all three
	if in.TLS != nil {
		values[2] = "https"
	}
	if ip, _, err := net.SplitHostPort(in.RemoteAddr); err == nil {
		values[0] = ip
		out["X-Forwarded-For"] = values[0:1:1]
	}
	if in.Host != "" { // HTTP/1.0 may have none
		out["X-Forwarded-Host"] = values[1:2:2]
	}
	out["X-Forwarded-Proto"] = values[2:3:3]
}

// dropLookalikes takes out fields such as X_Forwarded_For, which many servers
// take for the ones with hyphens.
func dropLookalikes(out http.Header) {
	for name := range out {
		if strings.IndexByte(name, '_') < 0 {
			continue
		}
		canonical := http.CanonicalHeaderKey(strings.ReplaceAll(name, "_", "-"))
		for _, f := range forwardedFields {
			if canonical == f {
				delete(out, name)
			}
		}
	}
}
