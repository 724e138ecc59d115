package ring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

const seed = 1

func newRand() *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

func someNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("http://10.0.0.%d:8080", i)
	}
	return names
}

func ones(n int) []int { return slices.Repeat([]int{1}, n) }

// slowOwner looks at every point for the one that follows hash most closely.
func slowOwner(r *Ring, hash uint64) int {
	owner, least := -1, uint64(math.MaxUint64)
	for _, p := range r.points {
		// Going up from hash and round, the distance is the difference modulo 2^64.
		if d := p.hash - hash; owner < 0 || d < least {
			owner, least = int(p.owner), d
		}
	}
	return owner
}

func TestOwnerIsThatOfTheSlowVersion(t *testing.T) {
	rng := newRand()
	for _, n := range []int{1, 2, 3, 10, 33} {
		weights := make([]int, n)
		for i := range weights {
			weights[i] = 1 + rng.IntN(9)
		}
		r := New(someNames(n), weights)
		keys := []uint64{0, 1, math.MaxUint64, math.MaxUint64 - 1, 1 << 63, 1<<63 - 1}
		for range 1000 {
			keys = append(keys, rng.Uint64())
		}
		for i := range 200 { // on points, and one step beside them
			h := r.points[i*len(r.points)/200].hash
			keys = append(keys, h-1, h, h+1)
		}
		first, last := r.points[0].hash, r.points[len(r.points)-1].hash
		keys = append(keys, first-1, first, first+1, last-1, last, last+1)
		for _, key := range keys {
			if got, want := r.Owner(key), slowOwner(r, key); got != want {
				t.Fatalf("%d owners: Owner(%#x) = %d, want %d (seed %d)", n, key, got, want, seed)
			}
		}
	}
}

func TestOwnerDoesNotDependOnOrder(t *testing.T) {
	rng := newRand()
	names, weights := someNames(20), make([]int, 20)
	for i := range weights {
		weights[i] = 1 + rng.IntN(5)
	}
	r := New(names, weights)
	for range 10 {
		perm := rng.Perm(len(names))
		otherNames, otherWeights := make([]string, len(names)), make([]int, len(names))
		for i, p := range perm {
			otherNames[i], otherWeights[i] = names[p], weights[p]
		}
		other := New(otherNames, otherWeights)
		for range 2000 {
			key := rng.Uint64()
			if got, want := otherNames[other.Owner(key)], names[r.Owner(key)]; got != want {
				t.Fatalf("in the order %v Owner(%#x) is %s, want %s (seed %d)", perm, key, got, want, seed)
			}
		}
	}
}

func TestSharesFollowWeights(t *testing.T) {
	for _, c := range []struct {
		name    string
		weights []int
		within  float64 // fraction of the share
	}{
		{"one owner has all", []int{7}, 0},
		{"equal weights", ones(10), 0.25},
		{"small weights", []int{1, 2, 3, 4}, 0.25},
		{"just above a power of two", []int{5, 5, 5, 5, 5}, 0.3},
		{"large weights", []int{65535, 65535, 32768, 16384}, 0.3},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := newRand()
			r := New(someNames(len(c.weights)), c.weights)
			const n = 100_000
			got := make([]int, len(c.weights))
			for range n {
				got[r.Owner(rng.Uint64())]++
			}
			total := 0
			for _, w := range c.weights {
				total += w
			}
			for i, w := range c.weights {
				want := float64(n) * float64(w) / float64(total)
				if math.Abs(float64(got[i])-want) > c.within*want {
					t.Errorf("weights %v: %d owns %d of %d keys, want %.0f ± %g %% (seed %d)", c.weights, i, got[i], n, want, c.within*100, seed)
				}
			}
		})
	}
}

func TestRingHasBounds(t *testing.T) {
	for _, weights := range [][]int{{1}, {2}, {3, 1}, {65535, 1}, {5, 5, 5}} {
		r := New(someNames(len(weights)), weights)
		heaviest := 0
		for _, p := range r.points {
			if weights[p.owner] == slices.Max(weights) {
				heaviest++
			}
		}
		heaviest /= len(slices.DeleteFunc(slices.Clone(weights), func(w int) bool { return w != slices.Max(weights) }))
		if heaviest < pointsPerOwner/2 || heaviest > pointsPerOwner {
			t.Errorf("weights %v: the heaviest has %d points, want %d to %d", weights, heaviest, pointsPerOwner/2, pointsPerOwner)
		}
		if len(r.points) > pointsPerOwner*len(weights) || len(r.first) > 2*len(r.points) {
			t.Errorf("weights %v: %d points and an index of %d", weights, len(r.points), len(r.first))
		}
	}
}

