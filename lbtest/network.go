package lbtest

import (
	"context"
	"net"
	"net/http"
	"testing"

	"example.com/lb/internal/memnet"
)

// Network is a network in memory whose connections behave like TCP: buffers of
// 64 KiB for each direction, half-close, resets, deadlines. Use it in a
// [testing/synctest] bubble, where waiting for the network lets the virtual
// clock run on; make the Network inside the bubble that uses it. It works
// outside a bubble too.
//
// NewNetwork makes one; the zero value is not usable. It has no goroutines and
// needs no Close. All methods may be called concurrently.
//
// Addresses are "host:port". A host that is not an IP address stands for a
// made-up address in 198.18.0.0/15, always the same for the same name, so that
// "a.test:80" needs no resolver.
type Network struct {
	net *memnet.Network
}

// NewNetwork returns a network without listeners.
func NewNetwork() *Network {
	return &Network{net: memnet.New()}
}

// Listen listens on addr; port 0 picks a free one, and an empty host stands
// for every host. An address in use is an error that wraps
// syscall.EADDRINUSE. At most 128 connections wait to be accepted.
func (n *Network) Listen(addr string) (net.Listener, error) {
	return n.net.Listen(addr)
}

// DialContext connects to addr; network is "tcp", "tcp4" or "tcp6". It fits
// http.Transport.DialContext. If nobody listens, the error wraps
// syscall.ECONNREFUSED. If addr is a black hole or its listener does not
// accept, DialContext waits for ctx to end.
//
// Each connection has its own port on the client's side. The client's address
// is 127.0.0.1 for a dial to 127.0.0.1, else 198.18.0.1.
func (n *Network) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return n.net.DialContext(ctx, network, addr)
}

// Blackhole makes dials to addr wait until their context ends, as if packets
// to it were dropped, or stops doing so; dials still waiting then go ahead.
// Connections that exist are not touched, and nobody need listen on addr. It
// panics if addr is not "host:port".
func (n *Network) Blackhole(addr string, on bool) {
	n.net.Blackhole(addr, on)
}

// Transport returns a new transport that dials on n. It speaks HTTP/1.1 only,
// has no proxy and does not ask for compression, so that what a backend
// records is what the test sent.
//
// Its idle connections have goroutines, which a bubble must not leave behind:
// they end when the backends close or with CloseIdleConnections.
func (n *Network) Transport() *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Transport{
		DialContext:        n.DialContext,
		DisableCompression: true,
		Protocols:          protocols,
	}
}

// NewBackend starts a backend on n, at the address that name stands for and a
// free port. It is otherwise like the function [NewBackend].
func (n *Network) NewBackend(tb testing.TB, name string) *Backend {
	tb.Helper()
	return startBackend(tb, name, net.JoinHostPort(name, "0"), n.Listen)
}
