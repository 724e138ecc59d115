package lbtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"time"

	"example.com/lb"
)

// The rule that also stands for a call that does not return while another rule is
// tried.
const (
	ruleReturns     = "returns"
	sentenceReturns = "Pick is called concurrently, once per attempt, and must not block."
)

// rules are tried in this order. The first tells that the strategy answers at
// all; the last looks back on all answers.
var rules = [...]rule{
	{ruleReturns, sentenceReturns, checkReturns},
	{"candidate", "Pick chooses one of candidates for r, or returns nil when none of them suits, which answers the request with 503.", checkCandidate},
	{"unchanged", "It must not change candidates or r, nor keep them after it returned: the slice is used again.", checkUnchanged},
	{"not-kept", "It must not change candidates or r, nor keep them after it returned: the slice is used again.", checkNotKept},
	{"any-request", "A backend that is not a candidate, and a panic, are counted in Stats as bad picks, and the pool picks one in its place.", checkAnyRequest},
	{"bookkeeping", "It must not change what it picks from either; the pool counts what is in flight.", checkBookkeeping},
	{"subset", "Candidates are then a subset of set, in its order.", checkSubset},
	{"unprepared", "A strategy must work unprepared too: a wrapper may not pass Prepare on.", checkUnprepared},
	{"churn", "Prepare is called without any lock held and may be called concurrently, also while Balancers that it returned before are still asked to Pick.", checkChurn},
	{"concurrent", "Pick is called concurrently, once per attempt, and must not block.", checkConcurrent},
	{"outcomes", "It is called concurrently, on the request's goroutine, so it must not block.", checkOutcomes},
	{"answers", "Pick chooses one of candidates for r, or returns nil when none of them suits, which answers the request with 503.", checkAnswers},
}

