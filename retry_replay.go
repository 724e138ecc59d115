package lb

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
)

const (
	// smallChunk and largeChunk are the sizes in which bodies are read and kept.
	// A body that says it is small takes a small one.
	smallChunk = 2 << 10
	largeChunk = 32 << 10
)

// memory hands out the chunks that bodies are kept in, up to a limit for the
// whole pool.
type memory struct {
	limit int64
	used  atomic.Int64
	small sync.Pool // of *[]byte
	large sync.Pool
}

// reserve returns a chunk of at least one byte, of the size that fits what is
// wanted, or nil if the pool's limit is reached.
func (m *memory) reserve(want int64) []byte {
	size, pool := int64(largeChunk), &m.large
	if want <= smallChunk {
		size, pool = smallChunk, &m.small
	}
	if m.used.Add(size) > m.limit {
		m.used.Add(-size)
		return nil
	}
	if c, ok := pool.Get().(*[]byte); ok {
		return (*c)[:0]
	}
	return make([]byte, 0, size)
}

// release takes back a chunk that nobody reads or writes any more.
func (m *memory) release(c []byte) {
	m.used.Add(-int64(cap(c)))
	if cap(c) == smallChunk {
		m.small.Put(&c)
		return
	}
	m.large.Put(&c)
}

// Get and Put make memory the buffer pool of the copying of answers. These
// buffers are in use for as long as the copying goes on and do not count.
func (m *memory) Get() []byte {
	if c, ok := m.large.Get().(*[]byte); ok {
		return (*c)[:largeChunk]
	}
	return make([]byte, largeChunk)
}

// Put takes back what Get gave.
func (m *memory) Put(c []byte) { m.large.Put(&c) }

// replay is a request's body, recorded while the first attempt reads it so that
// a later one can read it from the start.
//
//	source ──read on demand──▶ record ─────▶ each attempt, from its own offset
//	                      └──▶ spill ──────▶ the attempt that has read the whole record
//
// Nothing is read before an attempt asks for it. The source is read on a
// goroutine of its own, one Read at a time, because such a Read can take as long
// as the client likes, and an attempt must not wait for it once its backend is
// gone. What a Read brings after its attempt has ended is kept for the next one:
// no byte is lost.
//
// The record holds up to limit bytes. What comes after goes to the spill, and the
// moment an attempt takes from there the record is dropped: the body cannot be
// sent again, the stream goes on.
type replay struct {
	source io.ReadCloser
	length int64 // declared; -1 if unknown
	limit  int64
	memory *memory
	work   *gate
	over   *atomic.Int64 // counts bodies that could not be kept whole
	panics *panics

	mu       sync.Mutex // guards the following
	changed  sync.Cond  // on mu: the state below has changed
	record   [][]byte   // all full but the last
	recorded int64
	dropped  bool
	spill    []byte // what was read and not recorded; in spillBuf
	spillBuf []byte
	reading  bool  // a Read of the source is under way
	read     int64 // bytes that the source gave
	err      error // how the source ended: io.EOF or what went wrong
	finished bool
}

func newReplay(source io.ReadCloser, length, limit int64, p *Pool) *replay {
	r := &replay{source: source, length: length, limit: limit, memory: &p.memory, work: &p.set.work, over: &p.totals.unrecorded, panics: &p.set.panics}
	r.changed.L = &r.mu
	return r
}

// whole tells whether the next attempt can read the body from its start. The
// attempts so far must have been fenced off.
func (r *replay) whole() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.dropped && !r.finished
}

// fault returns what went wrong with the source, nil if nothing did.
func (r *replay) fault() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == io.EOF || r.err == ErrClosed {
		return nil
	}
	return r.err
}

// dropLocked gives the record up. Its readers have all read it whole.
func (r *replay) dropLocked() {
	r.dropped = true
	r.releaseRecordLocked()
}

func (r *replay) releaseRecordLocked() {
	for _, c := range r.record {
		r.memory.release(c)
	}
	r.record = nil
}

// fillLocked begins a Read of the source, into the record if it has room.
func (r *replay) fillLocked() {
	dst, recording := r.roomLocked()
	if !recording {
		if r.spillBuf == nil {
			r.spillBuf = r.memory.Get()
		}
		dst = r.spillBuf
	}
	if !r.work.enter() {
		r.endLocked(ErrClosed)
		return
	}
	r.reading = true
	go func() {
		defer r.work.leave()
		n, err := r.readSource(dst)
		r.filled(dst[:n], recording, err)
	}()
}

