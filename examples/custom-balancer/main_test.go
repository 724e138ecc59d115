package main

import (
	"net/http"
	"testing"

	"example.com/lb"
	"example.com/lb/lbtest"
)

func TestByTenantKeepsTheContract(t *testing.T) {
	lbtest.RunBalancer(t, func() lb.Balancer { return byTenant{lb.LeastConnections()} })
}

func TestByTenantPrefersTheTenantsBackend(t *testing.T) {
	a := lb.NewBackend(lb.Target{Name: "a"})
	b := lb.NewBackend(lb.Target{Name: "b", Metadata: map[string]string{"tenant": "acme"}})
	b.Acquire() // busy, which acme does not mind
	strategy := byTenant{lb.LeastConnections()}
	for _, c := range []struct {
		name, tenant string
		candidates   []*lb.Backend
		want         *lb.Backend
	}{
		{"its own backend", "acme", []*lb.Backend{a, b}, b},
		{"another while its own is away", "acme", []*lb.Backend{a}, a},
		{"the least busy for a tenant without one", "nobody", []*lb.Backend{a, b}, a},
		{"the least busy without a tenant", "", []*lb.Backend{a, b}, a},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &http.Request{Header: http.Header{"Tenant": {c.tenant}}}
			if got := strategy.Pick(r, c.candidates); got != c.want {
				t.Errorf("Pick(tenant %q, %v) = %v, want %v", c.tenant, c.candidates, got, c.want)
			}
		})
	}
}

func TestRun(t *testing.T) {
	if err := run(); err != nil {
		t.Error(err)
	}
}
