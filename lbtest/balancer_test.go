package lbtest_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// The sentences of the contract that the rules protect.
var sentences = map[string]string{
	"returns":     "Pick is called concurrently, once per attempt, and must not block.",
	"candidate":   "Pick chooses one of candidates for r, or returns nil when none of them suits, which answers the request with 503.",
	"unchanged":   "It must not change candidates or r, nor keep them after it returned: the slice is used again.",
	"not-kept":    "It must not change candidates or r, nor keep them after it returned: the slice is used again.",
	"any-request": "A backend that is not a candidate, and a panic, are counted in Stats as bad picks, and the pool picks one in its place.",
	"bookkeeping": "It must not change what it picks from either; the pool counts what is in flight.",
	"subset":      "Candidates are then a subset of set, in its order.",
	"unprepared":  "A strategy must work unprepared too: a wrapper may not pass Prepare on.",
	"churn":       "Prepare is called without any lock held and may be called concurrently, also while Balancers that it returned before are still asked to Pick.",
	"concurrent":  "Pick is called concurrently, once per attempt, and must not block.",
	"outcomes":    "It is called concurrently, on the request's goroutine, so it must not block.",
	"answers":     "Pick chooses one of candidates for r, or returns nil when none of them suits, which answers the request with 503.",
}

// TestSentencesAreThoseOfTheContract keeps the suite from quoting what the doc
// comments no longer say.
func TestSentencesAreThoseOfTheContract(t *testing.T) {
	source, err := os.ReadFile("../balancer.go")
	if err != nil {
		t.Fatal(err)
	}
	contract := strings.Join(strings.Fields(strings.ReplaceAll(string(source), "//", "")), " ")
	for name, sentence := range sentences {
		if !strings.Contains(contract, sentence) {
			t.Errorf("rule %s protects %q, which balancer.go does not say", name, sentence)
		}
	}
}

func TestGoodBalancersPass(t *testing.T) {
	for _, c := range []struct {
		name        string
		newBalancer func() lb.Balancer
	}{
		{"round robin", lb.RoundRobin},
		{"least connections", lb.LeastConnections},
		{"hash of the address", lb.IPHash},
		{"a function", func() lb.Balancer { return lb.BalancerFunc(first) }},
		{"a wrapper that hides Prepare", func() lb.Balancer { return struct{ lb.Balancer }{lb.RoundRobin()} }},
		{"a wrapper that hides Prepare of a ring", func() lb.Balancer { return struct{ lb.Balancer }{lb.IPHash()} }},
		{"nil for requests that suit no backend", func() lb.Balancer { return lb.BalancerFunc(strict) }},
		{"a learner behind a lock", func() lb.Balancer { return &learner{failures: map[*lb.Backend]int{}} }},
		{"Prepare that returns nil", func() lb.Balancer { return unprepared{} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := lbtest.CheckBalancer(c.newBalancer); err != nil {
				t.Error(err)
			}
			lbtest.RunBalancer(t, c.newBalancer)
		})
	}
}

func first(_ *http.Request, candidates []*lb.Backend) *lb.Backend { return candidates[0] }

// strict gives a request to a backend of its tenant or to none.
func strict(r *http.Request, candidates []*lb.Backend) *lb.Backend {
	for _, b := range candidates {
		if tenant, ok := b.Metadata("tenant"); ok && tenant == r.Header.Get("Tenant") {
			return b
		}
	}
	return nil
}

// learner picks who failed least.
type learner struct {
	mu       sync.Mutex // guards the following
	failures map[*lb.Backend]int
}

func (l *learner) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.MinFunc(candidates, func(a, b *lb.Backend) int { return l.failures[a] - l.failures[b] })
}

func (l *learner) Observe(b *lb.Backend, o lb.Outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.Blame == lb.BlameBackend {
		l.failures[b]++
	}
}

type unprepared struct{}

func (unprepared) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend { return candidates[0] }
func (unprepared) Prepare([]*lb.Backend) lb.Balancer                          { return (*prepared)(nil) }