// roomLocked returns the free room of the record's last chunk, or of a new one.
func (r *replay) roomLocked() (room []byte, ok bool) {
	left := r.limit - r.recorded
	if r.dropped || left <= 0 {
		return nil, false
	}
	last := len(r.record) - 1
	if last < 0 || len(r.record[last]) == cap(r.record[last]) {
		want := left
		if r.length >= 0 {
			want = min(want, r.length-r.recorded)
		}
		c := r.memory.reserve(want)
		if c == nil {
			return nil, false
		}
		r.record = append(r.record, c)
		last++
	}
	c := r.record[last]
	room = c[len(c):cap(c)]
	return room[:min(int64(len(room)), left)], true
}

// readSource reads once. A source that is the user's may panic or lie.
func (r *replay) readSource(dst []byte) (n int, err error) {
	defer func() {
		if v := recover(); v != nil {
			r.panics.caught("Read of a request's body", v)
			n, err = 0, fmt.Errorf("request body panicked: %v", v)
		}
	}()
	n, err = r.source.Read(dst)
	if n < 0 || n > len(dst) {
		return 0, fmt.Errorf("request body read %d bytes into %d", n, len(dst))
	}
	return n, err
}

// filled takes in what a Read of the source brought.
func (r *replay) filled(got []byte, recording bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reading = false
	r.read += int64(len(got))
	switch {
	case recording:
		last := len(r.record) - 1
		r.record[last] = r.record[last][:len(r.record[last])+len(got)]
		r.recorded += int64(len(got))
	default:
		r.spill = got
	}
	if err == io.EOF && r.length >= 0 && r.read != r.length {
		err = errBodyLength
	}
	if err != nil {
		r.endLocked(err)
	}
	if r.finished {
		r.freeLocked()
	}
	r.changed.Broadcast()
}

func (r *replay) endLocked(err error) {
	r.err = err
	r.changed.Broadcast()
}

// finish says that no attempt will read any more. It closes the source, which
// ends a Read that is under way.
func (r *replay) finish() {
	r.mu.Lock()
	if r.finished {
		r.mu.Unlock()
		return
	}
	r.finished = true
	if !r.reading { // else filled does it
		r.freeLocked()
	}
	r.changed.Broadcast()
	r.mu.Unlock()
	r.source.Close()
}

func (r *replay) freeLocked() {
	r.releaseRecordLocked()
	if r.spillBuf != nil {
		r.memory.Put(r.spillBuf)
	}
	r.spill, r.spillBuf = nil, nil
}

// attemptBody is one attempt's reader of the body. The transport reads and closes
// it; Read returns an error once the attempt is fenced off, also to a Read that
// waits.
type attemptBody struct {
	replay  *replay
	attempt *attempt

	// The following is guarded by the mu of replay.
	off    int64
	fenced bool
	eof    bool // the attempt has read the body to its end
	last   bool // the attempt is the request's last: its end finishes the replay
}

func (b *attemptBody) Read(p []byte) (int, error) {
	r := b.replay
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		switch {
		case b.fenced || r.finished:
			return 0, errFenced
		case len(p) == 0:
			return 0, nil
		case b.off < r.recorded && !r.dropped:
			n := copy(p, r.recordedAtLocked(b.off))
			b.off += int64(n)
			return n, nil
		case len(r.spill) > 0:
			if !r.dropped {
				r.over.Add(1)
				r.dropLocked()
			}
			n := copy(p, r.spill)
			r.spill = r.spill[n:]
			b.off += int64(n)
			return n, nil
		case r.err != nil:
			b.eof = r.err == io.EOF
			return 0, r.err
		}
		if !r.reading {
			if !r.dropped && b.attempt.isLast() {
				r.dropLocked()
			}
			r.fillLocked()
			continue
		}
		r.changed.Wait()
	}
}

// recordedAtLocked returns what the record's chunk has from off on.
func (r *replay) recordedAtLocked(off int64) []byte {
	for _, c := range r.record {
		if off < int64(len(c)) {
			return c[off:]
		}
		off -= int64(len(c))
	}
	return nil
}

// Close is the transport's word that it reads no more.
func (b *attemptBody) Close() error {
	b.fence()
	return nil
}

// fence ends the attempt's reading. What the source still brings is kept.
func (b *attemptBody) fence() {
	r := b.replay
	r.mu.Lock()
	b.fenced = true
	last := b.last
	r.changed.Broadcast()
	r.mu.Unlock()
	if last {
		r.finish()
	}
}

// conclude makes the attempt the request's last one.
func (b *attemptBody) conclude() {
	r := b.replay
	r.mu.Lock()
	b.last = true
	fenced := b.fenced
	r.mu.Unlock()
	if fenced {
		r.finish()
	}
}

// sentWhole tells whether the attempt has read the body to its end.
func (b *attemptBody) sentWhole() bool {
	b.replay.mu.Lock()
	defer b.replay.mu.Unlock()
	return b.eof
}
