// Package memnet is an in-memory network whose connections behave like TCP.
//
// It has no goroutines and no state outside a [Network], and every wait in it
// is on a channel, a [sync.Cond] or a timer. A test can therefore run a whole
// client and server over it inside a testing/synctest bubble, where time is
// virtual, and just as well outside one. All that touches one Network must
// live in the same bubble.
package memnet

import (
	"context"
	"hash/fnv"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

const (
	// bufferBytes is how much one direction of a connection holds that the
	// reader has not taken yet; a Write beyond it waits.
	bufferBytes = 64 << 10

	// acceptBacklog is how many connections a listener holds that Accept has
	// not returned yet; a dial beyond it waits.
	acceptBacklog = 128

	// firstPort and lastPort bound the ports that the network picks itself.
	firstPort = 10000
	lastPort  = 65535
)

// Network is a set of listeners that can be dialled by address. New makes one;
// the zero value is not usable. There is nothing to close: a Network whose
// listeners and connections are closed is garbage. All methods may be called
// concurrently.
//
// A host that is not an IP address stands for a made-up address in 198.18.0.0/15,
// which depends on the name only, so that "a.test:80" and the address of a
// listener on it reach the same place. Two names share an address with a
// chance of one in 2^24. "localhost" is 127.0.0.1. An empty or unspecified
// host means every address to Listen and Blackhole, and 127.0.0.1 to
// DialContext.
type Network struct {
	mu        sync.Mutex // guards the following
	listeners map[netip.AddrPort]*listener
	holes     map[netip.AddrPort]chan struct{} // closed when the hole is lifted
	prevPort  uint16
}

// New returns a network without listeners.
func New() *Network {
	return &Network{
		listeners: make(map[netip.AddrPort]*listener),
		holes:     make(map[netip.AddrPort]chan struct{}),
		prevPort:  firstPort - 1,
	}
}

// Listen listens on addr, which is "host:port"; port 0 picks a free one. An
// address in use is a *net.OpError that wraps syscall.EADDRINUSE. Closing the
// listener frees the address and resets connections it has not accepted yet.
func (n *Network) Listen(addr string) (net.Listener, error) {
	at, err := resolve("tcp", addr)
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: "tcp", Err: err}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	at, free := n.bindLocked(at)
	if !free {
		inUse := os.NewSyscallError("bind", syscall.EADDRINUSE)
		return nil, &net.OpError{Op: "listen", Net: "tcp", Addr: net.TCPAddrFromAddrPort(at), Err: inUse}
	}
	l := &listener{network: n, at: at}
	l.arrived.L = &l.mu
	n.listeners[at] = l
	return l, nil
}

// DialContext connects to addr. The network must be tcp, tcp4 or tcp6; they
// are all the same here. The connection is made as soon as the listener has
// queued it, before Accept returns it, as with a kernel.
//
// An error is a *net.OpError. It wraps syscall.ECONNREFUSED if nobody listens,
// and the error of ctx if ctx ends while the address is a black hole or the
// listener's backlog is full.
func (n *Network) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	to, err := resolve(network, addr)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	if to.Addr().IsUnspecified() {
		to = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), to.Port())
	}
	c, err := n.dial(ctx, to)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(to), Err: err}
	}
	return c, nil
}

// Blackhole turns addr into an address that never answers, or back. While it
// is on, dials wait until their context ends; when it is lifted, dials still
// waiting go ahead, as they would when a repeated SYN gets through. It needs
// no listener and leaves connections that are already made alone. It panics if
// addr is not "host:port".
func (n *Network) Blackhole(addr string, on bool) {
	at, err := resolve("tcp", addr)
	if err != nil {
		panic("memnet: black hole: " + err.Error())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	hole, exists := n.holes[at]
	switch {
	case on && !exists:
		n.holes[at] = make(chan struct{})
	case !on && exists:
		close(hole)
		delete(n.holes, at)
	}
}

// dial returns the client's end of a new connection.
func (n *Network) dial(ctx context.Context, to netip.AddrPort) (*Conn, error) {
	n.mu.Lock()
	from := netip.AddrPortFrom(clientIP(to.Addr()), n.nextPortLocked())
	n.mu.Unlock()
	client, accepted := newPair(net.TCPAddrFromAddrPort(from), net.TCPAddrFromAddrPort(to))
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		retry, ok := n.deliver(to, accepted)
		if ok {
			return client, nil
		}
		if retry == nil {
			return nil, os.NewSyscallError("connect", syscall.ECONNREFUSED)
		}
		select {
		case <-retry:
		case <-ctx.Done():
		}
	}
}