// broken are strategies with one fault each. None has a data race, so that the
// suite finds them without the race detector, and so that this test passes with it.
var broken = []struct {
	name        string
	rule        string // that is meant for it
	newBalancer func() lb.Balancer
	want        string // in the error
}{
	{"picks a backend of its own", "candidate", func() lb.Balancer {
		own := lb.NewBackend(lb.Target{Name: "own"})
		return lb.BalancerFunc(func(*http.Request, []*lb.Backend) *lb.Backend { return own })
	}, `= "own", want one of the candidates or nil`},
	{"sorts the candidates", "unchanged", func() lb.Balancer {
		return lb.BalancerFunc(func(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
			slices.SortFunc(candidates, func(a, b *lb.Backend) int { return strings.Compare(b.Name(), a.Name()) })
			return candidates[0]
		})
	}, "left candidates as"},
	{"appends to the candidates", "unchanged", func() lb.Balancer {
		return lb.BalancerFunc(func(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
			twice := append(candidates, candidates...)
			return twice[len(twice)/2]
		})
	}, "behind them"},
	{"writes a header", "unchanged", func() lb.Balancer {
		return lb.BalancerFunc(func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
			if r.Header != nil {
				r.Header.Set("Backend", candidates[0].Name())
			}
			return candidates[0]
		})
	}, "changed Header of the request"},
	{"reads the body for a form value", "unchanged", func() lb.Balancer {
		return lb.BalancerFunc(func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
			return candidates[len(r.FormValue("user"))%len(candidates)]
		})
	}, "of the request"},
	{"reads the body", "unchanged", func() lb.Balancer {
		return lb.BalancerFunc(func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
			if r.Body != nil {
				io.Copy(io.Discard, r.Body)
			}
			return candidates[0]
		})
	}, "read or closed the body"},
	{"knows its candidates by where they are", "not-kept", func() lb.Balancer { return &byPlace{} }, "after its slices were used again"},
	{"believes every RemoteAddr has a port", "any-request", func() lb.Balancer {
		return lb.BalancerFunc(func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
			host, _, err := net.SplitHostPort(r.RemoteAddr)
			if err != nil {
				panic(err)
			}
			return candidates[len(host)%len(candidates)]
		})
	}, `a request with RemoteAddr ""`},
	{"believes every field has a value", "any-request", func() lb.Balancer {
		return lb.BalancerFunc(func(r *http.Request, candidates []*lb.Backend) *lb.Backend {
			return candidates[len(r.Header["Cookie"][0])%len(candidates)]
		})
	}, "panicked: runtime error: index out of range"},
	{"counts what is in flight", "bookkeeping", func() lb.Balancer {
		return lb.BalancerFunc(func(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
			candidates[0].Acquire()
			return candidates[0]
		})
	}, "changed what is in flight from"},
	{"picks from the set it was prepared for", "subset", func() lb.Balancer { return preparer{pickOfSet} }, "prepared for"},
	{"works only when it is prepared", "unprepared", func() lb.Balancer { return lazy{} }, "answered 0 with a backend unprepared and 30 prepared"},
	{"panics when it is not prepared", "unprepared", func() lb.Balancer { return preparer{nil} }, "unprepared, panicked"},
	{"panics while it is prepared", "subset", func() lb.Balancer {
		return preparer{func(set, _ []*lb.Backend) *lb.Backend { panic("no table") }}
	}, "panicked: no table"},
	{"prepares itself and not a copy", "churn", func() lb.Balancer { return &selfish{} }, "changes of the set"},
	{"finds backends by name", "churn", func() lb.Balancer { return &byName{} }, "an earlier backend that was called"},
	{"keeps the candidates where others find them", "concurrent", func() lb.Balancer { return &shared{} }, "asked from several goroutines"},
	{"believes every failure has an error", "outcomes", func() lb.Balancer { return careless{lb.BalancerFunc(first)} }, "Observe({"},
	{"answers nil to everything", "answers", func() lb.Balancer {
		return lb.BalancerFunc(func(*http.Request, []*lb.Backend) *lb.Backend { return nil })
	}, "picks was nil"},
}

func TestBrokenBalancersAreFound(t *testing.T) {
	for _, c := range broken {
		t.Run(c.name, func(t *testing.T) {
			err := lbtest.CheckBalancer(c.newBalancer)
			if err == nil {
				t.Fatalf("CheckBalancer() = nil, want the rule %s broken", c.rule)
			}
			found := findings(err)
			text, ok := found[c.rule]
			if !ok {
				t.Fatalf("CheckBalancer() found %v, want %s among them", err, c.rule)
			}
			for _, want := range []string{sentences[c.rule], c.want, "(seed "} {
				if !strings.Contains(text, want) {
					t.Errorf("rule %s: %q, want %q in it", c.rule, text, want)
				}
			}
		})
	}
}

// findings returns the errors of CheckBalancer by rule.
func findings(err error) map[string]string {
	found := make(map[string]string)
	rule := regexp.MustCompile(`breaks the rule "([^"]+)"`)
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		name := "none"
		if m := rule.FindStringSubmatch(e.Error()); m != nil {
			name = m[1]
		}
		found[name] += e.Error()
	}
	return found
}

