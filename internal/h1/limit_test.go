package h1_test

import (
	"testing"
	"time"

	"example.com/lb/internal/h1"
)

// death is what was found at one moment: the ages of connections that the server had
// closed, and that of the oldest which it had not.
type death struct {
	at     time.Duration // since the start
	ages   []time.Duration
	oldest time.Duration
}

func one(at, age time.Duration) death { return death{at: at, ages: []time.Duration{age}} }

func TestIdleLimitLearnsFromDeathsAtLikeAges(t *testing.T) {
	const s, ms, m = time.Second, time.Millisecond, time.Minute
	for _, c := range []struct {
		name   string
		said   []time.Duration
		deaths []death
		at     time.Duration // when to ask, since the start
		want   time.Duration
	}{
		{name: "without anything known there is no limit"},
		{name: "one death teaches nothing", deaths: []death{one(0, 5*s)}},
		{name: "two deaths teach nothing", deaths: []death{one(0, 5*s), one(s, 5*s)}},
		{name: "three deaths at one age teach it", deaths: []death{one(0, 10*s), one(s, 10*s), one(2*s, 10*s)}, at: 2 * s, want: 9 * s},
		{name: "the least of three like ages counts", deaths: []death{one(0, 12*s), one(s, 10*s), one(2*s, 11*s)}, at: 2 * s, want: 9 * s},
		{name: "ages a quarter apart are alike", deaths: []death{one(0, 8*s), one(s, 10*s), one(2*s, 9*s)}, at: 2 * s, want: 7 * s},
		{name: "ages more than a quarter apart are not", deaths: []death{one(0, 8*s), one(s, 10*s+ms), one(2*s, 9*s)}, at: 2 * s},
		{name: "an odd death is forgotten after three like ones", deaths: []death{one(0, 60*s), one(s, 10*s), one(2*s, 10*s), one(3*s, 10*s)}, at: 3 * s, want: 9 * s},
		{name: "an odd death among like ones keeps them from being believed", deaths: []death{one(0, 10*s), one(s, 60*s), one(2*s, 10*s)}, at: 2 * s},
		{name: "an odd death does not take back what was learned", deaths: []death{one(0, 10*s), one(s, 10*s), one(2*s, 10*s), one(3*s, 2*s)}, at: 3 * s, want: 9 * s},
		{name: "a shorter limit takes the place of a longer one", deaths: []death{
			one(0, 10*s), one(s, 10*s), one(2*s, 10*s), one(3*s, 5*s), one(4*s, 5*s), one(5*s, 5*s),
		}, at: 5 * s, want: 4 * s},
		{name: "a longer limit takes the place of a shorter one", deaths: []death{
			one(0, 5*s), one(s, 5*s), one(2*s, 5*s), one(3*s, 10*s), one(4*s, 10*s), one(5*s, 10*s),
		}, at: 5 * s, want: 9 * s},
		{name: "three that died together at one age teach it", deaths: []death{{ages: []time.Duration{10 * s, 10 * s, 11 * s}}}, want: 9 * s},
		{name: "a restart, which kills all ages, teaches nothing", deaths: []death{{ages: []time.Duration{s, 10 * s, 30 * s, 60 * s}}}},
		{name: "nor do three restarts", deaths: []death{
			{at: 0, ages: []time.Duration{10 * s, 30 * s}},
			{at: m, ages: []time.Duration{10 * s, 30 * s}},
			{at: 2 * m, ages: []time.Duration{10 * s, 30 * s}},
		}, at: 2 * m},
		{name: "a restart does not take back what was learned", deaths: []death{
			one(0, 10*s), one(s, 10*s), one(2*s, 10*s), {at: 3 * s, ages: []time.Duration{s, 3 * s, 9 * s}},
		}, at: 3 * s, want: 9 * s},
		{name: "deaths of younger ones while an older one lives teach nothing", deaths: []death{
			{at: 0, ages: []time.Duration{10 * s}, oldest: 10*s + 1},
			{at: s, ages: []time.Duration{10 * s}, oldest: 20 * s},
			{at: 2 * s, ages: []time.Duration{10 * s}, oldest: m},
		}, at: 2 * s},
		{name: "younger ones that live do not matter", deaths: []death{
			{at: 0, ages: []time.Duration{10 * s}, oldest: 10 * s},
			{at: s, ages: []time.Duration{10 * s}, oldest: 9 * s},
			{at: 2 * s, ages: []time.Duration{10 * s}, oldest: s},
		}, at: 2 * s, want: 9 * s},
		{name: "deaths under half a second teach nothing", deaths: []death{one(0, 499*ms), one(s, 499*ms), one(2*s, 499*ms)}, at: 2 * s},
		{name: "deaths at half a second teach it", deaths: []death{one(0, 500*ms), one(s, 500*ms), one(2*s, 500*ms)}, at: 2 * s, want: 400 * ms},
		{name: "no deaths teach nothing", deaths: []death{{}, {oldest: m}, {oldest: m}}},
		{name: "what was learned holds for ten minutes", deaths: []death{one(0, 10*s), one(0, 10*s), one(0, 10*s)}, at: 10*m - 1, want: 9 * s},
		{name: "what was learned is forgotten after ten minutes", deaths: []death{one(0, 10*s), one(0, 10*s), one(0, 10*s)}, at: 10 * m},
		{name: "another like death confirms it for ten minutes more", deaths: []death{
			one(0, 10*s), one(0, 10*s), one(0, 10*s), one(9*m, 10*s),
		}, at: 18 * m, want: 9 * s},
		{name: "the margin is a second", said: []time.Duration{m}, want: 59 * s},
		{name: "the margin is a second at five", said: []time.Duration{5 * s}, want: 4 * s},
		{name: "the margin is a fifth below five seconds", said: []time.Duration{s}, want: 800 * ms},
		{name: "what was said last counts", said: []time.Duration{m, 30 * s}, want: 29 * s},
		{name: "what was said is not forgotten", said: []time.Duration{m}, at: time.Hour, want: 59 * s},
		{name: "what was said counts if it is less than what was learned", said: []time.Duration{5 * s},
			deaths: []death{one(0, 10*s), one(0, 10*s), one(0, 10*s)}, want: 4 * s},
		{name: "what was learned counts if it is less than what was said", said: []time.Duration{m},
			deaths: []death{one(0, 10*s), one(0, 10*s), one(0, 10*s)}, want: 9 * s},
		{name: "what was said is left when what was learned is forgotten", said: []time.Duration{m},
			deaths: []death{one(0, 10*s), one(0, 10*s), one(0, 10*s)}, at: 10 * m, want: 59 * s},
	} {
		t.Run(c.name, func(t *testing.T) {
			start := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
			var l h1.IdleLimit
			for _, said := range c.said {
				l.Told(said)
			}
			for _, d := range c.deaths {
				l.Died(start.Add(d.at), d.ages, d.oldest)
			}
			if got := l.At(start.Add(c.at)); got != c.want {
				t.Errorf("At(%v) = %v, want %v", c.at, got, c.want)
			}
		})
	}
}

