package main

import (
	"errors"
	"strconv"
	"strings"
	"testing"
)

// slowProbe is in the reason of what happens because a probe took too long.
const slowProbe = "no verdict in time"

// transitionsIn returns, for each backend, its changes of state in the log, each as
// "from>to", with an asterisk if a slow probe was the cause.
func transitionsIn(t *testing.T, log string) map[string][]string {
	t.Helper()
	found := make(map[string][]string)
	for line := range strings.Lines(log) {
		r, err := parseRecord(strings.TrimSuffix(line, "\n"))
		if err != nil {
			t.Fatalf("%q in the log: %v", line, err)
		}
		if r["msg"] != "backend state changed" {
			continue
		}
		if r["reason"] == "" {
			t.Errorf("%q in the log has no reason", line)
		}
		change := r["from"] + ">" + r["to"]
		if strings.Contains(r["reason"], slowProbe) {
			change += "*"
		}
		found[r["backend"]] = append(found[r["backend"]], change)
	}
	return found
}

// parseRecord reads a line of slog's text handler.
func parseRecord(line string) (map[string]string, error) {
	attrs := make(map[string]string)
	for line != "" {
		key, rest, ok := strings.Cut(line, "=")
		if !ok {
			return nil, errors.New("an attribute without a value")
		}
		value, _, _ := strings.Cut(rest, " ")
		attrs[key] = value
		if quoted, err := strconv.QuotedPrefix(rest); err == nil {
			value = quoted
			if attrs[key], err = strconv.Unquote(quoted); err != nil {
				return nil, err
			}
		}
		line = strings.TrimPrefix(rest[len(value):], " ")
	}
	return attrs, nil
}
