package h1_test

import (
	"io"
	"sync"
)

// pipe is a body that comes in pieces. Close ends a Read that waits, as h1 asks of a
// body.
type pipe struct {
	mu     sync.Mutex // guards the following
	wake   sync.Cond
	data   []byte
	err    error
	closed int // how often
	reads  int
}

func newPipe() *pipe {
	p := new(pipe)
	p.wake.L = &p.mu
	return p
}

func (p *pipe) say(s string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.data = append(p.data, s...)
	p.wake.Broadcast()
}

// end makes Read return err once everything is read.
func (p *pipe) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	p.wake.Broadcast()
}

func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reads++
	for {
		switch {
		case p.closed > 0:
			return 0, io.ErrClosedPipe
		case len(p.data) > 0:
			n := copy(b, p.data)
			p.data = p.data[n:]
			return n, nil
		case p.err != nil:
			return 0, p.err
		}
		p.wake.Wait()
	}
}

func (p *pipe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed++
	p.wake.Broadcast()
	return nil
}

func (p *pipe) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed > 0
}

func (p *pipe) isRead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reads > 0
}