func TestKeepAliveLimitReadsWhatServersWrite(t *testing.T) {
	for _, c := range []struct {
		name  string
		lines []string
		want  time.Duration
	}{
		{name: "no field", want: 0},
		{name: "a time-out", lines: []string{"timeout=5"}, want: 5 * time.Second},
		{name: "a time-out before a count", lines: []string{"timeout=5, max=100"}, want: 5 * time.Second},
		{name: "a time-out behind a count", lines: []string{"max=100,\ttimeout=5"}, want: 5 * time.Second},
		{name: "in capitals", lines: []string{"Timeout=5"}, want: 5 * time.Second},
		{name: "in the second line", lines: []string{"max=100", "timeout=5"}, want: 5 * time.Second},
		{name: "a day is believed", lines: []string{"timeout=86400"}, want: 24 * time.Hour},
		{name: "more than a day is not", lines: []string{"timeout=86401"}},
		{name: "more than fits in an integer is not", lines: []string{"timeout=99999999999999999999"}},
		{name: "zero is none", lines: []string{"timeout=0"}},
		{name: "less than zero is none", lines: []string{"timeout=-5"}},
		{name: "a word is none", lines: []string{"timeout=soon"}},
		{name: "no value is none", lines: []string{"timeout"}},
		{name: "another name is none", lines: []string{"xtimeout=5, timeoutx=5"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := h1.KeepAliveLimit(c.lines); got != c.want {
				t.Errorf("KeepAliveLimit(%q) = %v, want %v", c.lines, got, c.want)
			}
		})
	}
}
