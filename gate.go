package lb

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
)

// gate counts who is inside and, once closed, lets nobody in and tells when the
// last one has left. It costs those who pass one atomic addition each way. A
// sync.WaitGroup would not do: its Add must not race with a Wait that may find
// zero. The zero value needs init.
type gate struct {
	inside atomic.Int64 // far below zero once closed
	shut   atomic.Bool
	once   sync.Once
	empty  chan struct{} // closed when the gate is shut and nobody is inside
}

// shutBias keeps inside below zero for ever.
const shutBias = math.MinInt64 / 2

func (g *gate) init() { g.empty = make(chan struct{}) }

// enter lets the caller in unless the gate is shut. Who came in must leave.
func (g *gate) enter() bool {
	if g.inside.Add(1) > 0 {
		return true
	}
	g.leave()
	return false
}

func (g *gate) leave() {
	if g.inside.Add(-1) == shutBias {
		g.once.Do(func() { close(g.empty) })
	}
}

// close shuts the gate; calls after the first do nothing.
func (g *gate) close() {
	if g.shut.CompareAndSwap(false, true) && g.inside.Add(shutBias) == shutBias {
		g.once.Do(func() { close(g.empty) })
	}
}

// closed tells whether the gate was shut.
func (g *gate) closed() bool { return g.shut.Load() }

// wait returns when nobody is inside of the closed gate, or with ctx's error; without
// one when it is of no use to wait any more.
func (g *gate) wait(ctx, useless context.Context) error {
	select {
	case <-g.empty:
		return nil
	default:
	}
	select {
	case <-g.empty:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-useless.Done():
		return nil
	}
}
