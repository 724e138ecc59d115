package lb

import (
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
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
	small sync.Pool // of *[smallChunk]byte
	large sync.Pool // of *[largeChunk]byte
}

// reserve returns a chunk of at least one byte, of the size that fits what is
// wanted, or nil if the pool's limit is reached.
func (m *memory) reserve(want int64) []byte {
	size := int64(largeChunk)
	if want <= smallChunk {
		size = smallChunk
	}
	if m.used.Add(size) > m.limit {
		m.used.Add(-size)
		return nil
	}
	if size == largeChunk {
		return m.Get()[:0]
	}
	if c, ok := m.small.Get().(*[smallChunk]byte); ok {
		return c[:0]
	}
	return new([smallChunk]byte)[:0]
}

// release takes back a chunk that nobody reads or writes any more.
func (m *memory) release(c []byte) {
	m.used.Add(-int64(cap(c)))
	if cap(c) == smallChunk {
		m.small.Put((*[smallChunk]byte)(c[:smallChunk]))
		return
	}
	m.Put(c[:largeChunk])
}

// Get and Put make memory the buffer pool of the copying of answers. These
// buffers are in use for as long as the copying goes on and do not count.
func (m *memory) Get() []byte {
	if c, ok := m.large.Get().(*[largeChunk]byte); ok {
		return c[:]
	}
	return new([largeChunk]byte)[:]
}

// Put takes back what Get gave.
func (m *memory) Put(c []byte) { m.large.Put((*[largeChunk]byte)(c)) }

// replay is a request's body, recorded while the first attempt reads it so that
// a later one can read it from the start.
//
//	source ──read on demand──▶ record ─────▶ each attempt, from its own offset
//	                      └──▶ spill ──────▶ the attempt that has read the whole record
//
// Nothing is read before an attempt asks for it. The source is read one Read at a time,
// on a goroutine that may wait for it: such a Read can take as long as the client likes,
// and an attempt must not wait for it once its backend is gone. That is the goroutine of
// the upload, if the connection is our own, else one for each Read. What a Read brings
// after its attempt has ended is kept for the next one: no byte is lost.
//
// The record holds up to limit bytes. What comes after goes to the spill, and the
// moment an attempt takes from there the record is dropped: the body cannot be
// sent again, the stream goes on.
type replay struct {
	source io.ReadCloser
	length int64 // declared; -1 if unknown
	// request is the source's: its Trailer has the values once the source has come to
	// its end, those that were not declared too. Which ones were declared must be asked
	// before anything is read.
	request  *http.Request
	declared []string
	limit    int64
	memory   *memory
	work     *gate
	over     *atomic.Int64 // counts bodies that could not be kept whole
	panics   *panics

	mu       sync.Mutex // guards the following
	changed  sync.Cond  // on mu: the state below has changed
	record   [][]byte   // all full but the last
	recorded int64
	dropped  bool
	spill    []byte // what was read and not recorded; in spillBuf
	spillBuf []byte
	beyond   [1]byte
	reading  bool  // a Read of the source is under way
	read     int64 // bytes that the source gave
	err      error // how the source ended: io.EOF or what went wrong
	finished bool
}

