package turn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// slow is nginx's smooth weighted round robin, a step at a time and as it is
// described: everybody's credit grows by its weight, who has the most is next and
// pays the sum.
type slow struct {
	weights, credit []int
}

func newSlow(weights []int) *slow { return &slow{weights, make([]int, len(weights))} }

func (s *slow) next() int {
	best, total := -1, 0
	for i, w := range s.weights {
		s.credit[i] += w
		total += w
		if best < 0 || s.credit[i] > s.credit[best] {
			best = i
		}
	}
	s.credit[best] -= total
	return best
}

func sum(weights []int) int {
	total := 0
	for _, w := range weights {
		total += w
	}
	return total
}

func TestOrderOfFiveOneOne(t *testing.T) {
	o := New([]int{5, 1, 1})
	var got []int
	for pos := range uint64(7) {
		got = append(got, o.At(pos))
	}
	if want := []int{0, 0, 1, 0, 2, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("At(0..6) = %v, want %v", got, want)
	}
}

func TestOrderIsThatOfTheSlowVersion(t *testing.T) {
	lists := [][]int{{1}, {7}, {1, 1}, {3, 3, 3}, {5, 1, 1}, {1, 1, 5}, {4, 2}, {100, 50, 25}, {1, 2, 3, 4, 5, 6, 7}, {6, 10, 15}, {maxLength - 1, 1}}
	const seed = 1
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		weights := make([]int, 1+rng.IntN(12))
		for i := range weights {
			weights[i] = (1 + rng.IntN(20)) * (1 + rng.IntN(3))
		}
		lists = append(lists, weights)
	}
	for _, weights := range lists {
		o, s := New(weights), newSlow(weights)
		if o.ends != nil {
			t.Fatalf("New(%v) wrote no turn down", weights)
		}
		for pos := range uint64(2*sum(weights) + 3) {
			if got, want := o.At(pos), s.next(); got != want {
				t.Fatalf("New(%v).At(%d) = %d, want %d (seed %d)", weights, pos, got, want, seed)
			}
		}
	}
}

func TestOrderHasBounds(t *testing.T) {
	for _, c := range []struct {
		name    string
		weights []int
		written int // the length of the turn that is kept, 0 for none
	}{
		{"equal weights need no turn", []int{9, 9, 9}, 0},
		{"a common divisor shortens the turn", []int{65534, 32767}, 3},
		{"the longest turn", []int{maxLength - 1, 1}, maxLength},
		{"one longer than the longest", []int{maxLength, 1}, 0},
		{"too much work for many weights", append(slices.Repeat([]int{5}, 1000), 7), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := New(c.weights)
			if len(o.turn) != c.written {
				t.Errorf("New(%d weights) keeps a turn of %d, want %d", len(c.weights), len(o.turn), c.written)
			}
			got := make([]int, len(c.weights))
			for pos := range uint64(sum(c.weights)) {
				got[o.At(pos)]++
			}
			for i, w := range c.weights {
				if d := got[i] - w; d < -3 || d > 3 {
					t.Errorf("in one turn %d is next %d times, want %d ± 3", i, got[i], w)
				}
			}
		})
	}
}

// TestLongTurnsKeepSharesInEveryRun: what has no table is spread so evenly that any
// run of positions, wherever it begins, keeps the shares within a few turns.
func TestLongTurnsKeepSharesInEveryRun(t *testing.T) {
	const seed = 1
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 100 {
		weights := make([]int, 2+rng.IntN(8))
		for i := range weights {
			weights[i] = 1 + rng.IntN(1<<(1+rng.IntN(16)))
		}
		weights[0] = 65521 // a prime, so that nothing shortens the turn
		o := New(weights)
		if o.ends == nil {
			t.Fatalf("New(%v) wrote a turn down", weights)
		}
		first, run := rng.Uint64(), 100+rng.IntN(20_000)
		got := make([]int, len(weights))
		for i := range run {
			got[o.At(first+uint64(i))]++
		}
		for i, w := range weights {
			want := float64(run) * float64(w) / float64(sum(weights))
			if math.Abs(float64(got[i])-want) > 5 {
				t.Errorf("weights %v: in %d positions from %d, %d is next %d times, want %.1f ± 5 (seed %d)", weights, run, first, i, got[i], want, seed)
			}
		}
	}
}

// TestLongTurnsFindThePlaceOfTheSlowVersion looks for each number in the weights by
// counting down.
func TestLongTurnsFindThePlaceOfTheSlowVersion(t *testing.T) {
	for _, weights := range [][]int{{maxLength, 1}, {1, maxLength}, {3000, 1, 3001, 2, 3002}} {
		o, total := New(weights), int64(sum(weights))
		seen := make(map[int64]bool, total)
		for pos := uint64(0); int64(len(seen)) < total; pos++ {
			at, want := Spread(pos, total), 0
			seen[at] = true
			for at >= int64(weights[want]) {
				at -= int64(weights[want])
				want++
			}
			if got := o.At(pos); got != want {
				t.Fatalf("New(%v).At(%d) = %d, want %d", weights, pos, got, want)
			}
		}
	}
}

// plainSpread computes Spread in floating point, which is exact enough to tell
// numbers apart that are not next to each other.
func plainSpread(pos uint64, total int64) float64 {
	fraction := float64(pos*0x9E3779B97F4A7C15) / (1 << 32) / (1 << 32)
	return fraction * float64(total)
}

func TestSpreadIsTheGoldenRatioScaled(t *testing.T) {
	const seed = 1
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 10_000 {
		pos, total := rng.Uint64(), 1+rng.Int64N(1<<(1+rng.IntN(40)))
		got := Spread(pos, total)
		if got < 0 || got >= total {
			t.Fatalf("Spread(%d, %d) = %d, want 0 to %d (seed %d)", pos, total, got, total-1, seed)
		}
		if want := plainSpread(pos, total); math.Abs(float64(got)+0.5-want) > 0.51 {
			t.Fatalf("Spread(%d, %d) = %d, want the whole part of %f (seed %d)", pos, total, got, want, seed)
		}
	}
}

func TestSpreadIsEvenInEveryRun(t *testing.T) {
	for _, total := range []int64{1, 2, 3, 5, 8, 100} {
		for _, first := range []uint64{0, 1, 12345, math.MaxUint64 - 50, math.MaxUint64} {
			t.Run(fmt.Sprintf("%d numbers from %d", total, first), func(t *testing.T) {
				got := make([]int64, total)
				for i := range uint64(total) * 50 {
					got[Spread(first+i, total)]++
				}
				for n, times := range got {
					if times < 47 || times > 53 {
						t.Errorf("%d came %d times in %d positions, want 50 ± 3", n, times, total*50)
					}
				}
			})
		}
	}
}