// checkReturns asks a little of everything; who does not return is found by watch.
func checkReturns(x *examination) error {
	for _, n := range []int{1, 3} {
		set := x.set(n)
		all, err := x.subjects(set)
		if err != nil {
			return err
		}
		for _, to := range all {
			if _, err := x.pick(to, request(x.rng), slices.Clone(set)); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkCandidate asks for all backends of sets of several sizes and loads.
func checkCandidate(x *examination) error {
	for n := 1; n <= 8; n++ {
		set := x.set(n)
		all, err := x.subjects(set)
		if err != nil {
			return err
		}
		for _, to := range all {
			for range 3 * n {
				if _, err := x.pick(to, request(x.rng), slices.Clone(set)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// checkUnchanged compares what Pick was given before and after. The slice has
// more room than elements, as the pool's have: who appends to it writes into an
// array that others read.
func checkUnchanged(x *examination) error {
	const n = 4
	array := append(x.set(n), x.set(n)...)
	all, err := x.subjects(array[:n])
	if err != nil {
		return err
	}
	for _, to := range all {
		for i := range 20 {
			given := slices.Clone(array)
			r, body := request(x.rng), new(untouched)
			if i%2 == 0 {
				r.Method, r.Body, r.ContentLength = http.MethodPost, body, 4
				r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			}
			before, ctx := r.Clone(r.Context()), r.Context()
			if _, err := x.pick(to, r, given[:n]); err != nil {
				return err
			}
			for i := range given {
				if given[i] != array[i] {
					return fmt.Errorf("%v left candidates as %v with %v behind them, want %v and %v", x.last.Load(), given[:n], given[n:], array[:n], array[n:])
				}
			}
			if what := difference(before, r); what != "" {
				return fmt.Errorf("%v changed %s of the request", x.last.Load(), what)
			}
			if r.Context() != ctx || body.touched {
				return fmt.Errorf("%v read or closed the body of the request, or changed its context", x.last.Load())
			}
		}
	}
	return nil
}

// untouched is a body that remembers whether it was used.
type untouched struct{ touched bool }

func (u *untouched) Read([]byte) (int, error) {
	u.touched = true
	return 0, errors.New("lbtest: a Balancer read the body of a request")
}

func (u *untouched) Close() error {
	u.touched = true
	return nil
}

// difference returns the name of an exported field in which the two differ.
func difference(before, after *http.Request) string {
	b, a := reflect.ValueOf(before).Elem(), reflect.ValueOf(after).Elem()
	for i := range b.NumField() {
		f := b.Type().Field(i)
		if !f.IsExported() || f.Name == "Body" {
			continue
		}
		if !reflect.DeepEqual(b.Field(i).Interface(), a.Field(i).Interface()) {
			return f.Name
		}
	}
	if before.Body != after.Body {
		return "Body"
	}
	return ""
}

// checkNotKept uses each slice again with other contents. Between two uses it is
// full of a backend that is never a candidate.
func checkNotKept(x *examination) error {
	parts := [][]*lb.Backend{x.set(3), x.set(3), x.set(2), x.set(3)}
	all, err := x.subjects(slices.Concat(parts...))
	if err != nil {
		return err
	}
	stale := x.backend("stale")
	for _, to := range all {
		buffers := [][]*lb.Backend{make([]*lb.Backend, 3), make([]*lb.Backend, 3)}
		for i := range 24 {
			// Each buffer is used several times in a row and then the other, so
			// that contents change under the same address and under another.
			buffer, part := buffers[i/4%2], parts[i%len(parts)]
			candidates := buffer[:copy(buffer, part)]
			_, err := x.pick(to, request(x.rng), candidates)
			if err != nil {
				return fmt.Errorf("after its slices were used again: %w", err)
			}
			for j := range buffer {
				buffer[j] = stale
			}
		}
	}
	return nil
}

// checkAnyRequest asks for requests that are odd, but that a server or a client
// may well hand to a pool.
func checkAnyRequest(x *examination) error {
	for _, n := range []int{1, 3} {
		set := x.set(n)
		all, err := x.subjects(set)
		if err != nil {
			return err
		}
		for _, to := range all {
			for _, odd := range oddRequests() {
				if _, err := x.pick(to, odd.r, slices.Clone(set)); err != nil {
					return fmt.Errorf("a request with %s: %w", odd.name, err)
				}
			}
		}
	}
	return nil
}

// checkBookkeeping compares what is in flight before and after picks.
func checkBookkeeping(x *examination) error {
	set := x.set(5)
	all, err := x.subjects(set)
	if err != nil {
		return err
	}
	before := inFlight(set)
	for _, to := range all {
		for range 20 {
			if _, err := x.pick(to, request(x.rng), slices.Clone(set)); err != nil {
				return err
			}
			if after := inFlight(set); !slices.Equal(before, after) {
				return fmt.Errorf("%v changed what is in flight from %v to %v", x.last.Load(), before, after)
			}
		}
	}
	return nil
}

func inFlight(set []*lb.Backend) []int {
	n := make([]int, len(set))
	for i, b := range set {
		n[i] = b.InFlight()
	}
	return n
}

// checkSubset asks for every part of a small set, for random parts of a larger
// one, and for what is left while one request tries them all.
func checkSubset(x *examination) error {
	for _, n := range []int{1, 4, 12} {
		set := x.set(n)
		to, _, err := x.prepare(set)
		if err != nil {
			return err
		}
		parts := make([][]*lb.Backend, 0, 32)
		for bits := 1; n <= 4 && bits < 1<<n; bits++ {
			var part []*lb.Backend
			for i, b := range set {
				if bits>>i&1 == 1 {
					part = append(part, b)
				}
			}
			parts = append(parts, part)
		}
		for range 16 {
			parts = append(parts, subset(x.rng, nil, set))
		}
		for _, part := range parts {
			for range 2 {
				if _, err := x.pick(to, request(x.rng), slices.Clone(part)); err != nil {
					return err
				}
			}
		}
		if err := x.exhaust(to, set); err != nil {
			return err
		}
	}
	return nil
}

// exhaust asks for one request again and again, each time without the backends
// that it got before.
func (x *examination) exhaust(to subject, set []*lb.Backend) error {
	r, left := request(x.rng), slices.Clone(set)
	for len(left) > 0 {
		b, err := x.pick(to, r, slices.Clone(left))
		if b == nil || err != nil {
			return err
		}
		left = slices.DeleteFunc(left, func(c *lb.Backend) bool { return c == b })
	}
	return nil
}

// checkUnprepared asks the same of the strategy as it is and prepared: if one of
// the two never finds a backend, it does not work.
func checkUnprepared(x *examination) error {
	set := x.set(5)
	ready, prepared, err := x.prepare(set)
	if err != nil {
		return err
	}
	var picked [2]int
	for i, to := range []subject{{Balancer: x.balancer}, ready} {
		rng := rand.New(rand.NewPCG(suiteSeed, 1)) // the same questions for both
		for range 30 {
			b, err := x.pick(to, request(rng), subset(rng, nil, set))
			if err != nil {
				return err
			}
			if b != nil {
				picked[i]++
			}
		}
		if err := x.exhaust(to, set); err != nil {
			return err
		}
	}
	if prepared && (picked[0] == 0) != (picked[1] == 0) {
		return fmt.Errorf("of the same 30 questions it answered %d with a backend unprepared and %d prepared, and the others with nil", picked[0], picked[1])
	}
	return nil
}

// checkChurn changes the set again and again and asks the strategy as prepared for
// the latest few sets, each for its own. A backend that left comes back as another
// backend of its name. Then the same happens all at once.
func checkChurn(x *examination) error {
	const kept = 4
	var live []subject
	set := x.set(4)
	for i := range 16 {
		to, _, err := x.prepare(set)
		if err != nil {
			return err
		}
		if to.set == nil {
			to.set = set // unprepared, but it can be asked for that set all the same
		}
		if live = append(live, to); len(live) > kept {
			live = live[1:]
		}
		for _, to := range live {
			for range 2 {
				if _, err := x.pick(to, request(x.rng), subset(x.rng, nil, to.set)); err != nil {
					return fmt.Errorf("after %d changes of the set: %w", i, err)
				}
			}
		}
		set = x.change(set)
	}
	return x.churnAtOnce()
}

// change returns a new set with something added, removed, replaced or moved.
func (x *examination) change(set []*lb.Backend) []*lb.Backend {
	set = slices.Clone(set)
	i := x.rng.IntN(len(set))
	switch kind := x.rng.IntN(4); {
	case kind == 0 && len(set) < 8:
		return slices.Insert(set, i, x.set(1)...)
	case kind == 1 && len(set) > 2:
		return slices.Delete(set, i, i+1)
	case kind == 2:
		x.rng.Shuffle(len(set), func(i, j int) { set[i], set[j] = set[j], set[i] })
	default:
		set[i] = x.backend(set[i].Name())
	}
	return set
}

// churnAtOnce lets some goroutines publish sets while each asks for its own.
func (x *examination) churnAtOnce() error {
	return x.together(4, func(x *examination) error {
		for range 4 {
			set := x.set(1 + x.rng.IntN(4))
			to, _, err := x.prepare(set)
			if err != nil {
				return err
			}
			for range 4 {
				if _, err := x.pick(to, request(x.rng), subset(x.rng, nil, set)); err != nil {
					return fmt.Errorf("while Prepare is called concurrently: %w", err)
				}
			}
		}
		return nil
	})
}

// together runs f in n goroutines, each with an examination of its own of the one
// strategy, and returns the first error.
func (x *examination) together(n int, f func(*examination) error) error {
	var all sync.WaitGroup
	errs := make([]error, n)
	start := make(chan struct{})
	for i := range n {
		mine := &examination{
			suite: x.suite, balancer: x.balancer,
			rng:      rand.New(rand.NewPCG(suiteSeed, uint64(i)+2)),
			backends: 100 * (i + 1), // names of its own
		}
		all.Go(func() {
			<-start
			errs[i] = f(mine)
		})
	}
	close(start)
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// checkConcurrent asks the strategy from several goroutines at once, each for
// candidates of its own, and the one prepared strategy for parts of its set.
func checkConcurrent(x *examination) error {
	common := x.set(6)
	shared, _, err := x.prepare(common)
	if err != nil {
		return err
	}
	return x.together(8, func(x *examination) error {
		own := x.set(3)
		buffer := make([]*lb.Backend, 0, len(common))
		for i := range 40 {
			to, set := shared, common
			if i%4 == 0 { // less often: an unprepared strategy may have much to build
				to, set = subject{Balancer: x.balancer}, own
			}
			candidates := subset(x.rng, buffer, set)
			b, err := x.pick(to, request(x.rng), candidates)
			if err != nil {
				return fmt.Errorf("asked from several goroutines: %w", err)
			}
			if b != nil {
				defer b.Acquire()(lb.Outcome{Stage: lb.StageDone, Status: http.StatusOK, Final: true})
			}
			clear(candidates) // a strategy that kept them now races
		}
		return nil
	})
}

// checkOutcomes tells a strategy that learns of outcomes of every kind, of
// backends that it never saw too, while it is asked.
func checkOutcomes(x *examination) error {
	l, ok := x.balancer.(lb.Learner)
	if !ok {
		return nil
	}
	set := x.set(4)
	to, _, err := x.prepare(set)
	if err != nil {
		return err
	}
	return x.together(4, func(x *examination) error {
		stranger := x.set(1)[0]
		for _, o := range outcomes() {
			for _, b := range append(slices.Clone(set), stranger) {
				q := &question{subject: to, call: fmt.Sprintf("Observe(%+v)", o), candidates: []*lb.Backend{b}}
				if err := x.call(q, func() { l.Observe(b, o) }); err != nil {
					return err
				}
				if _, err := x.pick(to, request(x.rng), subset(x.rng, nil, set)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func outcomes() []lb.Outcome {
	failure := errors.New("lbtest: a failure that was asked for")
	return []lb.Outcome{
		{},
		{Stage: lb.StageBody, Status: http.StatusOK, Attempt: 1, Wait: time.Millisecond},
		{Stage: lb.StageDone, Status: http.StatusOK, Attempt: 1, Wait: time.Millisecond, Total: time.Hour, Final: true},
		{Stage: lb.StageBody, Status: http.StatusServiceUnavailable, Attempt: 2, Reused: true},
		{Stage: lb.StageDial, Cause: lb.CauseRefused, Blame: lb.BlameBackend, Err: failure, Attempt: 1, NeverLeft: true},
		{Stage: lb.StageResponse, Cause: lb.CauseTimeout, Blame: lb.BlameBackend, Err: failure, Attempt: 3, Wait: time.Minute},
		{Stage: lb.StageRequest, Cause: lb.CauseClientGone, Blame: lb.BlameClient, Err: context.Canceled, Attempt: 1},
		{Stage: lb.StageBody, Cause: lb.CauseReset, Blame: lb.BlameBackend, Err: failure, Attempt: 1, Final: true},
	}
}

// checkAnswers finds a strategy that said nil to every question of the suite. It
// asks some by itself, in case it is the only rule that is tried.
func checkAnswers(x *examination) error {
	if err := checkCandidate(x); err != nil {
		return err
	}
	if asked := x.asked.Load(); x.picked.Load() == 0 {
		return fmt.Errorf("every one of %d picks was nil, so the suite could not try it; see CheckBalancer for what its backends and requests have", asked)
	}
	return nil
}
