package memnet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// dialPair returns both ends of a connection on a network of its own.
func dialPair(t *testing.T) (client, accepted *Conn) {
	t.Helper()
	n := New()
	l := listen(t, n, "10.0.0.2:80")
	defer l.Close()
	return dialAccept(t, n, l)
}

func dialAccept(t *testing.T, n *Network, l net.Listener) (client, accepted *Conn) {
	t.Helper()
	c, err := n.DialContext(context.Background(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return c.(*Conn), a.(*Conn)
}

func mustWrite(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if n, err := c.Write([]byte(text)); n != len(text) || err != nil {
		t.Fatalf("Write(%q) = %d, %v", text, n, err)
	}
}

func mustRead(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Fatalf("read %q, %v, want %q", got, err, want)
	}
}

// checkOpError holds err to the form that the net package gives its errors.
func checkOpError(t *testing.T, what string, err, want error) {
	t.Helper()
	if _, ok := errors.AsType[*net.OpError](err); !ok || !errors.Is(err, want) {
		t.Errorf("%s = %v, want a *net.OpError that wraps %v", what, err, want)
	}
}

func readErr(c net.Conn) error {
	_, err := c.Read(make([]byte, 1))
	return err
}

func writeErr(c net.Conn) error {
	_, err := c.Write([]byte("x"))
	return err
}

func TestConnCarriesBothDirectionsAtOnce(t *testing.T) {
	client, accepted := dialPair(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	var wg sync.WaitGroup
	for _, way := range []struct{ from, to *Conn }{{client, accepted}, {accepted, client}} {
		data := make([]byte, 1<<20)
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		pieceBytes := 1 + rnd.IntN(100_000)
		wg.Go(func() {
			for rest := data; len(rest) > 0; {
				n, err := way.from.Write(rest[:min(pieceBytes, len(rest))])
				if err != nil {
					t.Errorf("Write = %v", err)
					break
				}
				rest = rest[n:]
			}
			way.from.CloseWrite()
		})
		wg.Go(func() {
			h := sha256.New()
			n, err := io.Copy(h, way.to)
			if want := sha256.Sum256(data); n != 1<<20 || err != nil || !bytes.Equal(h.Sum(nil), want[:]) {
				t.Errorf("read %d bytes, %v; want the 1 MiB that was written", n, err)
			}
		})
	}
	wg.Wait()
}

func TestWriteReturnsOnceBufferedAndWaitsBeyond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, accepted := dialPair(t)
		mustWrite(t, client, string(make([]byte, bufferBytes)))
		client.SetWriteDeadline(time.Now().Add(time.Second))
		if n, err := client.Write(make([]byte, 10)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("Write into a full buffer = %d, %v, want a timeout", n, err)
		}
		client.SetWriteDeadline(time.Time{})
		done := make(chan int)
		go func() {
			n, _ := client.Write(make([]byte, 10))
			done <- n
		}()
		synctest.Wait()
		io.ReadFull(accepted, make([]byte, 10))
		if n := <-done; n != 10 {
			t.Errorf("Write after room was made = %d, want 10", n)
		}
	})
}

func TestConcurrentWritesDoNotMix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, accepted := dialPair(t)
		for _, letter := range []byte("abc") {
			go client.Write(bytes.Repeat([]byte{letter}, 2*bufferBytes))
		}
		synctest.Wait()
		client.SetReadDeadline(time.Now().Add(time.Second)) // time passes although writers wait
		checkOpError(t, "Read", readErr(client), os.ErrDeadlineExceeded)
		for range 3 {
			got := make([]byte, 2*bufferBytes)
			io.ReadFull(accepted, got)
			if n := bytes.Count(got, got[:1]); n != len(got) {
				t.Errorf("only %d of %d bytes come from one Write", n, len(got))
			}
		}
	})
}

func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, accepted := dialPair(t)
		start := time.Now()
		client.SetReadDeadline(start.Add(3 * time.Second))
		err := readErr(client)
		checkOpError(t, "Read", err, os.ErrDeadlineExceeded)
		if e, ok := errors.AsType[net.Error](err); !ok || !e.Timeout() {
			t.Errorf("Timeout() of %v is false", err)
		}
		if got := time.Since(start); got != 3*time.Second {
			t.Errorf("Read failed after %v, want 3s", got)
		}
		mustWrite(t, accepted, "x")
		checkOpError(t, "Read past the deadline, with data", readErr(client), os.ErrDeadlineExceeded)
		client.SetReadDeadline(time.Time{})
		mustRead(t, client, "x")

		failed := make(chan error)
		go func() { failed <- readErr(client) }()
		synctest.Wait()
		client.SetDeadline(time.Unix(1, 0))
		checkOpError(t, "pending Read", <-failed, os.ErrDeadlineExceeded)
		checkOpError(t, "Write", writeErr(client), os.ErrDeadlineExceeded)

		client.SetDeadline(time.Now().Add(time.Second))
		client.SetDeadline(time.Now().Add(time.Hour))
		time.Sleep(time.Minute)
		mustWrite(t, client, "replaced deadlines do not fire")
	})
}

func TestCloseWriteEndsOneDirectionOnly(t *testing.T) {
	client, accepted := dialPair(t)
	mustWrite(t, client, "ping")
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	checkOpError(t, "Write after CloseWrite", writeErr(client), syscall.EPIPE)
	mustRead(t, accepted, "ping")
	if err := readErr(accepted); err != io.EOF {
		t.Errorf("Read = %v, want a bare io.EOF", err)
	}
	mustWrite(t, accepted, "pong")
	mustRead(t, client, "pong")
}

