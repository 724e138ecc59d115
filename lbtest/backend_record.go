package lbtest

import (
	"net/http"
	"time"
)

// maxReceived is how many requests a record keeps.
const maxReceived = 10_000

// Received is what a backend knows of one request. It is recorded when the
// request's header has arrived; the facts about its body follow as they become
// known.
type Received struct {
	// Seq numbers the requests in order of arrival, from 1; those of SetProbe
	// are numbered by themselves.
	Seq int `json:"seq"`
	// Method is the request's method.
	Method string `json:"method"`
	// Target is the request target, byte for byte as in the request line.
	Target string `json:"target"`
	// Host is the Host header, or the host of an absolute target.
	Host string `json:"host"`
	// Header has all other headers but Transfer-Encoding and Trailer, which
	// net/http takes out.
	Header http.Header `json:"header"`
	// BodyBytes counts the body bytes read so far.
	BodyBytes int64 `json:"body_bytes"`
	// BodySHA256 is the hash of the body in hex, empty until all of the body
	// was read.
	BodySHA256 string `json:"body_sha256"`
	// BodyErr is why the body could not be read to its end, or nil.
	BodyErr error `json:"-"`
	// Conn is the number of the connection, from 1 in order of acceptance.
	Conn int `json:"conn"`
	// Reused is true unless this was the first request of its connection.
	Reused bool `json:"reused"`
	// At is when the header had arrived.
	At time.Time `json:"at"`
	// Canceled is true if the client left before it was answered (with Handle:
	// before the handler returned). It is known when the backend is done with
	// the request.
	Canceled bool `json:"canceled"`
}

func (r *Received) clone() Received {
	c := *r
	c.Header = r.Header.Clone()
	return c
}

// record remembers requests. newRecord makes one; the backend's lock guards it.
type record struct {
	count    int            // of all requests, including those no longer kept
	kept     []*Received    // a ring once it has maxReceived elements
	oldest   int            // where the ring starts
	arrivals map[string]int // of the ids in kept
}

func newRecord() *record {
	return &record{arrivals: make(map[string]int)}
}

// add numbers r and appends it, in the place of the oldest if there are too
// many.
func (rec *record) add(r *Received) {
	rec.count++
	r.Seq = rec.count
	if id := r.Header.Get(RequestIDHeader); id != "" {
		rec.arrivals[id]++
	}
	if len(rec.kept) < maxReceived {
		rec.kept = append(rec.kept, r)
		return
	}
	id := rec.kept[rec.oldest].Header.Get(RequestIDHeader)
	if rec.arrivals[id]--; rec.arrivals[id] <= 0 {
		delete(rec.arrivals, id)
	}
	rec.kept[rec.oldest] = r
	rec.oldest = (rec.oldest + 1) % maxReceived
}

// all returns copies of what is kept, in order of arrival.
func (rec *record) all() []Received {
	all := make([]Received, 0, len(rec.kept))
	for i := range rec.kept {
		all = append(all, rec.kept[(rec.oldest+i)%len(rec.kept)].clone())
	}
	return all
}