func newReplay(in, original *http.Request, p *Pool) *replay {
	length := in.ContentLength
	if length == 0 {
		length = -1 // net/http's rule for requests that are sent: unknown
	}
	r := &replay{
		source: in.Body, request: original, length: length,
		limit: p.cfg.retry.MaxReplayBytes, memory: &p.memory,
		work: &p.set.work, over: &p.totals.unrecorded, panics: &p.set.panics,
	}
	r.changed.L = &r.mu
	for name := range in.Trailer {
		if mayTrail(name) {
			r.declared = append(r.declared, name)
		}
	}
	return r
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

// fillLocked begins a Read of the source, on a goroutine of its own.
func (r *replay) fillLocked() {
	if len(r.spill) > 0 {
		return // nobody has taken yet what was read before
	}
	dst, recording := r.dstLocked()
	if !r.work.enter() {
		r.endLocked(ErrClosed)
		return
	}
	r.reading = true
	go func() {
		defer r.work.leave()
		n, err := r.readSource(dst)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.filledLocked(dst[:n], recording, err)
	}()
}

// fillHereLocked reads the source and waits for that. It gives up the lock meanwhile.
func (r *replay) fillHereLocked() {
	dst, recording := r.dstLocked()
	r.reading = true
	r.mu.Unlock()
	n, err := r.readSource(dst)
	r.mu.Lock()
	r.filledLocked(dst[:n], recording, err)
}

// dstLocked is where the next Read of the source goes: into the record if that has room.
func (r *replay) dstLocked() (dst []byte, recording bool) {
	if dst, recording = r.roomLocked(); recording {
		return dst, true
	}
	if r.length >= 0 && r.read >= r.length {
		return r.beyond[:], false // all that is to come is the end
	}
	if r.spillBuf == nil {
		r.spillBuf = r.memory.Get()
	}
	return r.spillBuf, false
}

// roomLocked returns the free room of the record's last chunk, or of a new one.
func (r *replay) roomLocked() (room []byte, ok bool) {
	left := r.limit - r.recorded
	if r.dropped || left <= 0 || (r.length >= 0 && r.read >= r.length) {
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

// filledLocked takes in what a Read of the source brought.
func (r *replay) filledLocked(got []byte, recording bool, err error) {
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
	switch {
	case r.finished: // an error now is of our closing the source, not of the source
		r.freeLocked()
	case err != nil:
		r.endLocked(err)
	}
	r.changed.Broadcast()
}

func (r *replay) endLocked(err error) {
	r.err = err
	r.changed.Broadcast()
}

// finish says that no attempt will read any more. It closes the source, which
// ends a Read that is under way. A source's Close may wait for that Read, or look
// for the end of the body, for as long as the client likes; so it is not waited for
// while a Read is under way and, if the caller must not wait because it holds a
// connection's lock (aside), unless the source has come to its end.
func (r *replay) finish(aside bool) {
	r.mu.Lock()
	if r.finished {
		r.mu.Unlock()
		return
	}
	r.finished = true
	wait := !r.reading && (!aside || r.err == io.EOF)
	if !r.reading { // else filledLocked does it
		r.freeLocked()
	}
	r.changed.Broadcast()
	r.mu.Unlock()
	if wait {
		r.closeSource()
		return
	}
	tracked := r.work.enter()
	go func() {
		if tracked {
			defer r.work.leave()
		}
		r.closeSource()
	}()
}

func (r *replay) closeSource() {
	defer func() {
		if v := recover(); v != nil {
			r.panics.caught("Close of a request's body", v)
		}
	}()
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
	trailer http.Header // of the attempt's request, filled in at the end

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
			if b.eof = r.err == io.EOF; b.eof {
				b.fillTrailerLocked()
			}
			return 0, r.err
		}
		if !r.reading && b.attempt.wanted() {
			if !r.dropped && b.attempt.isLast() {
				if r.length > r.limit {
					r.over.Add(1)
				}
				r.dropLocked()
			}
			if b.attempt.mayBlock() {
				r.fillHereLocked()
			} else {
				r.fillLocked()
			}
			continue
		}
		r.changed.Wait()
	}
}

// AppendTo appends the whole of a short body that has come, or comes at once, so that it
// can be sent in one piece with the head. Its Read then is not needed.
func (b *attemptBody) AppendTo(dst []byte, most int) ([]byte, bool) {
	r := b.replay
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.length > int64(most) || r.length < 0 {
		return dst, false
	}
	r.awaitLocked(shortPatience)
	if b.fenced || r.finished || r.dropped || r.err != io.EOF || r.recorded != r.length {
		return dst, false
	}
	for _, c := range r.record {
		dst = append(dst, c...)
	}
	b.off, b.eof = r.recorded, true
	return dst, true
}

// shortPatience is how long a short body is waited for before its head goes ahead.
const shortPatience = time.Millisecond

// awaitLocked waits for the end of the source, but not for long.
func (r *replay) awaitLocked(d time.Duration) {
	if r.err != nil {
		return
	}
	late := false
	t := time.AfterFunc(d, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		late = true
		r.changed.Broadcast()
	})
	defer t.Stop()
	for r.err == nil && !late && !r.finished && len(r.spill) == 0 {
		if !r.reading {
			if r.fillLocked(); !r.reading {
				return
			}
		}
		r.changed.Wait()
	}
}

// fillTrailerLocked copies the trailers' values, which the source has set by now.
// Each attempt has a map of its own: the source may still be writing to its one
// while a transport looks at the attempt's.
func (b *attemptBody) fillTrailerLocked() {
	if b.trailer == nil {
		return
	}
	for name, values := range b.replay.request.Trailer {
		if mayTrail(name) {
			b.trailer[name] = values
		}
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
		r.finish(true)
	}
}

// handOver fences the attempt off if another one can read the body from its start,
// and tells whether it did. The two are one step: an attempt that was asked first
// and fenced off later could read on in between, until the record is dropped, and
// the next attempt would send the rest as if it were the whole.
func (b *attemptBody) handOver() bool {
	r := b.replay
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.dropped || r.finished {
		return false
	}
	b.fenced = true
	r.changed.Broadcast()
	return true
}

// conclude makes the attempt the request's last one.
func (b *attemptBody) conclude() {
	r := b.replay
	r.mu.Lock()
	b.last = true
	fenced := b.fenced
	r.mu.Unlock()
	if fenced {
		r.finish(true)
	}
}

// taken is how much the attempt has read.
func (b *attemptBody) taken() int64 {
	b.replay.mu.Lock()
	defer b.replay.mu.Unlock()
	return b.off
}

// sentWhole tells whether the attempt has read the body to its end.
func (b *attemptBody) sentWhole() bool {
	b.replay.mu.Lock()
	defer b.replay.mu.Unlock()
	return b.eof
}
