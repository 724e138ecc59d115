package lb

import (
	"crypto/tls"
	"net/http/httptrace"
	"net/textproto"
)

// guardTrace returns t with its hooks guarded: they are called on goroutines where a panic
// would end the program. It returns nil for nil.
func (p *panics) guardTrace(t *httptrace.ClientTrace) *httptrace.ClientTrace {
	if t == nil {
		return nil
	}
	contain := func() {
		if v := recover(); v != nil {
			p.caught("a hook of a client trace", v)
		}
	}
	g := *t
	if f := t.GetConn; f != nil {
		g.GetConn = func(hostPort string) {
			defer contain()
			f(hostPort)
		}
	}
	if f := t.GotConn; f != nil {
		g.GotConn = func(info httptrace.GotConnInfo) {
			defer contain()
			f(info)
		}
	}
	if f := t.PutIdleConn; f != nil {
		g.PutIdleConn = func(err error) {
			defer contain()
			f(err)
		}
	}
	if f := t.GotFirstResponseByte; f != nil {
		g.GotFirstResponseByte = func() {
			defer contain()
			f()
		}
	}
	if f := t.Got100Continue; f != nil {
		g.Got100Continue = func() {
			defer contain()
			f()
		}
	}
	if f := t.DNSStart; f != nil {
		g.DNSStart = func(info httptrace.DNSStartInfo) {
			defer contain()
			f(info)
		}
	}
	if f := t.DNSDone; f != nil {
		g.DNSDone = func(info httptrace.DNSDoneInfo) {
			defer contain()
			f(info)
		}
	}
	if f := t.ConnectStart; f != nil {
		g.ConnectStart = func(network, addr string) {
			defer contain()
			f(network, addr)
		}
	}
	if f := t.ConnectDone; f != nil {
		g.ConnectDone = func(network, addr string, err error) {
			defer contain()
			f(network, addr, err)
		}
	}
	if f := t.TLSHandshakeStart; f != nil {
		g.TLSHandshakeStart = func() {
			defer contain()
			f()
		}
	}
	if f := t.TLSHandshakeDone; f != nil {
		g.TLSHandshakeDone = func(state tls.ConnectionState, err error) {
			defer contain()
			f(state, err)
		}
	}
	if f := t.WroteHeaderField; f != nil {
		g.WroteHeaderField = func(key string, value []string) {
			defer contain()
			f(key, value)
		}
	}
	if f := t.WroteHeaders; f != nil {
		g.WroteHeaders = func() {
			defer contain()
			f()
		}
	}
	if f := t.Wait100Continue; f != nil {
		g.Wait100Continue = func() {
			defer contain()
			f()
		}
	}
	if f := t.WroteRequest; f != nil {
		g.WroteRequest = func(info httptrace.WroteRequestInfo) {
			defer contain()
			f(info)
		}
	}
	if f := t.Got1xxResponse; f != nil {
		g.Got1xxResponse = func(code int, header textproto.MIMEHeader) error {
			defer contain()
			return f(code, header)
		}
	}
	return &g
}
