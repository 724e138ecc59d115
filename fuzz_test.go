package lb_test

import (
	"net/http/httptest"
	"strings"
	"testing"

	"example.com/lb"
)

// A target's URL is refused with an error that names it, or accepted in a form
// that is accepted again and means the same.
func FuzzTargetURL(f *testing.F) {
	for _, s := range []string{"http://10.0.0.1:8080", "https://[::1]/a%2Fb/", "http://u:secret@h", "http://h?q", "ftp://h", "h:80", "://", "", "http://h:99999", "HTTP://H/é"} {
		f.Add(s, "", 0)
	}
	f.Add("http://h", "name", -2)
	f.Fuzz(func(t *testing.T, url, host string, weight int) {
		p, err := lb.New([]lb.Target{{URL: url, Host: host, Weight: weight}})
		if err != nil {
			if !strings.HasPrefix(err.Error(), "lb: target 1: ") {
				t.Errorf("New(%q) = %v", url, err)
			}
			return
		}
		defer p.Close()
		b := p.Backends()[0]
		again, err := lb.New(lb.Targets(b.URL()))
		if err != nil {
			t.Fatalf("New(%q) accepts it as %q, which it refuses: %v", url, b.URL(), err)
		}
		defer again.Close()
		if s := again.Backends()[0].URL(); s != b.URL() {
			t.Errorf("%q becomes %q becomes %q", url, b.URL(), s)
		}
	})
}

// A strategy survives any address that a server or a middleware may set, and gives
// it the same backend each time.
func FuzzIPHashAddress(f *testing.F) {
	for _, s := range []string{"192.0.2.1:80", "[2001:db8::1%eth0]:1", "@", "", "]:[", "::", "[", "1.2.3.4", ":80"} {
		f.Add(s)
	}
	set := []*lb.Backend{lb.NewBackend(lb.Target{Name: "a"}), lb.NewBackend(lb.Target{Name: "b"}), lb.NewBackend(lb.Target{Name: "c"})}
	strategy := lb.IPHash()
	f.Fuzz(func(t *testing.T, addr string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = addr
		first := strategy.Pick(r, set)
		if second := strategy.Pick(r, set); first == nil || (first != second && addr != "" && addr != "@") {
			t.Errorf("%q goes to %v, then to %v", addr, first, second)
		}
	})
}
