//go:build unix

package h1

import (
	"errors"
	"net"
	"syscall"
)

// Looker returns a function that tells, without waiting, whether the peer of nc is
// still there and has said nothing: its end or an error stands in the socket, or bytes
// that nobody asked for. It returns nil if nc is no socket. Only one goroutine may look
// at a time.
func Looker(nc net.Conn) func() bool {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	// What the look needs is made once: it is on the path of every request.
	var quiet bool
	look := func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		quiet = errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR)
	}
	return func() bool { return raw.Control(look) == nil && quiet }
}
