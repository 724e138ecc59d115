package lb

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"unicode"
)

const (
	// NoWeight as a Target's Weight keeps new requests away from it.
	NoWeight = -1
	// MaxWeight is the largest Weight that a Target may have.
	MaxWeight = 65535
	// HostFromURL as a Target's Host sends the host of the Target's URL.
	HostFromURL = "{url}"
)

// Target is what the user configures: one server, or one Handler in this process, and
// its share. It is a plain value; the pool copies what it needs and turns it into a
// Backend. The zero value is not valid, because URL or Handler must be set.
type Target struct {
	// Name identifies the target within its pool, in calls, logs and Stats. A
	// target that keeps name and URL in an update keeps its Backend with all
	// its state. The default is scheme://host/path of URL. Names must be unique.
	Name string
	// URL is where the target is: http, https or h2c, host, optional port and an
	// optional path, which is put in front of the path of every request; or unix and the
	// path of a socket, as in unix:///run/app.sock, behind which HTTP/1.1 is spoken and
	// whose host is localhost. Over https the backend chooses between HTTP/2 and HTTP/1.1,
	// unless TLS says what to offer in NextProtos; h2c is HTTP/2 without TLS, which the
	// backend must know to expect. Userinfo, query and fragment are errors.
	URL string
	// Handler is an in-process target in the place of a URL: a canary, a fallback,
	// another Pool. It needs a Name, and has neither Host, HostFromURL excepted, nor
	// HealthURL. It is called on a goroutine of its own with a request as a server's; its
	// writer can Flush and send 1xx answers and trailers, but cannot be taken over, so
	// only a Pool passes upgrades on. A Pool that a middleware wraps is a handler like
	// others, whose peer is that of the client: it must be given WithTrustedProxies of its
	// own to believe what the outer pool says. A panic is a failure of the backend, or a cut answer
	// if that has begun. When the request ends its context does, and Handler must return;
	// if it does not within a second, it counts in Stats.Abandoned. A change of Handler
	// keeps the Backend. Handlers are never compared, and may be called concurrently.
	Handler http.Handler
	// Weight is the target's share of the requests in proportion to the others'
	// weights. 0 means 1, MaxWeight is the largest. NoWeight (-1) gives it no
	// new requests; anything below is an error.
	Weight int
	// Host is the Host field to send. The default, empty, sends the client's;
	// HostFromURL sends the host of URL.
	Host string
	// TLS sets how an https target is spoken to: its authorities, the server name, a
	// certificate of ours. Nil means the TLSClientConfig of Transport, or the default. It
	// is copied; another pointer in an update makes another Backend.
	TLS *tls.Config
	// Transport is for this target what WithTransport is for the pool. Nil means the
	// pool's. Another one in an update makes another Backend, and so does one whose type
	// cannot be compared, such as a function.
	Transport http.RoundTripper
	// HealthURL is where to probe the target instead of at URL: http or https, with a
	// host and an optional port. A path in it, with a query if you like, is asked for in
	// place of HealthCheck.Path; a slash alone is none. HealthCheck.Port, Host and the
	// path of URL mean nothing then. A change of it keeps the Backend; the next probe's
	// verdict then decides at once. Without active checks it has no effect. Empty means
	// URL.
	HealthURL string
	// Metadata is for strategies and hooks; see Backend.Metadata.
	Metadata map[string]string
}

// Targets makes a Target with the defaults from each of urls.
func Targets(urls ...string) []Target {
	targets := make([]Target, len(urls))
	for i, u := range urls {
		targets[i].URL = u
	}
	return targets
}

// endpoint is a target's address, parsed. Two equal endpoints are the same
// server spoken to in the same way.
type endpoint struct {
	scheme string
	host   string // lower case, with the port unless it is the scheme's own
	socket string // the path of a unix socket, in place of host
	// The path prefix without a trailing slash, as text and as it was escaped.
	prefix, rawPrefix string
	sendHost          string // Target.Host
	tls               *tls.Config
}