func TestCloseShowsAtThePeerAsInTCP(t *testing.T) {
	t.Run("what was written is still read, then EOF", func(t *testing.T) {
		client, accepted := dialPair(t)
		mustWrite(t, client, "bye")
		client.Close()
		mustRead(t, accepted, "bye")
		if err := readErr(accepted); err != io.EOF {
			t.Errorf("Read = %v, want io.EOF", err)
		}
	})
	t.Run("one write is lost, the next fails", func(t *testing.T) {
		client, accepted := dialPair(t)
		client.Close()
		mustWrite(t, accepted, "into the void")
		checkOpError(t, "second Write", writeErr(accepted), syscall.EPIPE)
	})
	t.Run("unread data at the closer resets the peer", func(t *testing.T) {
		client, accepted := dialPair(t)
		mustWrite(t, accepted, "unread")
		mustWrite(t, client, "answer")
		client.Close()
		mustRead(t, accepted, "answer")
		checkOpError(t, "Read", readErr(accepted), syscall.ECONNRESET)
		checkOpError(t, "Write", writeErr(accepted), syscall.ECONNRESET)
	})
	t.Run("the closer's own calls fail", func(t *testing.T) {
		client, _ := dialPair(t)
		client.Close()
		checkOpError(t, "Read", readErr(client), net.ErrClosed)
		checkOpError(t, "Write", writeErr(client), net.ErrClosed)
		checkOpError(t, "Close", client.Close(), net.ErrClosed)
		checkOpError(t, "CloseWrite", client.CloseWrite(), net.ErrClosed)
		checkOpError(t, "SetDeadline", client.SetDeadline(time.Time{}), net.ErrClosed)
	})
}

func TestPendingCallsFailWhenTheConnectionEnds(t *testing.T) {
	for _, tt := range []struct {
		name  string
		end   func(client, accepted *Conn)
		read  error
		write error
	}{
		{"own Close", func(c, _ *Conn) { c.Close() }, net.ErrClosed, net.ErrClosed},
		{"peer's Close with unread data", func(_, a *Conn) { a.Close() }, syscall.ECONNRESET, syscall.ECONNRESET},
		{"peer's Reset", func(_, a *Conn) { a.Reset() }, syscall.ECONNRESET, syscall.ECONNRESET},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, accepted := dialPair(t)
				mustWrite(t, client, string(make([]byte, bufferBytes)))
				read, write := make(chan error), make(chan error)
				go func() { read <- readErr(client) }()
				go func() { write <- writeErr(client) }()
				synctest.Wait()
				tt.end(client, accepted)
				checkOpError(t, "Read", <-read, tt.read)
				checkOpError(t, "Write", <-write, tt.write)
			})
		})
	}
}

func TestResetDiscardsWhatIsBuffered(t *testing.T) {
	for _, tt := range []struct {
		name  string
		reset func(c *Conn)
	}{
		{"Reset", (*Conn).Reset},
		{"SetLinger 0 and Close", func(c *Conn) { c.SetLinger(0); c.Close() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			client, accepted := dialPair(t)
			mustWrite(t, client, "lost")
			mustWrite(t, accepted, "lost too")
			tt.reset(client)
			for range 2 {
				checkOpError(t, "Read", readErr(accepted), syscall.ECONNRESET)
				checkOpError(t, "Write", writeErr(accepted), syscall.ECONNRESET)
			}
			checkOpError(t, "CloseWrite", accepted.CloseWrite(), syscall.ENOTCONN)
			checkOpError(t, "own Read", readErr(client), net.ErrClosed)
			if err := accepted.Close(); err != nil {
				t.Errorf("Close after a reset = %v", err)
			}
		})
	}
	t.Run("a linger other than 0 does not reset", func(t *testing.T) {
		client, accepted := dialPair(t)
		mustWrite(t, client, "kept")
		client.SetLinger(0)
		client.SetLinger(-1)
		client.Close()
		mustRead(t, accepted, "kept")
	})
}

func TestWaitReadReturnsWhenThePeerHasRead(t *testing.T) {
	for _, tt := range []struct {
		name string
		then func(client, accepted *Conn)
	}{
		{"the peer reads", func(c, _ *Conn) { c.Read(make([]byte, 10)) }},
		{"the peer closes", func(c, _ *Conn) { c.Close() }},
		{"the peer resets", func(c, _ *Conn) { c.Reset() }},
		{"this end closes", func(_, a *Conn) { a.Close() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, accepted := dialPair(t)
				mustWrite(t, accepted, "data")
				done := make(chan struct{})
				go func() {
					accepted.WaitRead()
					close(done)
				}()
				synctest.Wait()
				select {
				case <-done:
					t.Fatal("WaitRead returned with data unread")
				default:
				}
				tt.then(client, accepted)
				<-done
			})
		})
	}
}

func TestIdleConnectionsHaveNoGoroutines(t *testing.T) {
	n := New()
	l := listen(t, n, "127.0.0.1:0")
	defer l.Close()
	before := runtime.NumGoroutine()
	for range 50 {
		client, accepted := dialAccept(t, n, l)
		client.SetDeadline(time.Now().Add(time.Hour))
		defer client.Close()
		defer accepted.Close()
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines with 50 idle connections, %d without", after, before)
	}
}
