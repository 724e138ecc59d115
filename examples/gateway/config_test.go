package main

import (
	"flag"
	"log/slog"
	"maps"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/lb"
)

// faultsOf returns the lines of what is wrong with args, which have -backends added
// unless they have their own.
func faultsOf(t *testing.T, args ...string) []string {
	t.Helper()
	c, help := parseFlags(args)
	if help {
		t.Fatalf("%q asks for help", args)
	}
	if c.isDemo() {
		c.targets = lb.Targets("http://127.0.0.1:1")
	}
	pool, err := c.newPool(slog.New(slog.DiscardHandler))
	if err == nil {
		pool.Close()
		return nil
	}
	if pool != nil {
		t.Errorf("%q: newPool returned a pool and an error", args)
	}
	return strings.Split(err.Error(), "\n")
}

func TestEachBadFlagIsNamedWithWhatWouldBeRight(t *testing.T) {
	const (
		wantAddr = ": want host:port, like 127.0.0.1:8080 or :8080"
		wantTime = ": want a time above zero with its unit, like 5s or 500ms"
		wantSize = ": want a size up to 1024GiB, like 1048576, 64KiB or 1MiB, or 0 for none"
	)
	for _, c := range []struct {
		name string
		args []string
		want string // of what the pool reports, the beginning: its words are its own
	}{
		{"an address without a port", []string{"-addr", "localhost"}, `-addr is "localhost"` + wantAddr},
		{"a port that does not exist", []string{"-admin-addr", ":65536"}, `-admin-addr is ":65536"` + wantAddr},
		{"a strategy that does not exist", []string{"-algo", "fastest"}, `-algo is "fastest": want round-robin, least-connections or ip-hash`},
		{"a time without its unit", []string{"-health-interval", "5"}, `-health-interval is "5"` + wantTime},
		{"a time of zero", []string{"-dial-timeout", "0s"}, `-dial-timeout is "0s"` + wantTime},
		{"a time below zero", []string{"-shutdown-timeout=-1s"}, `-shutdown-timeout is "-1s"` + wantTime},
		{"a time that is none", []string{"-response-header-timeout", "soon"}, `-response-header-timeout is "soon"` + wantTime},
		{"a number of attempts below one", []string{"-max-attempts", "0"}, `-max-attempts is "0": want a number, 1 or more`},
		{"a unit that does not exist", []string{"-max-replay-body", "1m"}, `-max-replay-body is "1m"` + wantSize},
		{"a probe that takes longer than its interval", []string{"-health-timeout", "6s"}, `-health-timeout is 6s: want at most -health-interval (5s)`},
		{"a path without its slash", []string{"-health-path", "healthz"}, `-health-path is "healthz": want `},
		{"a backend without a scheme", []string{"-backends", "http://a,b:80"}, `-backends: target 2: URL "b:80": `},
		{"no backends, perhaps a variable that is not set", []string{"-backends", ""}, `-backends: target 1: URL is empty`},
		{"a flag that does not exist", []string{"-algos=ip-hash"}, `flag provided but not defined: -algos`},
		{"a flag without its value", []string{"-algo"}, `flag needs an argument: -algo`},
		{"a flag with too many dashes", []string{"---algo", "-algo", "ip-hash"}, `bad flag syntax: ---algo`},
		{"a list with a space", []string{"-backends", "http://a,", "http://b"}, `argument "http://b": want flags only; -backends is one list, with commas and without spaces`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := faultsOf(t, c.args...)
			if !slices.ContainsFunc(got, func(line string) bool { return strings.HasPrefix(line, c.want) }) {
				t.Errorf("faults of %q = %q, want %q among them", c.args, got, c.want)
			}
		})
	}
}

func TestAllFaultsAreReportedAtOnce(t *testing.T) {
	got := faultsOf(t, "-algo", "fastest", "-health-interval", "often", "-health-timeout", "8s", "-nonsense", "---",
		"-backends", "ftp://a,http://b:0", "stray", "-max-attempts", "many", "-health-path", "x", "-dial-timeout")
	want := []string{
		`-algo is "fastest"`, `-health-interval is "often"`, `flag provided but not defined: -nonsense`, `bad flag syntax: ---`,
		`argument "stray"`, `-max-attempts is "many"`, `flag needs an argument: -dial-timeout`,
		`-backends: target 1: URL "ftp://a"`, `-backends: target 2: URL "http://b:0"`, `-health-path is "x"`,
	}
	if len(got) != len(want) {
		t.Errorf("got %d faults, want %d", len(got), len(want))
	}
	for i := range min(len(got), len(want)) {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("fault %d = %q, want %q…", i+1, got[i], want[i])
		}
	}
}

func TestHealthTimeoutFollowsAShorterInterval(t *testing.T) {
	for _, args := range [][]string{
		{"-health-interval", "100ms"},
		{"-health-interval", "100ms", "-health-timeout", "100ms"},
	} {
		if got := faultsOf(t, args...); got != nil {
			t.Errorf("faults of %q = %q, want none", args, got)
		}
	}
}