// TestEveryRuleFindsSomething keeps a rule from being added without a strategy
// that breaks it.
func TestEveryRuleFindsSomething(t *testing.T) {
	tried := map[string]bool{"returns": true} // TestPickThatBlocksIsReported
	for _, c := range broken {
		tried[c.rule] = true
	}
	for name := range sentences {
		if !tried[name] {
			t.Errorf("no strategy is broken on purpose for rule %s", name)
		}
	}
	out, err := runChild(t, "first", "")
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	ran := regexp.MustCompile(`--- PASS: TestRunBalancerInAChild/(\S+)`).FindAllStringSubmatch(out, -1)
	for _, m := range ran {
		if _, ok := sentences[m[1]]; !ok {
			t.Errorf("rule %s has no sentence in this test", m[1])
		}
	}
	if len(ran) != len(sentences) {
		t.Errorf("RunBalancer ran %d rules, want %d", len(ran), len(sentences))
	}
}

// byPlace remembers what it picked from a slice and believes that the same slice
// has the same backends.
type byPlace struct {
	mu    sync.Mutex // guards the following
	place **lb.Backend
	pick  *lb.Backend
}

func (p *byPlace) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.place != &candidates[0] {
		p.place, p.pick = &candidates[0], candidates[0]
	}
	return p.pick
}

// preparer has a Prepare that works by pick. Unprepared it takes the first
// candidate, or panics if pick is nil.
type preparer struct {
	pick func(set, candidates []*lb.Backend) *lb.Backend
}

func (p preparer) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	if p.pick == nil {
		panic("not prepared")
	}
	return candidates[0]
}

func (p preparer) Prepare(set []*lb.Backend) lb.Balancer { return &prepared{p.pick, set} }

type prepared struct {
	pick func(set, candidates []*lb.Backend) *lb.Backend
	set  []*lb.Backend
}

func (p *prepared) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	if p.pick == nil {
		return candidates[0]
	}
	return p.pick(p.set, candidates)
}

func pickOfSet(set, _ []*lb.Backend) *lb.Backend { return set[0] }

// lazy returns nil unless it was prepared.
type lazy struct{}

func (lazy) Pick(*http.Request, []*lb.Backend) *lb.Backend { return nil }
func (lazy) Prepare([]*lb.Backend) lb.Balancer             { return lb.BalancerFunc(first) }

// selfish returns itself from Prepare, so that Balancers that it returned before
// pick by the newest set.
type selfish struct{ set atomic.Pointer[[]*lb.Backend] }

func (s *selfish) Prepare(set []*lb.Backend) lb.Balancer {
	s.set.Store(&set)
	return s
}

func (s *selfish) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	set := s.set.Load()
	if set == nil {
		return candidates[0]
	}
	for _, b := range *set {
		if slices.Contains(candidates, b) {
			return b
		}
	}
	return (*set)[0]
}

// byName remembers backends by their names.
type byName struct{ known sync.Map }

func (n *byName) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	b, _ := n.known.LoadOrStore(candidates[0].Name(), candidates[0])
	return b.(*lb.Backend)
}

// shared puts its candidates where another Pick replaces them. Each operation is
// atomic, so there is no data race, only a wrong result.
type shared struct{ candidates atomic.Pointer[[]*lb.Backend] }

func (s *shared) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	mine := slices.Clone(candidates)
	s.candidates.Store(&mine)
	for range 1000 { // give others the time, if there are others
		if s.candidates.Load() != &mine {
			break
		}
		runtime.Gosched()
	}
	return (*s.candidates.Load())[0]
}

type careless struct{ lb.Balancer }

func (careless) Observe(_ *lb.Backend, o lb.Outcome) {
	if o.Status == 0 {
		_ = o.Err.Error()
	}
}

// keeper keeps the first slice that it was given. When calls overlap that is a
// data race too, so a child process tries it on one rule alone.
type keeper struct{ kept []*lb.Backend }

func (k *keeper) Pick(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
	if k.kept == nil {
		k.kept = candidates
	}
	return k.kept[0]
}

const childEnv = "LBTEST_BALANCER"

// TestRunBalancerInAChild is run by other tests in a process of its own, because
// RunBalancer is to fail there.
func TestRunBalancerInAChild(t *testing.T) {
	switch name := os.Getenv(childEnv); name {
	case "first":
		lbtest.RunBalancer(t, func() lb.Balancer { return lb.BalancerFunc(first) })
	case "keeper":
		lbtest.RunBalancer(t, func() lb.Balancer { return &keeper{} })
	default:
		for _, c := range broken {
			if c.name == name {
				lbtest.RunBalancer(t, c.newBalancer)
			}
		}
	}
}