// url is the endpoint as a URL, and the default name of its target.
func (e endpoint) url() string {
	switch e.scheme {
	case "": // a Handler
		return ""
	case "unix":
		return "unix://" + e.socket
	}
	return e.scheme + "://" + e.host + e.rawPrefix
}

// urlScheme is the scheme of a request's URL.
func (e *endpoint) urlScheme() string {
	if e.scheme == "https" {
		return "https"
	}
	return "http"
}

// network is what to dial addr with.
func (e *endpoint) network() string {
	if e.socket != "" {
		return "unix"
	}
	return "tcp"
}

// addr is the endpoint's host and port, to dial, or its socket.
func (e *endpoint) addr() string {
	if e.socket != "" {
		return e.socket
	}
	if _, port := hostPort(e.host); port != "" {
		return e.host
	}
	return e.host + ":" + schemePort(e.scheme)
}

// setPort puts port in the place of the endpoint's own.
func (e *endpoint) setPort(port int) {
	if e.socket != "" {
		return
	}
	host, _ := hostPort(e.host)
	e.host = host
	if p := strconv.Itoa(port); p != schemePort(e.scheme) {
		e.host += ":" + p
	}
}

// schemePort is the port of a URL without one.
func schemePort(scheme string) string {
	if scheme == "https" {
		return "443"
	}
	return "80"
}

// hostPort cuts the port off a URL's host, which keeps its brackets.
func hostPort(s string) (host, port string) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.HasSuffix(s, "]") {
		return s, ""
	}
	return s[:i], s[i+1:]
}

// parsed is a Target that was found to be right.
type parsed struct {
	name      string
	endpoint  endpoint
	transport http.RoundTripper // nil: the pool's
	settings  settings
}

// sameTransport tells whether a and b are the same, as far as that can be told:
// comparing two functions would panic.
func sameTransport(a, b http.RoundTripper) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return reflect.TypeOf(a) == reflect.TypeOf(b) && reflect.TypeOf(a).Comparable() && a == b
}

// settings is what may change while a Backend stays the same. The value is
// immutable: a change swaps the pointer to it.
type settings struct {
	weight   int
	metadata map[string]string
	health   *probeAddress // Target.HealthURL; nil without
	handler  http.Handler  // nil for a URL
}

func settingsOf(t Target) settings {
	s := settings{weight: t.Weight, metadata: maps.Clone(t.Metadata), handler: t.Handler}
	if s.weight == 0 {
		s.weight = 1
	}
	return s
}

// parseTargets returns the targets in their order, or every fault of the list.
func parseTargets(targets []Target) ([]parsed, error) {
	if len(targets) == 0 {
		return nil, errors.New("no targets: at least one is needed")
	}
	var faults []error
	list := make([]parsed, 0, len(targets))
	first := make(map[string]int, len(targets))
	for i, t := range targets {
		p, errs := parseTarget(t)
		for _, err := range errs {
			faults = append(faults, fmt.Errorf("target %d: %w", i+1, err))
		}
		if j, taken := first[p.name]; taken && p.name != "" {
			if t.Name == "" && targets[j].Name == "" {
				faults = append(faults, fmt.Errorf("target %d: URL %q is that of target %d: list it once, with more Weight, or give each a Name", i+1, t.URL, j+1))
				continue
			}
			faults = append(faults, fmt.Errorf("target %d: name %q is taken by target %d: give one of them another Name", i+1, p.name, j+1))
			continue
		}
		first[p.name] = i
		list = append(list, p)
	}
	return list, errors.Join(faults...)
}

