package lb_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"example.com/lb"
)

// defaults is every Default constant of the package by its name.
func defaults() map[string]any {
	return map[string]any{
		"DefaultDialTimeout":           lb.DefaultDialTimeout,
		"DefaultTLSHandshakeTimeout":   lb.DefaultTLSHandshakeTimeout,
		"DefaultResponseHeaderTimeout": lb.DefaultResponseHeaderTimeout,
		"DefaultExpectContinueTimeout": lb.DefaultExpectContinueTimeout,
		"DefaultMaxHeaderBytes":        lb.DefaultMaxHeaderBytes,
		"DefaultMaxIdleConns":          lb.DefaultMaxIdleConns,
		"DefaultIdleConnTimeout":       lb.DefaultIdleConnTimeout,
		"DefaultCloseSpread":           lb.DefaultCloseSpread,
		"DefaultAttempts":              lb.DefaultAttempts,
		"DefaultMaxFailedDials":        lb.DefaultMaxFailedDials,
		"DefaultRetryBaseDelay":        lb.DefaultRetryBaseDelay,
		"DefaultRetryMaxDelay":         lb.DefaultRetryMaxDelay,
		"DefaultRetryTotal":            lb.DefaultRetryTotal,
		"DefaultMaxReplayBytes":        lb.DefaultMaxReplayBytes,
		"DefaultMaxPoolReplayBytes":    lb.DefaultMaxPoolReplayBytes,
		"DefaultFailures":              lb.DefaultFailures,
		"DefaultEjection":              lb.DefaultEjection,
		"DefaultMaxEjection":           lb.DefaultMaxEjection,
		"DefaultCheckInterval":         lb.DefaultCheckInterval,
		"DefaultFastCheckInterval":     lb.DefaultFastCheckInterval,
		"DefaultCheckTimeout":          lb.DefaultCheckTimeout,
		"DefaultRise":                  lb.DefaultRise,
		"DefaultFall":                  lb.DefaultFall,
	}
}

// TestDefaultsTableMatchesConstants holds the tables in doc.go and README.md, and
// the list above, to the constants in options.go.
func TestDefaultsTableMatchesConstants(t *testing.T) {
	inCode := constantsOf(t, "options.go")
	for name := range defaults() {
		if !inCode[name] {
			t.Errorf("%s is in the test and not in options.go", name)
		}
	}
	for name := range inCode {
		if _, ok := defaults()[name]; !ok {
			t.Errorf("%s is in options.go and not in the test", name)
		}
	}
	for _, table := range []struct{ file, row string }{
		{"doc.go", `(?m)^//\t\S.*\s{2,}(Default\w+)\s{2,}(\S.*)$`},
		{"README.md", "(?m)^\\|.*\\| `(Default\\w+)` \\| (.*) \\|$"},
	} {
		t.Run(table.file, func(t *testing.T) {
			text, err := os.ReadFile(table.file)
			if err != nil {
				t.Fatal(err)
			}
			checkDefaults(t, regexp.MustCompile(table.row).FindAllStringSubmatch(string(text), -1))
		})
	}
}

// checkDefaults compares rows, each of a whole line, a name and a value, with the
// constants.
func checkDefaults(t *testing.T, rows [][]string) {
	seen := make(map[string]bool)
	for _, row := range rows {
		name, value := row[1], row[2]
		seen[name] = true
		want, ok := defaults()[name]
		if !ok {
			t.Errorf("%s: there is no such constant", name)
			continue
		}
		if got, err := parseAs(want, value); err != nil || got != want {
			t.Errorf("%s is %q in the table, which is %v (%v), want %v", name, value, got, err, want)
		}
	}
	for name := range defaults() {
		if !seen[name] {
			t.Errorf("%s is missing from the table", name)
		}
	}
}

// parseAs reads value as what want is: a duration, a number of bytes, a number.
func parseAs(want any, value string) (any, error) {
	switch want.(type) {
	case time.Duration:
		return time.ParseDuration(value)
	case int64:
		var n int64
		var unit string
		_, err := fmt.Sscanf(value, "%d %s", &n, &unit)
		shift, ok := map[string]int{"KiB": 10, "MiB": 20}[unit]
		if err == nil && !ok {
			err = fmt.Errorf("unit %q", unit)
		}
		return n << shift, err
	}
	return strconv.Atoi(value)
}

// constantsOf returns the names of the exported constants in file that begin with
// Default.
func constantsOf(t *testing.T, file string) map[string]bool {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	for n := range ast.Preorder(f) {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			continue
		}
		for _, id := range spec.Names {
			if strings.HasPrefix(id.Name, "Default") {
				names[id.Name] = true
			}
		}
	}
	return names
}