// TestOnlyKeysOfWhoComesOrGoesMove compares rings of ten and of nine owners, both
// ways at once.
func TestOnlyKeysOfWhoComesOrGoesMove(t *testing.T) {
	names := someNames(10)
	ten := New(names, ones(10))
	for gone := range names {
		rng := newRand()
		rest := slices.Delete(slices.Clone(names), gone, gone+1)
		nine := New(rest, ones(9))
		moved := 0
		const n = 5000
		for range n {
			key := rng.Uint64()
			before, after := ten.Owner(key), rest[nine.Owner(key)]
			if before == gone {
				moved++
			} else if names[before] != after {
				t.Fatalf("without %s the key %#x moved from %s to %s (seed %d)", names[gone], key, names[before], after, seed)
			}
		}
		if moved < n/20 || moved > n/5 {
			t.Errorf("without %s %d of %d keys moved, want about a tenth (seed %d)", names[gone], moved, n, seed)
		}
	}
}

// TestMoreWeightOnlyTakesKeys stays between two powers of two, where the scale and
// so the number of the others' points stays.
func TestMoreWeightOnlyTakesKeys(t *testing.T) {
	rng := newRand()
	names := someNames(4)
	before, after := New(names, []int{5, 5, 5, 5}), New(names, []int{8, 5, 5, 5})
	taken := 0
	for range 10_000 {
		key := rng.Uint64()
		was, is := before.Owner(key), after.Owner(key)
		if was != is && is != 0 {
			t.Fatalf("with more weight for 0 the key %#x moved from %d to %d (seed %d)", key, was, is, seed)
		}
		if was != is {
			taken++
		}
	}
	if taken == 0 {
		t.Error("more weight took no key")
	}
}

// TestFromGoesOnAsIfTheOwnerWereNotThere: the next one on the ring is the owner in
// the ring without the first, and so on.
func TestFromGoesOnAsIfTheOwnerWereNotThere(t *testing.T) {
	rng := newRand()
	names := someNames(6)
	r := New(names, ones(6))
	for range 30 {
		key := rng.Uint64()
		var order []string
		for i := range r.From(key) {
			if !slices.Contains(order, names[i]) {
				order = append(order, names[i])
			}
		}
		rest := slices.Clone(names)
		for i, got := range order {
			want := rest[New(rest, ones(len(rest))).Owner(key)]
			if got != want {
				t.Fatalf("From(%#x) comes to %s as number %d, want %s (seed %d)", key, got, i+1, want, seed)
			}
			rest = slices.DeleteFunc(rest, func(s string) bool { return s == got })
		}
		if len(rest) > 0 {
			t.Fatalf("From(%#x) did not come to %v (seed %d)", key, rest, seed)
		}
	}
}

func TestFromEnds(t *testing.T) {
	r := New(someNames(3), ones(3))
	steps := 0
	for range r.From(math.MaxUint64) {
		steps++
	}
	if steps != len(r.points) {
		t.Errorf("From took %d steps, want one for each of %d points", steps, len(r.points))
	}
	for i := range r.From(42) {
		if i != r.Owner(42) {
			t.Errorf("From(42) begins with %d, want %d", i, r.Owner(42))
		}
		break // an iterator that went on after this would panic
	}
}

// TestHashesAreTheSameInEveryProcess: if a version changed them, a fleet that is
// half upgraded would disagree about every client.
func TestHashesAreTheSameInEveryProcess(t *testing.T) {
	for _, c := range []struct {
		name      string
		got, want uint64
	}{
		{`String("")`, String(""), 0xf52a15e9a9b5e89b},
		{`String("http://10.0.0.1:8080")`, String("http://10.0.0.1:8080"), 0x5fa2e8fe8004590c},
		{"Words(0, 0)", Words(0, 0), 0x48218226ff3cd4bf},
		{"Words(1, 2)", Words(1, 2), 0x81a5c1377856b73},
	} {
		if c.got != c.want {
			t.Errorf("%s = %#x, want %#x", c.name, c.got, c.want)
		}
	}
}

// TestHashesChangeWithEveryBit is the least that a ring needs: flipping any bit of
// the input flips about half of the output.
func TestHashesChangeWithEveryBit(t *testing.T) {
	rng := newRand()
	for bit := range 128 {
		flips, n := 0, 200
		for range n {
			a, b := rng.Uint64(), rng.Uint64()
			x, y := a, b
			if bit < 64 {
				x ^= 1 << bit
			} else {
				y ^= 1 << (bit - 64)
			}
			for diff := Words(a, b) ^ Words(x, y); diff != 0; diff &= diff - 1 {
				flips++
			}
		}
		if mean := float64(flips) / float64(n); mean < 29 || mean > 35 {
			t.Errorf("flipping bit %d flips %.1f bits on average, want 32 ± 3 (seed %d)", bit, mean, seed)
		}
	}
}
