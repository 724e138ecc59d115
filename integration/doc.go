// Package integration has only tests: lb and its gateway with servers and clients
// that were written by others. Those of the gateway need python3, nginx, node and curl,
// those of WebSocket two libraries, that of a browser chromium-headless-shell.
package integration
