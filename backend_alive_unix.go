//go:build unix

package lb

import (
	"errors"
	"net"
	"syscall"
)

// aliveCheck returns a function that tells, without waiting, whether the peer of c
// has left an idle connection: its end or an error stands in the socket, or bytes
// that nobody asked for. It returns nil if c is no socket.
//
// The transport reads an idle connection too and would notice, but only once its
// goroutine comes to run; a request that is written before that is lost, and if it
// is a POST, for good. The look needs no lock that this reading holds. Only one
// goroutine may look at a time.
func aliveCheck(c net.Conn) func() bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	// What the look needs is made once: it is on the path of every request.
	var alive bool
	look := func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		alive = errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR)
	}
	return func() bool { return raw.Control(look) == nil && alive }
}
