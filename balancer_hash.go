package lb

import (
	"encoding/binary"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync/atomic"

	"example.com/lb/internal/ring"
)

// IPHash returns a strategy that gives all requests of one client address to one
// backend, in proportion to weight. Which one depends on the set of names and
// weights alone: not on their order, nor on the process. When a backend comes or
// goes, only clients that it takes or leaves change theirs.
//
// The address is that of ClientIP: the request's peer or, behind trusted proxies, the
// client that they name. An IPv6 address counts by its first 64 bits, which one customer commonly has for
// themself. A request without an address, such as one given to RoundTrip or one
// that came over a unix socket, goes to a random backend by weight. A backend gets
// at least about 1/320 of what the heaviest one gets, however small its weight.
func IPHash() Balancer { return &ipHash{} }

type ipHash struct {
	last atomic.Pointer[preparedHash]
}

func (h *ipHash) String() string { return "ip-hash" }

// Pick serves unprepared use. The ring for the candidates that were seen last is
// kept, and serves for those of them that are left as well.
func (h *ipHash) Pick(r *http.Request, candidates []*Backend) *Backend {
	p := h.last.Load()
	if p == nil || !p.covers(candidates) {
		p = prepareHash(slices.Clone(candidates))
		h.last.Store(p)
	}
	return p.Pick(r, candidates)
}

func (h *ipHash) Prepare(set []*Backend) Balancer { return prepareHash(set) }

func prepareHash(set []*Backend) *preparedHash {
	p := &preparedHash{set: set, weights: weightsOf(set)}
	names := make([]string, len(set))
	for i, b := range set {
		names[i] = b.name
	}
	p.ring = ring.New(names, p.weights)
	return p
}

type preparedHash struct {
	set     []*Backend
	weights []int
	ring    *ring.Ring
}

// covers tells whether candidates are a subset of the set, in its order and with
// the same weights.
func (p *preparedHash) covers(candidates []*Backend) bool {
	i := 0
	for _, b := range candidates {
		for i < len(p.set) && p.set[i] != b {
			i++
		}
		if i == len(p.set) || max(1, b.Weight()) != p.weights[i] {
			return false
		}
		i++
	}
	return true
}

func (p *preparedHash) Pick(r *http.Request, candidates []*Backend) *Backend {
	key, ok := addressHash(r)
	if !ok {
		return randomByWeight(candidates)
	}
	if len(candidates) == len(p.set) { // a subset of the same size is the set
		return candidates[p.ring.Owner(key)]
	}
	for i := range p.ring.From(key) {
		if b := p.set[i]; slices.Contains(candidates, b) {
			return b
		}
	}
	return candidates[rand.IntN(len(candidates))] // not reached with candidates of the set
}

// addressHash hashes the address of r's client.
func addressHash(r *http.Request) (hash uint64, ok bool) {
	if r == nil {
		return 0, false
	}
	addr := ClientIP(r)
	switch {
	case addr.IsValid():
	case r.RemoteAddr == "", r.RemoteAddr == "@": // a unix socket's
		return 0, false
	default:
		return ring.String(r.RemoteAddr), true // a server of another kind: take it as it is
	}
	b := addr.As16()
	high, low := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	if addr.Is6() {
		low = 0
	}
	return ring.Words(high, low), true
}
