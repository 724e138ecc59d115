// Package integration has only tests: lb and its gateway with servers and clients
// that were written by others. Those of the gateway need python3, nginx, node and curl,
// those of WebSocket and gRPC their libraries, those of HTTP/2 h2load, that of a browser
// chromium-headless-shell.
package integration
