//go:build !unix

package h1

import "net"

// Looker returns nil: idle connections are watched by a goroutine each.
func Looker(net.Conn) func() bool { return nil }
