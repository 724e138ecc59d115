// Package turn is the arithmetic of taking turns: the order in which a weighted
// round robin goes round, and shares that are spread evenly without a table.
package turn

import "math/bits"

// maxWork bounds the steps of building an order (a turn's length times the
// number of weights), maxLength its length. At the bound the building takes a
// few milliseconds and the order 32 KiB.
const (
	maxWork   = 1 << 20
	maxLength = 1 << 13
)

// Order says who is next. It is immutable and may be used concurrently.
type Order struct {
	n     int
	turn  []int32 // one turn; nil if the weights are equal or the turn too long
	ends  []int64 // running sums of the weights, if the turn is too long
	total int64
}

// New returns the order for weights, all of which must be positive.
//
// It is that of the smooth weighted round robin of nginx: each step adds to
// everybody's credit its weight, the one with the most credit is next and pays
// the sum of all weights. Weights 5, 1, 1 give 0 0 1 0 2 0 0.
//
// Where a turn would be too long to write down, positions are spread over the
// weights by Spread, which keeps every share as exactly but in no fixed order.
func New(weights []int) *Order {
	o := &Order{n: len(weights)}
	if o.n == 0 {
		return o
	}
	divisor, equal := 0, true
	for _, w := range weights {
		divisor = gcd(w, divisor)
		equal = equal && w == weights[0]
		o.total += int64(w)
	}
	if equal {
		return o
	}
	length := o.total / int64(divisor)
	if length > maxLength || length*int64(o.n) > maxWork {
		o.ends = make([]int64, o.n)
		sum := int64(0)
		for i, w := range weights {
			sum += int64(w)
			o.ends[i] = sum
		}
		return o
	}
	o.turn = smooth(weights, int64(divisor), int(length))
	return o
}

func smooth(weights []int, divisor int64, length int) []int32 {
	turn := make([]int32, length)
	credit := make([]int64, len(weights))
	for step := range turn {
		best := 0
		for i, w := range weights {
			credit[i] += int64(w) / divisor
			if credit[i] > credit[best] {
				best = i
			}
		}
		credit[best] -= int64(length)
		turn[step] = int32(best)
	}
	return turn
}

// At returns whose turn it is at position pos: an index of the weights.
func (o *Order) At(pos uint64) int {
	switch {
	case o.turn != nil:
		return int(o.turn[pos%uint64(len(o.turn))])
	case o.ends == nil:
		return int(pos % uint64(o.n))
	}
	at := Spread(pos, o.total)
	low, high := 0, o.n-1
	for low < high {
		if mid := int(uint(low+high) / 2); o.ends[mid] > at {
			high = mid
		} else {
			low = mid + 1
		}
	}
	return low
}

// Spread maps position pos to a number from 0 to total-1 so that any run of
// positions is spread evenly over the numbers: multiples of the golden ratio,
// modulo 1, scaled (Weyl's sequence with the lowest discrepancy).
func Spread(pos uint64, total int64) int64 {
	const golden = 0x9E3779B97F4A7C15 // 2^64 divided by the golden ratio
	high, _ := bits.Mul64(pos*golden, uint64(total))
	return int64(high)
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