func parseTarget(t Target) (parsed, []error) {
	var faults []error
	var e endpoint
	var err error
	if t.Handler != nil {
		faults = checkHandler(t)
	} else {
		e, err = parseEndpoint(t.URL)
		faults = append(faults, each(err)...)
	}
	e.sendHost = t.Host
	e.tls = t.TLS
	p := parsed{name: t.Name, endpoint: e, transport: t.Transport, settings: settingsOf(t)}
	faults = append(faults, checkWay(t, e)...)
	if p.name == "" && err == nil {
		p.name = e.url()
	}
	if t.HealthURL != "" {
		var errHealth error
		p.settings.health, errHealth = parseHealthURL(t.HealthURL)
		for _, err := range each(errHealth) {
			faults = append(faults, fmt.Errorf("health %w", err))
		}
	}
	if strings.ContainsFunc(t.Name, unicode.IsControl) {
		faults = append(faults, fmt.Errorf("name %q: a name is printable text", t.Name))
	}
	if t.Weight < NoWeight || t.Weight > MaxWeight {
		faults = append(faults, fmt.Errorf("weight %d: want 1 to %d, 0 for 1 or NoWeight (-1)", t.Weight, MaxWeight))
	}
	if t.Host != HostFromURL && strings.ContainsFunc(t.Host, notInHost) {
		faults = append(faults, fmt.Errorf("host %q: want a host name with an optional port, or HostFromURL", t.Host))
	}
	return p, faults
}

// checkWay returns what is wrong with how a target is to be reached.
func checkWay(t Target, e endpoint) (faults []error) {
	_, pooled := t.Transport.(*http.Transport)
	switch {
	case t.Transport != nil && isNil(t.Transport):
		faults = append(faults, fmt.Errorf("transport is a nil %T: leave it out for the pool's", t.Transport))
	case t.Handler != nil && (t.TLS != nil || t.Transport != nil):
		faults = append(faults, errors.New("TLS or Transport beside a Handler, which needs no way to it"))
	case t.TLS != nil && t.Transport != nil && !pooled:
		faults = append(faults, fmt.Errorf("TLS beside a %T, which has its own: leave one of them out", t.Transport))
	}
	if t.TLS != nil && e.scheme == "http" {
		faults = append(faults, fmt.Errorf("TLS for URL %q: want https", t.URL))
	}
	return faults
}

// checkWays returns what is wrong with targets that the transport they are to be reached
// over cannot reach.
func (c *config) checkWays(list []parsed) error {
	var faults []error
	for _, p := range list {
		transport := p.transport
		if transport == nil {
			transport = c.transport
		}
		_, pooled := transport.(*http.Transport)
		switch scheme := p.endpoint.scheme; {
		case transport == nil:
		case scheme == "h2c":
			faults = append(faults, fmt.Errorf("URL %q over a %T: HTTP/2 without TLS is for connections of the pool's own: set no Transport", p.endpoint.url(), transport))
		case scheme == "unix" && !pooled:
			faults = append(faults, fmt.Errorf("URL %q over a %T, which opens connections of its own: set no Transport, or an *http.Transport", p.endpoint.url(), transport))
		}
	}
	return errors.Join(faults...)
}

// checkHandler returns what is wrong with a target that has a Handler.
func checkHandler(t Target) (faults []error) {
	if isNil(t.Handler) {
		faults = append(faults, fmt.Errorf("handler is a nil %T: leave it out for a URL", t.Handler))
	}
	if t.URL != "" {
		faults = append(faults, fmt.Errorf("URL %q beside a Handler: want one of them", t.URL))
	}
	if t.Name == "" {
		faults = append(faults, errors.New("a Handler without Name: it has no URL to be named after"))
	}
	if t.HealthURL != "" {
		faults = append(faults, fmt.Errorf("health URL %q beside a Handler, which is probed in this process: leave it out", t.HealthURL))
	}
	if t.Host == HostFromURL {
		faults = append(faults, errors.New("HostFromURL beside a Handler, which has no URL"))
	}
	return faults
}

// each returns the errors that err was joined from.
func each(err error) []error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// notInHost tells that r cannot stand in a Host field (RFC 9110, section 7.2).
func notInHost(r rune) bool {
	return r <= ' ' || r >= 0x7f || strings.ContainsRune(`/\@?#{}<>"^|*`+"`", r)
}

