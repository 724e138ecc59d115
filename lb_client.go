package lb

import (
	"context"
	"net/http"
	"net/netip"
	"net/textproto"
	"strings"
)

// TrustedProxies says which proxies in front of the pool are believed about whom they
// forward for: about X-Forwarded-For, -Host and -Proto, and about Forwarded with
// WithForwarded. Such a proxy must set these, or take out what a client has put there; the
// other fields of the kind, such as X-Real-Ip, are taken out here, and a hook of
// WithRewrite can put back what is wanted of them. Set Prefixes or Hops, not both.
// The zero value trusts nobody: what a request says about its way is then replaced by
// what is known of its peer.
//
// A client can send any X-Forwarded-For it likes; each proxy only adds an entry at the
// end of it. So the list is read from the end, over all lines of the field, and the
// client is the first address that is not a trusted proxy's. At an entry that is no
// address the search ends, and the proxy that has added it stands for the client: when
// in doubt less is believed.
type TrustedProxies struct {
	// Prefixes lists the addresses of trusted proxies, such as "10.0.0.0/8" or
	// "2001:db8::1". A request whose peer has none of these is not believed at all.
	Prefixes []string
	// Hops is how many proxies every request passes before it comes here, for when
	// their addresses are not known, as with some cloud balancers: the client is the
	// entry that far from the end. It is safe only if nobody can reach the pool in
	// another way. A request with fewer entries is not believed. Below zero is an error.
	Hops int
}

// trust is TrustedProxies, read.
type trust struct {
	prefixes []netip.Prefix
	hops     int
}

// none tells that nobody is trusted.
func (t *trust) none() bool { return len(t.prefixes) == 0 && t.hops == 0 }

// read puts p into t and reports what is wrong.
func (t *trust) read(p TrustedProxies, c *config) {
	for _, s := range p.Prefixes {
		prefix, err := netip.ParsePrefix(s)
		if err != nil {
			addr, errAddr := netip.ParseAddr(s)
			if errAddr != nil || addr.Zone() != "" {
				c.faultf("TrustedProxies.Prefixes has %q: want an address or a prefix, like 10.0.0.0/8", s)
				continue
			}
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}
		if prefix.Addr().Is4In6() {
			c.faultf("TrustedProxies.Prefixes has %q: want an IPv4 address as such", s)
			continue
		}
		t.prefixes = append(t.prefixes, prefix.Masked())
	}
	if p.Hops < 0 {
		c.faultf("TrustedProxies.Hops is %d: want 1 or more, or 0 for none", p.Hops)
	}
	if p.Hops > 0 && len(p.Prefixes) > 0 {
		c.faultf("TrustedProxies has both Prefixes and Hops (%d): want one of them", p.Hops)
	}
	t.hops = max(0, p.Hops)
}

// has tells whether addr is that of a trusted proxy.
func (t *trust) has(addr netip.Addr) bool {
	for _, p := range t.prefixes {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// client returns whose request r is, and whether what it says of its way here is
// believed.
func (t *trust) client(r *http.Request) (client netip.Addr, believed bool) {
	peer := peerOf(r)
	if t.none() || len(t.prefixes) > 0 && !t.has(peer) {
		return peer, false
	}
	hop := 0
	client = peer
	for entry := range entriesFromTheEnd(r.Header["X-Forwarded-For"]) {
		addr := addrOf(entry)
		if !addr.IsValid() {
			break
		}
		client = addr
		if hop++; hop == t.hops || t.hops == 0 && !t.has(addr) {
			return client, true
		}
	}
	if t.hops > 0 {
		return peer, false // it has not come the way that all requests come
	}
	return client, true
}

// entriesFromTheEnd yields the entries of lists with commas, the last of the last
// first.
func entriesFromTheEnd(lines []string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for i := len(lines) - 1; i >= 0; i-- {
			line := lines[i]
			for {
				j := strings.LastIndexByte(line, ',')
				if !yield(textproto.TrimString(line[j+1:])) {
					return
				}
				if j < 0 {
					break
				}
				line = line[:j]
			}
		}
	}
}

// peerOf is the address that r came from, invalid if that is not one.
func peerOf(r *http.Request) netip.Addr { return addrOf(r.RemoteAddr) }

// addrOf reads an address with or without a port, invalid if it is none. One that is
// written as IPv4 in IPv6 is the IPv4 address; a zone says nothing outside of its
// machine.
func addrOf(s string) netip.Addr {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr().Unmap().WithZone("")
	}
	if len(s) > 2 && s[0] == '[' && s[len(s)-1] == ']' {
		s = s[1 : len(s)-1]
	}
	addr, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Addr{}
	}
	return addr.Unmap().WithZone("")
}

type clientKey struct{}

// ClientIP returns the address of r's client as the pool sees it: that of r's peer, or
// what proxies that WithTrustedProxies names say of it. It is what IPHash goes by and
// what X-Forwarded-For says. It is for code that runs inside of a pool, such as a
// Balancer or a hook; outside of one it knows the peer alone. Without an address, as for
// a request of RoundTrip or one that came over a unix socket, the result is the zero
// Addr, which is not valid.
func ClientIP(r *http.Request) netip.Addr {
	if addr, ok := r.Context().Value(clientKey{}).(netip.Addr); ok {
		return addr
	}
	return peerOf(r)
}

// withClient returns ctx with client as what ClientIP returns.
func withClient(ctx context.Context, client netip.Addr) context.Context {
	return context.WithValue(ctx, clientKey{}, client)
}
