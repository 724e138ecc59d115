package lb_test

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// Targets have TLS settings of their own, which traffic and probes heed alike
// (traefik/traefik#4887, caddyserver/caddy#7134, caddyserver/caddy#2483).
func TestTargetTLS(t *testing.T) {
	certificates, trust := exampleCertificate()
	synctest.Test(t, func(t *testing.T) {
		network := lbtest.NewNetwork()
		var targets []lb.Target
		var servers []*sniServer
		for i, serverName := range []string{"example.com", "example.com", "other.test"} {
			l, err := network.Listen(fmt.Sprintf("s%d.test:443", i))
			if err != nil {
				t.Fatal(err)
			}
			s := newSNIServer(l, certificates)
			defer s.http.Close()
			servers = append(servers, s)
			targets = append(targets, lb.Target{
				Name: fmt.Sprint(i), URL: fmt.Sprintf("https://s%d.test", i), Host: "example.com",
				TLS: &tls.Config{RootCAs: trust, ServerName: serverName},
			})
		}
		targets[1].Transport = network.Transport() // with the target's TLS
		pool := newPool(t, targets, over(network), lb.WithHealthCheck(lb.HealthCheck{Path: "/"}))
		defer advance(time.Second)
		defer pool.Close()
		advance(time.Minute)
		var states []string
		for _, b := range pool.Backends() {
			states = append(states, b.Status().String())
		}
		if got := strings.Join(states, " "); got != "healthy healthy unhealthy" {
			t.Errorf("states = %s: %s", got, pool.Backends()[0].Status().Reason)
		}
		for range 4 {
			if got := serve(pool, "/"); got.Code != 200 {
				t.Errorf("answer = %d %s", got.Code, got.Body)
			}
		}
		if servers[2].right.Load() != 0 || servers[2].wrong.Load() == 0 {
			t.Errorf("the third saw %d right names and %d others", servers[2].right.Load(), servers[2].wrong.Load())
		}
	})
}

// Another TLS or Transport makes another backend; the same one keeps it.
func TestTargetTransportIsPartOfTheIdentity(t *testing.T) {
	shared, config := &http.Transport{}, &tls.Config{}
	function := roundTripperFunc(noRoundTrip)
	base := lb.Target{Name: "a", URL: "https://a.test"}
	with := func(rt http.RoundTripper, c *tls.Config) lb.Target {
		target := base
		target.Transport, target.TLS = rt, c
		return target
	}
	for _, c := range []struct {
		name     string
		from, to lb.Target
		kept     bool
	}{
		{"neither", base, base, true},
		{"the same transport", with(shared, nil), with(shared, nil), true},
		{"another transport", with(shared, nil), with(&http.Transport{}, nil), false},
		{"a transport more", base, with(shared, nil), false},
		{"one that cannot be compared", with(function, nil), with(function, nil), false},
		{"the same TLS", with(nil, config), with(nil, config), true},
		{"another TLS", with(nil, config), with(nil, &tls.Config{}), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			pool := newPool(t, []lb.Target{c.from})
			defer pool.Close()
			before := pool.Backends()[0]
			if err := pool.SetTargets([]lb.Target{c.to}); err != nil {
				t.Fatal(err)
			}
			if kept := pool.Backends()[0] == before; kept != c.kept {
				t.Errorf("kept = %t, want %t", kept, c.kept)
			}
		})
	}
}

func TestTargetWayBadInput(t *testing.T) {
	_, err := lb.New([]lb.Target{
		{URL: "http://a.test", TLS: &tls.Config{}},
		{URL: "https://b.test", TLS: &tls.Config{}, Transport: roundTripperFunc(noRoundTrip)},
		{URL: "https://c.test", Transport: (*http.Transport)(nil)},
		{Name: "d", Handler: http.NotFoundHandler(), TLS: &tls.Config{}},
	})
	if err == nil {
		t.Fatal("New accepts it all")
	}
	for _, want := range []string{
		`target 1: TLS for URL "http://a.test": want https`, "target 2: TLS beside a lb_test.roundTripperFunc",
		"target 3: transport is a nil *http.Transport", "target 4: TLS or Transport beside a Handler",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("New = %v\nwant in it: %s", err, want)
		}
	}
}
