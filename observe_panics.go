package lb

import (
	"context"
	"fmt"
	"log/slog"
	"math/bits"
	"runtime/debug"
	"strings"
	"sync/atomic"
)

// panics contains what user code does wrong: it is counted, and logged the first,
// second, fourth, eighth time and so on, so that it is seen without flooding the
// log.
type panics struct {
	count  atomic.Int64
	others atomic.Int64 // misbehaviour that is not a panic
	logger *slog.Logger
}

// caught counts and logs a panic with value v in the code called where.
func (p *panics) caught(where string, v any) {
	n := p.count.Add(1)
	if seldom(n) {
		p.log("user code panicked", slog.String("where", where), slog.String("panic", fmt.Sprint(v)),
			slog.Int64("count", n), slog.String("stack", string(debug.Stack())))
	}
}

// misbehaved counts and logs a breach of contract.
func (p *panics) misbehaved(text string, attr slog.Attr) {
	if n := p.others.Add(1); seldom(n) {
		p.log(text, attr, slog.Int64("count", n))
	}
}

func (p *panics) log(text string, attrs ...slog.Attr) {
	defer func() {
		if recover() != nil { // in the logger
			p.count.Add(1)
		}
	}()
	p.logger.LogAttrs(context.Background(), slog.LevelError, text, attrs...)
}

// maxErrorText bounds how much of an error's text is kept.
const maxErrorText = 500

// told is what an error of user code says, asked for once and without any lock held,
// because its methods are user code too.
type told struct {
	text  string // empty without an error
	local bool   // something is short here; see isLocal
}

// tell asks err, which came from where.
func (p *panics) tell(where string, err error) (t told) {
	if err == nil {
		return told{}
	}
	defer func() {
		if v := recover(); v != nil {
			p.caught(where, v)
			t = told{text: fmt.Sprintf("an error of type %T whose text cannot be had", err)}
		}
	}()
	t = told{text: err.Error(), local: isLocal(err)}
	if len(t.text) > maxErrorText {
		t.text = strings.ToValidUTF8(t.text[:maxErrorText], "") + "…"
	}
	if t.text == "" {
		t.text = "an error without text"
	}
	return t
}

// seldom tells whether n is a power of two.
func seldom(n int64) bool { return bits.OnesCount64(uint64(n)) == 1 }
