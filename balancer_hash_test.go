package lb_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"

	"example.com/lb"
)

// TestIPHashDoesNotDependOnOrder is envoyproxy/envoy#20703: the table depended on
// the order in which hosts were listed, so two proxies disagreed.
func TestIPHashDoesNotDependOnOrder(t *testing.T) {
	set := weighted(1, 2, 3, 4, 5, 1, 2, 3, 1, 1)
	all := clients(10_000)
	want := owners(readyFor(lb.IPHash(), set), set, all)
	const seed = 1
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range 20 {
		rng.Shuffle(len(set), func(i, j int) { set[i], set[j] = set[j], set[i] })
		for how, b := range map[string]lb.Balancer{"unprepared": lb.IPHash(), "prepared": readyFor(lb.IPHash(), set)} {
			if got := owners(b, set, all); !slices.Equal(got, want) {
				t.Fatalf("after %d shuffles (seed %d) a second strategy, %s, gives clients other backends", i+1, seed, how)
			}
		}
	}
}

func TestIPHashGivesSharesByWeight(t *testing.T) {
	set := weighted(1, 2, 3, 4)
	got := tally{}
	for _, name := range owners(readyFor(lb.IPHash(), set), set, clients(10_000)) {
		got[name]++
	}
	// 320 points of the heaviest give shares within a few times 1/√320.
	got.wantShares(t, 0.25, tally{"a": 1000, "b": 2000, "c": 3000, "d": 4000})
}

func TestIPHashMovesOnlyClientsOfWhoLeft(t *testing.T) {
	set := weighted(slices.Repeat([]int{1}, 10)...)
	all := clients(10_000)
	b := readyFor(lb.IPHash(), set)
	before := owners(b, set, all)
	left := slices.Delete(slices.Clone(set), 3, 4)
	for how, after := range map[string][]string{
		"it is left out for one request": owners(b, left, all),
		"the set is published anew":      owners(readyFor(lb.IPHash(), left), left, all),
		"it is asked unprepared":         owners(lb.IPHash(), left, all),
	} {
		moved, heirs := 0, tally{}
		for i := range all {
			switch {
			case before[i] == "d":
				moved++
				heirs[after[i]]++
			case before[i] != after[i]:
				t.Fatalf("%s: client %s of %s, who stayed, moved to %s", how, all[i].RemoteAddr, before[i], after[i])
			}
		}
		if moved < 500 || moved > 1500 {
			t.Errorf("%s: %d of 10,000 clients moved, want about 1,000", how, moved)
		}
		for name, n := range heirs {
			if n > moved/3 {
				t.Errorf("%s: %s got %d of the %d clients that moved, want about a ninth", how, name, n, moved)
			}
		}
	}
}

func TestIPHashCountsAddressesByCustomer(t *testing.T) {
	set := weighted(slices.Repeat([]int{1}, 16)...)
	b := readyFor(lb.IPHash(), set)
	same := func(x, y string) bool {
		return b.Pick(requestFrom(x), set) == b.Pick(requestFrom(y), set)
	}
	for i := range 200 {
		net := fmt.Sprintf("2001:db8:%x:%x", i, i*7)
		if x, y := fmt.Sprintf("[%s::1]:80", net), fmt.Sprintf("[%s:a:b:c:%x]:5000", net, i); !same(x, y) {
			t.Errorf("%s and %s are in one /64 and go to different backends", x, y)
		}
		if x, y := fmt.Sprintf("192.0.2.%d:80", i), fmt.Sprintf("[::ffff:192.0.2.%d]:81", i); !same(x, y) {
			t.Errorf("%s and %s are one address and go to different backends", x, y)
		}
	}
	apart, v4 := 0, 0
	for i := range 200 {
		if !same(fmt.Sprintf("[2001:db8:0:%x::1]:80", i), fmt.Sprintf("[2001:db8:1:%x::1]:80", i)) {
			apart++
		}
		if !same(fmt.Sprintf("10.0.0.%d:80", i), fmt.Sprintf("10.0.1.%d:80", i)) {
			v4++
		}
	}
	if apart < 150 || v4 < 150 { // 15 of 16 on average
		t.Errorf("of 200 pairs of networks %d (IPv6 /64) and %d (IPv4) go to different backends, want about 187", apart, v4)
	}
}

func TestIPHashWithoutAnAddressGoesByWeight(t *testing.T) {
	set := weighted(3, 1)
	eachWay(t, lb.IPHash, set, func(t *testing.T, b lb.Balancer) {
		picks(b, set, 8000).wantShares(t, 0.12, tally{"a": 6000, "b": 2000})
	})
}

// clients returns n addresses, half of them IPv6, each in a network of its own.
func clients(n int) []*http.Request {
	list := make([]*http.Request, n)
	for i := range list {
		addr := fmt.Sprintf("10.%d.%d.7:%d", i>>8, i&255, 1024+i)
		if i%2 == 1 {
			addr = fmt.Sprintf("[2001:db8:%x:%x::1]:%d", i>>8, i&255, 1024+i)
		}
		list[i] = requestFrom(addr)
	}
	return list
}

// owners returns who each client belongs to.
func owners(b lb.Balancer, set []*lb.Backend, clients []*http.Request) []string {
	names := make([]string, len(clients))
	for i, r := range clients {
		names[i] = b.Pick(r, set).Name()
	}
	return names
}

// A middleware may have put an address without a port in the place of the peer's.
func TestIPHashTakesAddressesWithAndWithoutPort(t *testing.T) {
	set := weighted(1, 1, 1, 1)
	b := lb.IPHash()
	for i := range 200 {
		for with, without := range map[string]string{
			fmt.Sprintf("192.0.2.%d:1234", i):               fmt.Sprintf("192.0.2.%d", i),
			fmt.Sprintf("[2001:db8:0:%x::1]:1234", i):       fmt.Sprintf("2001:db8:0:%x::2", i),
			fmt.Sprintf("[::ffff:198.51.100.%d]:1234", i):   fmt.Sprintf("198.51.100.%d", i),
			fmt.Sprintf("[2001:db8:1:%x::1%%eth0]:1234", i): fmt.Sprintf("2001:db8:1:%x::1", i),
		} {
			if x, y := b.Pick(requestFrom(with), set), b.Pick(requestFrom(without), set); x != y {
				t.Fatalf("%s goes to %s, %s to %s", with, x, without, y)
			}
		}
	}
	picks := map[string]int{}
	for range 400 {
		picks[b.Pick(requestFrom("@"), set).Name()]++
	}
	if len(picks) != 4 {
		t.Errorf("requests over a unix socket, which have no address, went to %v", picks)
	}
}
