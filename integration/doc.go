// Package integration has only tests: lb and its gateway with servers and clients
// that were written by others. They need python3, nginx, node and curl.
package integration