// deliver queues c at the listener for to. If that is not possible now, it
// returns a channel that is closed when it may be, or nil if nobody listens.
func (n *Network) deliver(to netip.AddrPort, c *Conn) (retry <-chan struct{}, ok bool) {
	n.mu.Lock()
	hole := n.holes[to]
	if hole == nil {
		hole = n.holes[everyHost(to)]
	}
	l := n.listenerLocked(to)
	n.mu.Unlock()
	if hole != nil {
		return hole, false
	}
	if l == nil {
		return nil, false
	}
	return l.enqueue(c)
}

// remove takes l off the network.
func (n *Network) remove(l *listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners[l.at] == l {
		delete(n.listeners, l.at)
	}
}

// bindLocked chooses a port if at has none and reports whether the address is
// free.
func (n *Network) bindLocked(at netip.AddrPort) (netip.AddrPort, bool) {
	if at.Port() != 0 {
		return at, n.freeLocked(at)
	}
	for range lastPort - firstPort + 1 {
		at = netip.AddrPortFrom(at.Addr(), n.nextPortLocked())
		if n.freeLocked(at) {
			return at, true
		}
	}
	return at, false
}

// freeLocked reports whether at can be listened on. Listening on every address
// excludes listening on one of them, and the other way round.
func (n *Network) freeLocked(at netip.AddrPort) bool {
	if !at.Addr().IsUnspecified() {
		return n.listenerLocked(at) == nil
	}
	for other := range n.listeners {
		if other.Port() == at.Port() {
			return false
		}
	}
	return true
}

// listenerLocked returns the listener that a dial to addr reaches, or nil.
func (n *Network) listenerLocked(addr netip.AddrPort) *listener {
	if l := n.listeners[addr]; l != nil {
		return l
	}
	return n.listeners[everyHost(addr)]
}

// nextPortLocked returns ports in turn, so that one comes back as late as can
// be.
func (n *Network) nextPortLocked() uint16 {
	if n.prevPort == lastPort {
		n.prevPort = firstPort - 1
	}
	n.prevPort++
	return n.prevPort
}

// resolve turns "host:port" into an address without asking anybody.
func resolve(network, addr string) (netip.AddrPort, error) {
	switch network {
	case "tcp", "tcp4", "tcp6":
	default:
		return netip.AddrPort{}, net.UnknownNetworkError(network)
	}
	host, portText, err := net.SplitHostPort(addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil {
		return netip.AddrPort{}, &net.AddrError{Err: "invalid port", Addr: addr}
	}
	return netip.AddrPortFrom(hostIP(host), uint16(port)), nil
}

// hostIP returns the address that host stands for.
func hostIP(host string) netip.Addr {
	host = strings.ToLower(host)
	if host == "localhost" {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	ip, err := netip.ParseAddr(host)
	switch {
	case host == "" || err == nil && ip.IsUnspecified():
		return netip.IPv4Unspecified()
	case err == nil:
		return ip.Unmap()
	}
	h := fnv.New32a()
	h.Write([]byte(host)) // a hash.Hash never returns an error
	sum := h.Sum32()
	return netip.AddrFrom4([4]byte{198, 18 + byte(sum>>16)&1, byte(sum >> 8), byte(sum)})
}

// everyHost is the key of what holds for the port of addr on every host.
func everyHost(addr netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port())
}

// clientIP is the address that a client of to has: the loopback address talks
// to itself, all other clients share one made-up address.
func clientIP(to netip.Addr) netip.Addr {
	if to.IsLoopback() {
		return to
	}
	return netip.AddrFrom4([4]byte{198, 18, 0, 1})
}
