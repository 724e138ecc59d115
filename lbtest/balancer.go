package lbtest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"example.com/lb"
)

const (
	// suiteSeed seeds what the suite chooses by chance: the same in every run, so
	// that a rule that breaks once breaks again.
	suiteSeed = 1
	// pickLimit is how long the suite waits for a Balancer while none of the calls
	// under way returns. It is generous: a busy machine must not fail a good one.
	pickLimit = 10 * time.Second
)

// CheckBalancer tries whether a strategy keeps the contract of [lb.Balancer] and
// of [lb.Preparer] and [lb.Learner], if it is one. It returns nil if it found
// nothing wrong, else one error that names each broken rule, what was asked and
// answered, and the sentence of the contract that the rule protects. A panic of
// the strategy is such a finding, not a crash.
//
// newBalancer returns a new strategy at each call; it is called once per rule, on
// the caller's goroutine.
//
// The backends of the suite have names, weights from 1 to [lb.MaxWeight],
// attempts in flight and the metadata "tenant", which is "red", "green" or
// "blue". Some of the requests name one of these in the header field Tenant. A
// strategy that needs other facts to make a choice should get them from
// newBalancer, because one that returns nil for every request of the suite is
// reported: nothing could be learned of it.
//
// The suite shows that picks are valid and that the strategy does no harm: to the
// lists it is given, to requests, to the pool's bookkeeping, to itself when calls
// overlap or sets change. It does not show that the choice is a good one: neither
// shares, nor stickiness, nor that nil is returned only when it should be; test
// those with backends of [lb.NewBackend]. Data races show only under the race
// detector: run the suite with -race.
//
// A Pick that does not return is reported after ten seconds. Its goroutine stays
// behind, and the rules that follow are not tried.
//
// The suite grows: a strategy that passes now may be found out later.
func CheckBalancer(newBalancer func() lb.Balancer) error {
	if newBalancer == nil {
		return errors.New("lbtest: newBalancer is nil")
	}
	s := &suite{newBalancer: newBalancer}
	broken := make([]error, 0, len(rules))
	for _, r := range rules {
		broken = append(broken, s.check(r))
	}
	return errors.Join(broken...)
}

// RunBalancer is [CheckBalancer] for a test: it tries each rule in a subtest that
// is called after it.
//
//	func TestMine(t *testing.T) {
//		lbtest.RunBalancer(t, func() lb.Balancer { return NewMine() })
//	}
func RunBalancer(t *testing.T, newBalancer func() lb.Balancer) {
	t.Helper()
	s := &suite{newBalancer: newBalancer}
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			if err := s.check(r); err != nil {
				t.Error(err)
			}
		})
	}
}

// rule is one demand on a Balancer.
type rule struct {
	name     string
	sentence string // of the contract, word for word
	check    func(*examination) error
}

// suite is one run over all rules.
type suite struct {
	newBalancer func() lb.Balancer
	stuck       bool // a call of the strategy did not return

	calls  atomic.Int64 // of the strategy, begun and ended: stands still when stuck
	asked  atomic.Int64 // Picks
	picked atomic.Int64 // Picks that were not nil
	last   atomic.Pointer[question]
}

// examination is the check of one rule.
type examination struct {
	*suite
	balancer lb.Balancer
	rng      *rand.Rand
	backends int // made so far
}

// check tries one rule and returns how it was broken.
func (s *suite) check(r rule) error {
	if s.stuck {
		return fmt.Errorf("lbtest: rule %s was not tried: an earlier call of the strategy has not returned", r.name)
	}
	b := s.newBalancer()
	if isNil(b) {
		return fmt.Errorf("lbtest: rule %s was not tried: newBalancer returned nil", r.name)
	}
	x := &examination{suite: s, balancer: b, rng: rand.New(rand.NewPCG(suiteSeed, 0))}
	err, returned := s.watch(func() error { return r.check(x) })
	if !returned {
		s.stuck = true
		r.name, r.sentence = ruleReturns, sentenceReturns
	}
	if err != nil {
		return fmt.Errorf("lbtest: %T breaks the rule %q: %w (seed %d)\n\tthe contract: %s", b, r.name, err, suiteSeed, r.sentence)
	}
	return nil
}