// runChild runs RunBalancer on the strategy of that name, for one rule or for all.
func runChild(t *testing.T, name, rule string) (output string, err error) {
	t.Helper()
	pattern := "^TestRunBalancerInAChild$"
	if rule != "" {
		pattern += "/^" + rule + "$"
	}
	cmd := exec.Command(os.Args[0], "-test.run="+pattern, "-test.v")
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestRunBalancerFailsInTheSubtestOfTheRule(t *testing.T) {
	for _, c := range []struct{ name, strategy, rule, only string }{
		{name: "all rules", strategy: "counts what is in flight", rule: "bookkeeping"},
		{name: "one rule", strategy: "keeper", rule: "not-kept", only: "not-kept"},
		{name: "the last rule asks for itself", strategy: "answers nil to everything", rule: "answers", only: "answers"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := runChild(t, c.strategy, c.only)
			if err == nil {
				t.Fatalf("RunBalancer passed a broken strategy:\n%s", out)
			}
			for _, want := range []string{"--- FAIL: TestRunBalancerInAChild/" + c.rule, sentences[c.rule]} {
				if !strings.Contains(out, want) {
					t.Errorf("want %q in the output:\n%s", want, out)
				}
			}
			if n := strings.Count(out, "--- FAIL: TestRunBalancerInAChild/"); n != 1 {
				t.Errorf("%d rules failed, want only %s:\n%s", n, c.rule, out)
			}
		})
	}
}

func TestPickThatBlocksIsReported(t *testing.T) {
	for _, c := range []struct {
		name string
		// stop waits for ever, until the test ends
		newBalancer func(stop func()) lb.Balancer
	}{
		{"at once", func(stop func()) lb.Balancer {
			return lb.BalancerFunc(func(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
				stop()
				return candidates[0]
			})
		}},
		{"when there is more than it knows", func(stop func()) lb.Balancer {
			return lb.BalancerFunc(func(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
				if len(candidates) > 6 {
					stop()
				}
				return candidates[0]
			})
		}},
		{"in Prepare", func(stop func()) lb.Balancer {
			return blocksPrepare{lb.BalancerFunc(first), stop}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // so that the wait takes no time
				end := make(chan struct{})
				defer close(end)
				err := lbtest.CheckBalancer(func() lb.Balancer { return c.newBalancer(func() { <-end }) })
				if err == nil {
					t.Fatal("CheckBalancer() = nil, want the rule returns broken")
				}
				found := findings(err)
				for _, want := range []string{sentences["returns"], "did not return within 10s"} {
					if !strings.Contains(found["returns"], want) {
						t.Errorf("rule returns: %q, want %q in it", found["returns"], want)
					}
				}
				if len(found) != 2 || !strings.Contains(found["none"], "was not tried") {
					t.Errorf("CheckBalancer() = %v, want the rules that follow not tried", err)
				}
			})
		})
	}
}

type blocksPrepare struct {
	lb.Balancer
	stop func()
}

func (p blocksPrepare) Prepare([]*lb.Backend) lb.Balancer {
	p.stop()
	return p
}

func TestOtherEndsOfAPickAreReported(t *testing.T) {
	exits := func() lb.Balancer {
		return lb.BalancerFunc(func(*http.Request, []*lb.Backend) *lb.Backend {
			runtime.Goexit()
			return nil
		})
	}
	for _, c := range []struct {
		name        string
		newBalancer func() lb.Balancer
		want        string
	}{
		{"a Pick that ends its goroutine", exits, "ended the goroutine of its caller"},
		{"no Balancer", func() lb.Balancer { return nil }, "newBalancer returned nil"},
		{"a nil function", func() lb.Balancer { return lb.BalancerFunc(nil) }, "newBalancer returned nil"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := lbtest.CheckBalancer(c.newBalancer); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("CheckBalancer() = %v, want %q in it", err, c.want)
			}
		})
	}
}

func ExampleCheckBalancer() {
	newest := func() lb.Balancer {
		return lb.BalancerFunc(func(_ *http.Request, candidates []*lb.Backend) *lb.Backend {
			return candidates[len(candidates)] // off by one
		})
	}
	err := lbtest.CheckBalancer(newest)
	fmt.Println(err != nil, strings.Contains(err.Error(), "index out of range"))
	fmt.Println(lbtest.CheckBalancer(lb.RoundRobin))
	// Output:
	// true true
	// <nil>
}

func ExampleRunBalancer() {
	var t *testing.T // of a test function
	_ = func() {
		lbtest.RunBalancer(t, func() lb.Balancer { return lb.LeastConnections() })
	}
}