// parseHealthURL reads where a target is probed.
func parseHealthURL(s string) (*probeAddress, error) {
	base, query, asked := strings.Cut(s, "?")
	e, err := parseEndpoint(base)
	if err != nil {
		return nil, err
	}
	path := e.rawPrefix
	e.prefix, e.rawPrefix = "", ""
	a := &probeAddress{endpoint: e}
	if path == "" && !asked {
		return a, nil
	}
	if path == "" || strings.HasSuffix(base, "/") {
		path += "/" // which parseEndpoint has taken away
	}
	if asked {
		path += "?" + query
	}
	if a.path, err = parsePath(path); err != nil {
		return nil, fmt.Errorf("URL %q: %w", s, err)
	}
	return a, nil
}

// parseEndpoint reads the URL of a target. Its errors never show a password.
func parseEndpoint(s string) (endpoint, error) {
	if s == "" {
		return endpoint{}, errors.New(`URL is empty: want one like "http://10.0.0.1:8080"`)
	}
	if strings.TrimSpace(s) != s {
		return endpoint{}, fmt.Errorf("URL %q: white space around it", withoutUserinfo(s))
	}
	if !strings.Contains(s, "://") {
		return endpoint{}, fmt.Errorf(`URL %q: no scheme: want one like "http://10.0.0.1:8080"`, withoutUserinfo(s))
	}
	u, err := url.Parse(s)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) && !strings.Contains(s, "@") {
			return endpoint{}, fmt.Errorf("URL %q: %w", s, ue.Err)
		}
		return endpoint{}, errors.New("URL cannot be parsed (not shown, for it seems to hold userinfo)")
	}
	shown := s
	if u.User != nil {
		shown = u.Redacted()
	}
	if err := checkURL(u, shown); err != nil {
		return endpoint{}, err
	}
	if u.Scheme == "unix" {
		return endpoint{scheme: "unix", host: unixHost, socket: u.Path}, nil
	}
	host := strings.ToLower(u.Host)
	if port := u.Port(); port == schemePort(u.Scheme) {
		host = strings.TrimSuffix(host, ":"+port)
	}
	return endpoint{
		scheme:    u.Scheme,
		host:      host,
		prefix:    strings.TrimSuffix(u.Path, "/"),
		rawPrefix: strings.TrimSuffix(u.EscapedPath(), "/"),
	}, nil
}

// unixHost is the host of what is behind a unix socket, for who must have one.
const unixHost = "localhost"

// withoutUserinfo returns s without what may be a password in it.
func withoutUserinfo(s string) string {
	if i := strings.LastIndexByte(s, '@'); i >= 0 {
		return "…" + s[i:]
	}
	return s
}

// checkURL returns all that is wrong with u, which is shown as it says, as the URL of a
// target.
func checkURL(u *url.URL, shown string) error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("URL %q: %w", shown, fmt.Errorf(format, args...)))
	}
	switch u.Scheme {
	case "http", "https", "h2c":
		if u.Hostname() == "" {
			fault("no host: want scheme://host:port")
		}
	case "unix":
		if u.Host != "" || len(u.Path) < 2 {
			fault("want the path of a socket, like unix:///run/app.sock")
		}
	default:
		fault("scheme %q: want http, https, h2c or unix", u.Scheme)
	}
	if strings.ContainsFunc(u.Host, notInHost) {
		fault("host %q: not a host name", u.Host)
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			fault("port %q: want 1 to 65535", port)
		}
	} else if strings.HasSuffix(u.Host, ":") {
		fault("port is empty: want 1 to 65535, or no colon")
	}
	if u.User != nil {
		fault("userinfo is not allowed: set the Authorization field instead")
	}
	if u.RawQuery != "" || u.ForceQuery {
		fault("a query is not allowed: got %q", "?"+u.RawQuery)
	}
	if u.Fragment != "" {
		fault("a fragment is not allowed: got %q", "#"+u.Fragment)
	}
	return errors.Join(faults...)
}