// watch runs f unless a call of the strategy in it does not return: then it gives
// up and leaves f alone.
func (s *suite) watch(f func() error) (err error, returned bool) {
	done := make(chan error, 1)
	go func() {
		err := errors.New("the strategy ended the goroutine of its caller")
		defer func() { done <- err }()
		err = f()
	}()
	tick := time.NewTicker(pickLimit)
	defer tick.Stop()
	seen := int64(-1)
	for {
		select {
		case err := <-done:
			return err, true
		case <-tick.C:
			calls := s.calls.Load()
			if calls == seen {
				return fmt.Errorf("%v did not return within %v", s.last.Load(), pickLimit), false
			}
			seen = calls
		}
	}
}

// subject is a Balancer to ask and how it came about.
type subject struct {
	lb.Balancer
	set []*lb.Backend // that it was prepared for; nil if unprepared
}

// question is one call of the strategy, for messages.
type question struct {
	subject
	call       string
	r          *http.Request // nil unless the call is a Pick
	candidates []*lb.Backend
}

func (q *question) String() string {
	if q.r == nil {
		return fmt.Sprintf("%s(%v)", q.call, q.candidates)
	}
	how := "unprepared"
	if q.set != nil {
		how = fmt.Sprintf("prepared for %v", q.set)
	}
	return fmt.Sprintf("%s(%s %q from %q, %v), %s,", q.call, q.r.Method, q.r.URL, q.r.RemoteAddr, q.candidates, how)
}

// call makes one call of the strategy and turns its panic into an error.
func (s *suite) call(q *question, f func()) (err error) {
	s.last.Store(q)
	s.calls.Add(1)
	defer s.calls.Add(1)
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("%v panicked: %v", q, v)
		}
	}()
	f()
	return nil
}

// pick asks to for r. A pick that is not one of candidates is an error.
func (s *suite) pick(to subject, r *http.Request, candidates []*lb.Backend) (*lb.Backend, error) {
	// The copy is what the strategy was asked, whatever it does to the slice.
	q := &question{to, "Pick", r, slices.Clone(candidates)}
	var got *lb.Backend
	s.asked.Add(1)
	if err := s.call(q, func() { got = to.Pick(r, candidates) }); err != nil || got == nil {
		return nil, err
	}
	s.picked.Add(1)
	if slices.Contains(q.candidates, got) {
		return got, nil
	}
	for _, b := range q.candidates {
		if b.Name() == got.Name() {
			return nil, fmt.Errorf("%v = an earlier backend that was called %q too, want one of the candidates or nil", q, got.Name())
		}
	}
	return nil, fmt.Errorf("%v = %q, want one of the candidates or nil", q, got.Name())
}

// prepare returns the strategy prepared for a copy of set and true, if it wants
// to be prepared.
func (x *examination) prepare(set []*lb.Backend) (to subject, prepared bool, err error) {
	to = subject{Balancer: x.balancer}
	p, ok := x.balancer.(lb.Preparer)
	if !ok {
		return to, false, nil
	}
	var b lb.Balancer
	given := slices.Clone(set)
	if err := x.call(&question{subject: to, call: "Prepare", candidates: given}, func() { b = p.Prepare(given) }); err != nil {
		return to, false, err
	}
	if isNil(b) {
		return to, false, nil
	}
	return subject{b, slices.Clone(set)}, true, nil
}

// subjects returns the strategy as it is and, if it can be, prepared for set.
func (x *examination) subjects(set []*lb.Backend) ([]subject, error) {
	all := []subject{{Balancer: x.balancer}}
	to, prepared, err := x.prepare(set)
	if prepared {
		all = append(all, to)
	}
	return all, err
}

// tenants are the values of the metadata "tenant" and of the field Tenant.
var tenants = [...]string{"red", "green", "blue"}

// set returns n new backends with attempts in flight; no name comes twice.
func (x *examination) set(n int) []*lb.Backend {
	set := make([]*lb.Backend, n)
	for i := range set {
		x.backends++
		set[i] = x.backend(fmt.Sprintf("b%d", x.backends))
	}
	return set
}

// backend returns a new backend of that name.
func (x *examination) backend(name string) *lb.Backend {
	weight := 1 + x.rng.IntN(5)
	if x.rng.IntN(8) == 0 {
		weight = lb.MaxWeight
	}
	b := lb.NewBackend(lb.Target{
		Name:     name,
		URL:      "http://" + name + ".test",
		Weight:   weight,
		Metadata: map[string]string{"tenant": tenants[x.rng.IntN(len(tenants))]},
	})
	for range x.rng.IntN(4) {
		b.Acquire()
	}
	return b
}

