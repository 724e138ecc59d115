package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestProbeCanBeSwitched(t *testing.T) {
	h := handler("a", "/healthz")
	for i, step := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"GET", "/", 200, "a, 0 bytes"},
		{"GET", "/healthz", 200, "ok"},
		{"POST", "/probe/off", 200, "/healthz is now off"},
		{"GET", "/healthz", 503, "switched off"},
		{"GET", "/", 200, "a, 0 bytes"}, // only the probe is off
		{"POST", "/probe/on", 200, "/healthz is now on"},
		{"GET", "/healthz", 200, "ok"},
		{"GET", "/probe/off", 200, "a, 0 bytes"}, // a GET switches nothing
		{"GET", "/slow?ms=1", 200, "a, 0 bytes"},
		{"GET", "/healthz", 200, "ok"},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(step.method, step.path, http.NoBody))
		if got := strings.TrimSpace(w.Body.String()); w.Code != step.status || got != step.body {
			t.Errorf("step %d: %s %s = %d %q, want %d %q", i+1, step.method, step.path, w.Code, got, step.status, step.body)
		}
	}
}
