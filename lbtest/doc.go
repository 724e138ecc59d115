// Package lbtest helps to test code that spreads HTTP requests over backends.
//
// A [Backend] is a real HTTP/1.1 server whose faults can be switched while
// requests run: it answers, delays, hangs, refuses, resets at a chosen byte,
// closes a reused connection, or sends any bytes at all. Its health probe can
// fail, be slow or be answered wrongly while traffic is served, and the other
// way round. It records each request that arrives, probes apart, so that a test
// can tell that a request was sent once, to whom, over which connection and
// with which body.
//
// A [Network] is a network in memory with the behaviour of TCP. Backends and
// clients on it can run in a [testing/synctest] bubble: a test of a timeout of
// ten seconds then takes none. [NewBackend] starts a backend on the loopback
// interface, [Network.NewBackend] one on such a network; they behave alike.
//
// [RunBalancer] and [CheckBalancer] hold a balancing strategy to the contract of
// lb.Balancer.
//
// Nothing here is meant for production.
package lbtest
