package main

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"example.com/lb/lbtest"
)

func TestAdminPortKnowsItsPathsAndMethods(t *testing.T) {
	t.Parallel()
	g := start(t)
	g.waitUsable(t, 3)
	for _, c := range []struct {
		method, path string
		status       int
		body         string // its beginning
	}{
		{http.MethodGet, "/healthz", 200, "ok\n"},
		{http.MethodHead, "/healthz", 200, ""},
		{http.MethodGet, "/readyz", 200, "ready\n"},
		{http.MethodGet, "/stats", 200, "{\n"},
		{http.MethodPost, "/stats", 405, ""},
		{http.MethodPut, "/healthz", 405, ""},
		{http.MethodDelete, "/readyz", 405, ""},
		{http.MethodGet, "/", 404, ""},
		{http.MethodGet, "/stats/", 404, ""},
	} {
		a, err := g.do(c.method, g.admin+c.path, "")
		if err != nil || a.status != c.status || !strings.HasPrefix(a.body, c.body) {
			t.Errorf("%s %s = %d %q (%v), want %d %q", c.method, c.path, a.status, a.body, err, c.status, c.body)
		}
	}
	if s := g.stats(t); s.Requests != 0 {
		t.Errorf("%d requests of the admin port or of probes were counted as traffic", s.Requests)
	}
}

func TestStatsHasItsKeys(t *testing.T) {
	t.Parallel()
	broken, whole := newBackend(t, "broken"), newBackend(t, "whole")
	broken.Set(lbtest.Reset())
	g := start(t, backendsFlag(broken, whole), "-health-interval", "1h")
	g.waitUsable(t, 2)
	g.get(t, g.traffic)
	g.get(t, g.traffic) // one of the two was on the broken one first
	var shown map[string]any
	text := g.get(t, g.admin+"/stats").body
	if err := json.Unmarshal([]byte(text), &shown); err != nil {
		t.Fatal(err)
	}
	keys := func(v any) []string { return slices.Sorted(maps.Keys(v.(map[string]any))) }
	want := []string{"algorithm", "backends", "client_closed", "cut", "failures", "healthy_backends", "in_flight", "requests", "retries", "total_backends"}
	if got := keys(shown); !slices.Equal(got, want) {
		t.Errorf("/stats has the keys %q, want %q", got, want)
	}
	want = []string{"failures", "healthy", "in_flight", "last_error", "name", "probe", "reason", "requests", "since", "state", "url"}
	if got := keys(shown["backends"].([]any)[0]); !slices.Equal(got, want) {
		t.Errorf("a backend in /stats has the keys %q, want %q", got, want)
	}
	s := g.stats(t)
	if s.Algorithm != "round-robin" || s.TotalBackends != 2 || s.Requests != 2 || s.Failures != 0 || s.Retries != 1 || s.InFlight != 0 {
		t.Errorf("/stats = %s, want 2 requests to 2 backends of round-robin, none failed, one tried again", text)
	}
	if b := s.Backends[0]; b.URL != broken.URL() || b.Requests != 1 || b.Failures != 1 || b.LastError == "" {
		t.Errorf("the broken backend in /stats = %+v, want 1 request that failed", b)
	}
	if b := s.Backends[1]; b.URL != whole.URL() || b.Requests != 2 || b.Failures != 0 || !b.Healthy {
		t.Errorf("the whole backend in /stats = %+v, want 2 requests, healthy", b)
	}
}
