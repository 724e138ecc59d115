// Package ring is consistent hashing on a ring: a key belongs to the owner whose
// point follows the key's hash. When an owner comes or goes, only keys that it
// takes or leaves change hands (Karger et al., "Consistent hashing and random
// trees", 1997).
package ring

import (
	"cmp"
	"iter"
	"math/bits"
	"slices"
)

// pointsPerOwner is the number of points of the heaviest owner: half of this to
// all of it. More make shares more exact (by 1/√points) and the ring larger.
const pointsPerOwner = 320

// Ring maps hashes to owners. It is immutable and may be used concurrently.
type Ring struct {
	points []point // by hash
	// first[i] is the index of the first point whose hash has i or more in its
	// upper bits: where a search begins.
	first []int32
	shift uint
}

type point struct {
	hash  uint64
	seed  uint64 // the hash of the owner's name: breaks ties without regard to order
	owner int32
}

// New returns the ring of owners with the given names and weights, which are
// positive. The owner of a hash depends on the set of names and weights alone,
// not on their order.
func New(names []string, weights []int) *Ring {
	r := &Ring{}
	if len(names) == 0 {
		return r
	}
	// The scale depends on the heaviest weight by powers of two only, so that an
	// owner that comes or goes seldom changes the number of others' points.
	scale := 1 << bits.Len(uint(slices.Max(weights)-1))
	for i, name := range names {
		seed := String(name)
		for n := range max(1, pointsPerOwner*weights[i]/scale) {
			r.points = append(r.points, point{mix(seed + uint64(n)*golden), seed, int32(i)})
		}
	}
	slices.SortFunc(r.points, func(a, b point) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.seed, b.seed))
	})
	r.index()
	return r
}

// index fills first with about one entry per point.
func (r *Ring) index() {
	width := uint(bits.Len(uint(len(r.points))))
	r.shift = 64 - width
	r.first = make([]int32, 1<<width)
	at := 0
	for i := range r.first {
		for at < len(r.points) && r.points[at].hash>>r.shift < uint64(i) {
			at++
		}
		r.first[i] = int32(at)
	}
}

// Owner returns the index of the owner of hash.
func (r *Ring) Owner(hash uint64) int { return int(r.points[r.find(hash)].owner) }

// find returns the index of the first point at or after hash, round the ring.
func (r *Ring) find(hash uint64) int {
	at := int(r.first[hash>>r.shift])
	for at < len(r.points) && r.points[at].hash < hash {
		at++
	}
	if at == len(r.points) {
		return 0
	}
	return at
}

// From yields the owners in the order in which the ring comes to them from hash:
// the owner, then who would be if it were not there, and so on. Owners come
// again, as they have several points.
func (r *Ring) From(hash uint64) iter.Seq[int] {
	return func(yield func(int) bool) {
		start := r.find(hash)
		for i := range r.points {
			if !yield(int(r.points[(start+i)%len(r.points)].owner)) {
				return
			}
		}
	}
}

const golden = 0x9E3779B97F4A7C15 // 2^64 divided by the golden ratio

// String hashes s, the same in every process: FNV-1a, finished by mix because
// FNV alone has weak upper bits for short keys.
func String(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return mix(h)
}

// Words hashes two words.
func Words(a, b uint64) uint64 { return mix(mix(a+golden) ^ b) }

// mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xBF58476D1CE4E5B9
	h = (h ^ h>>27) * 0x94D049BB133111EB
	return h ^ h>>31
}
