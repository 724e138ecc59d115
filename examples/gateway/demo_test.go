package main

import (
	"net/http"
	"slices"
	"strings"
	"testing"
)

// command is a curl line of the demonstration.
type command struct {
	method, body string
	urls         []string
	header       bool // show the answer's
}

// parseCommand reads a curl line as far as the demonstration uses it.
func parseCommand(t *testing.T, line string) command {
	t.Helper()
	c := command{method: http.MethodGet}
	words := strings.Fields(line)
	for i := 1; i < len(words); i++ {
		switch word := strings.Trim(words[i], `"`); word {
		case "-s":
		case "-i":
			c.header = true
		case "-X":
			i++
			c.method = words[i]
		case "-d":
			i++
			c.method, c.body = http.MethodPost, words[i]
		default:
			if !strings.HasPrefix(word, "http://127.0.0.1:") {
				t.Fatalf("%q has %q, which is no address of this machine", line, word)
			}
			c.urls = append(c.urls, word)
		}
	}
	return c
}

// commandsIn returns what the demonstration says to try.
func commandsIn(t *testing.T, text string) (commands []command) {
	t.Helper()
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "curl ") {
			commands = append(commands, parseCommand(t, line))
		}
	}
	return commands
}

// TestDemoPrintsCommandsThatWork carries out every line of the demonstration, in the
// order and with the waits that it speaks of.
func TestDemoPrintsCommandsThatWork(t *testing.T) {
	t.Parallel()
	g := start(t, "-health-interval", "200ms")
	g.waitUsable(t, 3)
	names := make(map[string]string) // of the backends, by URL
	for _, b := range g.stats(t).Backends {
		names[b.URL] = b.Name
	}
	passing := []string{"a", "b", "c"}
	commands := commandsIn(t, g.stdout.String())
	if len(commands) != 12 {
		t.Fatalf("the demonstration has %d commands, want 12: are they found?", len(commands))
	}
	for _, c := range commands {
		var answered []string
		for _, url := range c.urls {
			if strings.Contains(url, "/slow?") {
				continue // see TestRequestUnderWayIsAnsweredAtTheEnd
			}
			a, err := g.do(c.method, url, c.body)
			if err != nil {
				t.Fatal(err)
			}
			switch base, isOff := strings.CutSuffix(url, "/probe/off"); {
			case isOff:
				passing = slices.DeleteFunc(passing, func(name string) bool { return name == names[base] })
			case strings.HasSuffix(url, "/probe/on"):
				passing = append(passing, names[strings.TrimSuffix(url, "/probe/on")])
			case strings.HasPrefix(url, g.traffic):
				answered = append(answered, a.body)
			}
			want := http.StatusOK
			if c.header {
				want = http.StatusServiceUnavailable
			}
			if a.status != want {
				t.Errorf("%s %s = %d %q, want %d", c.method, url, a.status, a.body, want)
			}
		}
		checkTurns(t, c, answered, passing)
		g.waitUsable(t, len(passing))
	}
}

// checkTurns checks that all of passing, and nobody else, answered a command of
// several requests.
func checkTurns(t *testing.T, c command, answered, passing []string) {
	t.Helper()
	if len(answered) < 2 {
		return
	}
	var want []string
	for _, name := range passing {
		want = append(want, name+", 0 bytes\n")
	}
	slices.Sort(want)
	slices.Sort(answered)
	if got := slices.Compact(answered); !slices.Equal(got, want) {
		t.Errorf("%q was answered with %q, want %q", c.urls, got, want)
	}
}

func TestDemoWithoutPathSwitchesNoProbes(t *testing.T) {
	t.Parallel()
	g := start(t, "-health-path", "")
	g.waitUsable(t, 3)
	if text := g.stdout.String(); strings.Contains(text, "/probe/") {
		t.Errorf("the demonstration switches probes that ask for no path:\n%s", text)
	}
}

func TestDemoBackendAnswersTheProbeOfTheFlag(t *testing.T) {
	t.Parallel()
	g := start(t, "-health-path", "/up%20now?deep=1", "-health-interval", "200ms")
	g.waitUsable(t, 3)
	b := g.stats(t).Backends[1]
	if _, err := g.do(http.MethodPost, b.URL+"/probe/off", ""); err != nil {
		t.Fatal(err)
	}
	g.waitUsable(t, 2)
	if got := g.get(t, b.URL).body; got != "b, 0 bytes\n" {
		t.Errorf("b answers %q while its probe is off, want its name", got)
	}
	if _, err := g.do(http.MethodPost, b.URL+"/probe/on", ""); err != nil {
		t.Fatal(err)
	}
	g.waitUsable(t, 3)
}