func TestDefaultsOfTheFlags(t *testing.T) {
	want := map[string]string{
		"addr": ":8080", "admin-addr": ":8081", "backends": "", "algo": "round-robin",
		"health-path": "/healthz", "health-interval": "5s", "health-timeout": "2s",
		"max-attempts": "3", "max-replay-body": "1MiB", "dial-timeout": "3s",
		"response-header-timeout": "30s", "shutdown-timeout": "15s",
	}
	c, _ := parseFlags(nil)
	got := make(map[string]string)
	c.flags.VisitAll(func(f *flag.Flag) { got[f.Name] = f.DefValue })
	if !maps.Equal(got, want) {
		t.Errorf("flags and defaults = %v, want %v", got, want)
	}
}

// TestDefaultsShownAreThoseInForce gives each flag the default that -h shows, which
// must change nothing.
func TestDefaultsShownAreThoseInForce(t *testing.T) {
	without, _ := parseFlags(nil)
	if without.healthTimeout != 0 {
		t.Errorf("-health-timeout is %v if it is not given, want 0 for the pool's default", without.healthTimeout)
	}
	without.healthTimeout = lb.DefaultCheckTimeout
	var args []string
	without.flags.VisitAll(func(f *flag.Flag) {
		if f.Name != "backends" { // has no default
			args = append(args, "-"+f.Name, f.DefValue)
		}
	})
	with, _ := parseFlags(args)
	without.flags, with.flags = nil, nil
	without.strategy, with.strategy = nil, nil // each has a position of its own
	if !reflect.DeepEqual(without, with) {
		t.Errorf("without flags %+v, with the defaults %+v, want the same", without, with)
	}
}

func TestReplayLimitsAreThoseOfTheFlag(t *testing.T) {
	for _, c := range []struct {
		name, size string
		body, pool int64
	}{
		{"the default", "1MiB", 1 << 20, lb.DefaultMaxPoolReplayBytes},
		{"zero keeps nothing", "0", -1, lb.DefaultMaxPoolReplayBytes},
		{"a long body has room in the pool", "1GiB", 1 << 30, 2 << 30},
	} {
		cfg, _ := parseFlags([]string{"-max-replay-body", c.size})
		if got := cfg.retry(); got.MaxReplayBytes != c.body || got.MaxPoolReplayBytes != c.pool {
			t.Errorf("%s: %q gives %d and %d, want %d and %d", c.name, c.size, got.MaxReplayBytes, got.MaxPoolReplayBytes, c.body, c.pool)
		}
	}
}

func TestDemoIsQuickUnlessTimesAreGiven(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"no flags", nil, demoInterval.String()},
		{"an interval", []string{"-health-interval", "3s"}, "3s"},
		{"a time-out that the short interval would refuse", []string{"-health-timeout", "1s"}, "5s"},
	} {
		cfg, _ := parseFlags(c.args)
		cfg.setDemo(nil)
		if got := cfg.healthInterval.String(); got != c.want {
			t.Errorf("%s: the interval is %s, want %s", c.name, got, c.want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for _, c := range []struct {
		text string
		want int64 // -1: an error
	}{
		{"0", 0},
		{"1048576", 1 << 20},
		{"0B", 0},
		{"512B", 512},
		{"64KiB", 64 << 10},
		{"1MiB", 1 << 20},
		{"1 mib", 1 << 20},
		{"2GiB", 2 << 30},
		{"3kB", 3000},
		{"4MB", 4e6},
		{"5GB", 5e9},
		{"1024GiB", 1 << 40},
		{"1025GiB", -1},
		{"1099511627777", -1},
		{"18446744073709551617", -1}, // 1 beyond what 64 bits hold
		{"9223372036854775807GiB", -1},
		{"", -1},
		{"MiB", -1},
		{"-1", -1},
		{"+1", -1},
		{"1.5MiB", -1},
		{"1M", -1},
		{"1MiBB", -1},
		{" 1", -1},
		{"1_000", -1},
		{"0x10", -1},
	} {
		got, err := parseSize(c.text)
		if err != nil {
			got = -1
		}
		if got != c.want {
			t.Errorf("parseSize(%q) = %d, %v, want %d", c.text, got, err, c.want)
		}
	}
}

// plainSize is parseSize with numbers that cannot overflow.
func plainSize(s string) (int64, bool) {
	digits := 0
	for digits < len(s) && s[digits] >= '0' && s[digits] <= '9' {
		digits++
	}
	unit := strings.ToLower(s[digits:])
	if unit != "" {
		unit = strings.TrimLeft(unit, " ")
		if unit == "" {
			return 0, false // only spaces
		}
	}
	factor, ok := map[string]int64{"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}[unit]
	n, isNumber := new(big.Int).SetString(s[:digits], 10)
	if !ok || !isNumber {
		return 0, false
	}
	n.Mul(n, big.NewInt(factor))
	return n.Int64(), n.Cmp(big.NewInt(maxSize)) <= 0
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"0", "1MiB", "1 kb", "99999999999999999999", "8589934592GiB", "-1", "MiB", "1 ", "1\u212aB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := parseSize(s)
		want, ok := plainSize(s)
		if (err == nil) != ok || ok && got != want {
			t.Fatalf("parseSize(%q) = %d, %v, want %d, %v", s, got, err, want, ok)
		}
		if !ok {
			return
		}
		if again, err := parseSize(strconv.FormatInt(got, 10)); err != nil || again != got {
			t.Errorf("parseSize(%q) = %d, but of that number it is %d, %v", s, got, again, err)
		}
	})
}