// subset appends to list a random part of set, never none, in the order of set.
func subset(rng *rand.Rand, list, set []*lb.Backend) []*lb.Backend {
	keep := 1 + rng.IntN(len(set))
	for i, b := range set {
		// keep of the len(set)-i that are left are still to be chosen
		if rng.IntN(len(set)-i) < keep {
			list = append(list, b)
			keep--
		}
	}
	return list
}

// isNil tells what the pool takes for nil: also an interface around a nil pointer.
func isNil(b lb.Balancer) bool {
	if b == nil {
		return true
	}
	switch v := reflect.ValueOf(b); v.Kind() {
	case reflect.Pointer, reflect.Func, reflect.Map, reflect.Chan, reflect.Slice:
		return v.IsNil()
	}
	return false
}

// request returns a random request of the plain kind.
func request(rng *rand.Rand) *http.Request {
	r := &http.Request{
		Method: http.MethodGet,
		URL:    &url.URL{Path: fmt.Sprintf("/item/%d", rng.IntN(100)), RawQuery: "q=1"},
		Proto:  "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header:     http.Header{"User-Agent": {"lbtest"}, "Cookie": {"session=0123456789abcdef"}},
		Body:       http.NoBody,
		Host:       "service.test",
		RemoteAddr: fmt.Sprintf("192.0.2.%d:%d", rng.IntN(256), 1024+rng.IntN(60000)),
	}
	r.RequestURI = r.URL.RequestURI()
	if rng.IntN(2) == 0 {
		r.Header.Set("Tenant", tenants[rng.IntN(len(tenants))])
	}
	return r
}

type oddRequest struct {
	name string // what is odd
	r    *http.Request
}

func oddRequests() []oddRequest {
	rng := rand.New(rand.NewPCG(suiteSeed, 0))
	gone, leave := context.WithCancel(context.Background())
	leave()
	var all []oddRequest
	odd := func(name string, change func(r *http.Request)) {
		r := request(rng)
		change(r)
		all = append(all, oddRequest{name, r})
	}
	from := func(addr string) {
		odd(fmt.Sprintf("RemoteAddr %q", addr), func(r *http.Request) { r.RemoteAddr = addr })
	}
	from("")
	from("@") // a client on a unix socket
	from("/run/app.sock")
	from("[2001:db8::1]:443")
	from("[fe80::1%eth0]:443")
	from("[::ffff:192.0.2.1]:443")
	from("192.0.2.1") // set by some middleware
	from("client.test:443")
	odd("an empty header", func(r *http.Request) { r.Header = http.Header{} })
	odd("no header", func(r *http.Request) { r.Header = nil })
	odd("header fields without a value", func(r *http.Request) {
		r.Header = http.Header{"Tenant": {}, "Cookie": {""}, "Authorization": {""}, "X-Forwarded-For": nil}
	})
	odd("large and binary fields", func(r *http.Request) {
		r.Header = http.Header{"Tenant": {strings.Repeat("x", 1<<16)}, "Cookie": {"\xff=;=;;"}, "X-Forwarded-For": {"\x80, ,", ""}}
	})
	odd("an empty method, as clients may send", func(r *http.Request) { r.Method = "" })
	odd("an unusual method", func(r *http.Request) { r.Method = "M-SEARCH" })
	odd("an empty path", func(r *http.Request) { r.URL, r.RequestURI = &url.URL{}, "" })
	odd("the path *", func(r *http.Request) { r.Method, r.URL, r.RequestURI = http.MethodOptions, &url.URL{Path: "*"}, "*" })
	odd("a query that cannot be parsed", func(r *http.Request) { r.URL.RawQuery = "%zz;=&&" })
	odd("CONNECT", func(r *http.Request) {
		r.Method, r.URL, r.Host = http.MethodConnect, &url.URL{Host: "db.test:5432"}, "db.test:5432"
	})
	odd("no Host", func(r *http.Request) { r.Host, r.Proto, r.ProtoMinor = "", "HTTP/1.0", 0 })
	odd("a nil Body, as clients may send", func(r *http.Request) { r.Body = nil })
	odd("a body of unknown length", func(r *http.Request) {
		r.Method, r.Body, r.ContentLength = http.MethodPost, new(untouched), -1
	})
	odd("HTTP/2 over TLS", func(r *http.Request) {
		r.Proto, r.ProtoMajor, r.ProtoMinor, r.TLS = "HTTP/2.0", 2, 0, new(tls.ConnectionState)
	})
	odd("a context that has ended", func(r *http.Request) { *r = *r.WithContext(gone) })
	return all
}
