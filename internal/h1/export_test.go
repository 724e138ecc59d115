package h1

import "time"

// IdleLimit is idleLimit, for its tests.
type IdleLimit struct{ l idleLimit }

// Told is told.
func (l *IdleLimit) Told(limit time.Duration) { l.l.told(limit) }

// Died is died.
func (l *IdleLimit) Died(now time.Time, ages []time.Duration, oldest time.Duration) {
	l.l.died(now, ages, oldest)
}

// At is at.
func (l *IdleLimit) At(now time.Time) time.Duration { return l.l.at(now) }

// KeepAliveLimit is keepAliveLimit.
func KeepAliveLimit(lines []string) time.Duration { return keepAliveLimit(lines) }
