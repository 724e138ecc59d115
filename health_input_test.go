package lb_test

import (
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/lb"
)

// Each impossible setting is named with its value and what would be right, all of
// them at once.
func TestHealthCheckBadInput(t *testing.T) {
	targets := manyTargets(1)
	for _, c := range []struct {
		name    string
		targets []lb.Target
		opts    []lb.Option
		want    []string
	}{
		{"numbers below zero", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Interval: -1, FastInterval: -2, Timeout: -3, Rise: -4, Fall: -5, Port: -6})}, []string{
			"HealthCheck.Interval is -1ns: want at least 1ms, or 0 for the default",
			"HealthCheck.FastInterval is -2ns: want at least 1ms", "HealthCheck.Timeout is -3ns: want at least 1ms",
			"HealthCheck.Rise is -4: want 1 or more, or 0 for 2",
			"HealthCheck.Fall is -5: want 1 or more, or 0 for 3",
			"HealthCheck.Port is -6: want 1 to 65535",
		}},
		{"seconds without their unit", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Interval: 5})}, []string{"HealthCheck.Interval is 5ns: want at least 1ms"}},
		{"above the interval", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Interval: time.Second, FastInterval: 2 * time.Second, Timeout: 3 * time.Second, Port: 70000})}, []string{
			"HealthCheck.FastInterval is 2s: want at most the Interval (1s)",
			"HealthCheck.Timeout is 3s: want at most the Interval (1s)",
			"HealthCheck.Port is 70000",
		}},
		{"a request that cannot be", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{
			Path: "healthz", Method: "GET /", Host: "a b", Statuses: []int{0, 100, 200, 600},
			Header: http.Header{"Host": {"x"}, "Bad Name": {"x"}, "Fine": {"a\r\nb"}},
		})}, []string{
			`HealthCheck.Path is "healthz": want a path that begins with a slash, like "/healthz"`,
			`HealthCheck.Method is "GET /": want a method like GET or HEAD`,
			`HealthCheck.Host is "a b"`,
			`HealthCheck.Header has "Host": set HealthCheck.Host instead`,
			`HealthCheck.Header has "Bad Name"`,
			`HealthCheck.Header has "Fine": ["a\r\nb"]`,
			"HealthCheck.Statuses has 0: want 200 to 599",
			"HealthCheck.Statuses has 100", "HealthCheck.Statuses has 600",
		}},
		{"a path with a fragment", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Path: "/a#b"})}, []string{`HealthCheck.Path is "/a#b": a fragment is not allowed`}},
		{"a path that cannot be parsed", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Path: "/%zz"})}, []string{`HealthCheck.Path is "/%zz": invalid URL escape`}},
		{"CONNECT", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Path: "/", Method: "CONNECT"})}, []string{`HealthCheck.Method is "CONNECT"`}},
		{"a body of HEAD", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Path: "/", Method: "HEAD", BodyMatch: regexp.MustCompile("x")})}, []string{"HealthCheck.BodyMatch is set, but the answer to HEAD has no body"}},
		{"a request without a path", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Statuses: []int{204}})}, []string{"HealthCheck.Path is empty, so that only a connection is opened, but fields of a request are set"}},
		{"no checker", targets, []lb.Option{lb.WithChecker(nil)}, []string{"WithChecker: the Checker is nil"}},
		{"two who say what to ask", targets, []lb.Option{lb.WithChecker(newVerdicts()), lb.WithHealthCheck(lb.HealthCheck{Path: "/"})}, []string{"WithChecker and WithHealthCheck both say what to ask"}},
		{"no probes to recover by", targets, []lb.Option{lb.WithPassiveHealth(lb.PassiveHealth{RecoverByProbe: true})}, []string{"PassiveHealth.RecoverByProbe needs probes: add WithHealthCheck or WithChecker"}},
		{"no connections to open", targets, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{}), lb.WithTransport(roundTripperFunc(noRoundTrip))}, []string{"HealthCheck.Path is empty, but WithTransport has a lb_test.roundTripperFunc"}},
		{"health URLs", []lb.Target{
			{Name: "1", URL: "http://a", HealthURL: "b:80/healthz"}, {Name: "2", URL: "http://a", HealthURL: "http://u:secret@b/"},
			{Name: "3", URL: "http://a", HealthURL: "ftp://b"}, {Name: "4", URL: "http://a", HealthURL: "http://b/x#y"}, {Name: "5", URL: "http://a", HealthURL: "http://b:99999?x"},
		}, nil, []string{
			`target 1: health URL "b:80/healthz": no scheme`, "target 2: health URL", "userinfo is not allowed", `target 3: health URL "ftp://b": scheme "ftp": want http, https, h2c or unix`,
			`target 4: health URL "http://b/x#y": a fragment is not allowed`, `target 5: health URL "http://b:99999": port "99999"`,
		}},
		{"with all else that is wrong", []lb.Target{{URL: "nonsense"}}, []lb.Option{lb.WithHealthCheck(lb.HealthCheck{Path: "x"}), lb.WithRetry(lb.RetryPolicy{Attempts: -1})}, []string{
			`URL "nonsense"`, `HealthCheck.Path is "x"`, "RetryPolicy.Attempts is -1",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			pool, err := lb.New(c.targets, c.opts...)
			if err == nil {
				pool.Close()
				t.Fatal("New made a pool of it")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("New = %v\nwant in it: %s", err, want)
				}
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("New shows a password: %v", err)
			}
		})
	}
}

// What goes without saying follows what is said: no default is out of range.
func TestHealthCheckDefaultsFitTheInterval(t *testing.T) {
	for _, interval := range []time.Duration{time.Millisecond, time.Second, time.Hour} {
		pool, err := lb.New(manyTargets(1), lb.WithHealthCheck(lb.HealthCheck{Interval: interval}))
		if err != nil {
			t.Errorf("Interval %v: %v", interval, err)
			continue
		}
		pool.Close()
	}
}

func noRoundTrip(*http.Request) (*http.Response, error) { return nil, http.ErrNotSupported }
