package h1_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb/internal/h1"
)

// TestAnswersBelongToTheirRequests sends many requests of all kinds at once, of which
// some are given up, to a server of which some answers are no good. Whatever is read to
// its end is the answer to what was asked; and nothing is left.
func TestAnswersBelongToTheirRequests(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { soak(t, seed) })
		})
	}
}

func soak(t *testing.T, seed uint64) {
	r := newRig(t, h1.Config{MaxIdle: 5, IdleTimeout: 3 * time.Second, HeaderTimeout: time.Second, ContinueTimeout: 20 * time.Millisecond}, erratic)
	var wg sync.WaitGroup
	var mu sync.Mutex // guards the following
	whole := 0
	for worker := range uint64(10) {
		rnd := rand.New(rand.NewPCG(seed, worker))
		wg.Go(func() {
			for i := range 40 {
				if r.ask(rnd, fmt.Sprintf("%d.%d", worker, i)) {
					mu.Lock()
					whole++
					mu.Unlock()
				}
				linger(upTo(rnd, 50*time.Millisecond))
			}
		})
	}
	wg.Wait()
	linger(time.Minute)
	if s := r.pool.Stats(); s.Open != 0 || whole < 100 || s.Opened > 400 {
		t.Errorf("Stats() = %+v with %d whole answers, want none open, and most answered", s, whole)
	}
}

// erratic echoes the Id of each request in a way that the Id chooses.
func erratic(p *peer) {
	defer p.Close()
	for {
		req, err := http.ReadRequest(p.br)
		if err != nil {
			return
		}
		id := req.Header.Get("Id")
		rnd := rand.New(rand.NewPCG(0, uint64(len(id))<<32+uint64(id[len(id)-1])+uint64(id[0])<<8))
		kind := rnd.IntN(12)
		if kind != 0 { // that answers before it has the body
			if _, err := io.ReadAll(req.Body); err != nil {
				return
			}
		}
		linger(upTo(rnd, 20*time.Millisecond))
		switch known := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(id), id); kind {
		case 1:
			p.say(chunkedHead + "1\r\n" + id[:1] + "\r\n")
			linger(upTo(rnd, 20*time.Millisecond))
			p.say(fmt.Sprintf("%x\r\n%s\r\n0\r\nA: b\r\n\r\n", len(id)-1, id[1:]))
		case 2:
			p.say("HTTP/1.1 200 OK\r\n\r\n" + id)
			return
		case 3:
			p.say(known + evil)
		case 4:
			p.say("HTTP/1.1 103 Early Hints\r\n\r\n" + known)
		case 5:
			p.say(known[:len(known)-1])
			return
		case 6:
			return
		case 7:
			linger(2 * time.Second)
			p.say(known)
		case 8:
			p.say(known)
			linger(upTo(rnd, 20*time.Millisecond))
			return
		default:
			p.say(known)
		}
	}
}

// ask sends a request of some kind, and tells whether its answer was read to its end.
func (r *rig) ask(rnd *rand.Rand, id string) bool {
	ctx, cancel := context.WithCancel(r.t.Context())
	defer cancel()
	if rnd.IntN(4) == 0 {
		time.AfterFunc(upTo(rnd, 40*time.Millisecond), cancel)
	}
	req := request(r.t, "POST", [...]io.Reader{
		nil, strings.NewReader(id), unknown(id), unknown(strings.Repeat(id, 1+rnd.IntN(5_000))),
	}[rnd.IntN(4)]).WithContext(ctx)
	req.Header.Set("Id", id)
	if rnd.IntN(4) == 0 {
		req.Header.Set("Expect", "100-continue")
	}
	resp, err := r.send(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	if rnd.IntN(8) == 0 {
		return false
	}
	body, err := io.ReadAll(resp.Body)
	if err == nil && string(body) != id {
		r.t.Errorf("request %s has the answer %q", id, body)
	}
	return err == nil
}

// upTo returns a time below d.
func upTo(rnd *rand.Rand, d time.Duration) time.Duration { return time.Duration(rnd.Int64N(int64(d))) }
