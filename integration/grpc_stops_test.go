package integration

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/lb"
)

// grpcLoad is callers that make one unary call after the other until they are told to
// end.
type grpcLoad struct {
	rig     *grpcRig
	callers sync.WaitGroup
	ended   chan struct{}
	made    atomic.Int64

	mu       sync.Mutex // guards the following
	failures map[string]error
}

const grpcCallers = 16

func (r *grpcRig) load(t *testing.T) *grpcLoad {
	l := &grpcLoad{rig: r, ended: make(chan struct{}), failures: make(map[string]error)}
	for range grpcCallers {
		l.callers.Go(func() {
			for {
				select {
				case <-l.ended:
					return
				default:
				}
				id := strconv.FormatInt(l.made.Add(1), 10)
				if err := r.unary(t.Context(), id); err != nil {
					l.mu.Lock()
					l.failures[id] = err
					l.mu.Unlock()
				}
			}
		})
	}
	l.more(t)
	return l
}

// more waits for some calls.
func (l *grpcLoad) more(t *testing.T) {
	t.Helper()
	until := l.made.Load() + 500
	wait(t, "500 calls", func() bool { return l.made.Load() >= until })
}

// end ends the load and returns what failed. Each call that did not was executed once,
// and none more often.
func (l *grpcLoad) end(t *testing.T) map[string]error {
	t.Helper()
	close(l.ended)
	l.callers.Wait()
	for i := range l.made.Load() {
		id := strconv.FormatInt(i+1, 10)
		if n := l.rig.ledger.of(id); n > 1 || n < 1 && l.failures[id] == nil {
			t.Errorf("call %s was executed %d times; its error is %v", id, n, l.failures[id])
		}
	}
	t.Logf("%d of %d calls failed", len(l.failures), l.made.Load())
	return l.failures
}

// A backend that stops as it should (GOAWAY) fails no call. Its streams end by themselves.
func TestGRPCGracefulStopFailsNoCall(t *testing.T) {
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := way.rig(t, grpcSetup{backends: 3})
			var streams []pb.TestService_FullDuplexCallClient
			for range 3 {
				s, err := r.client.FullDuplexCall(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				streams = append(streams, s)
				pingPong(t, s)
			}
			l := r.load(t)
			var stop sync.WaitGroup
			stop.Go(r.backends[0].server.GracefulStop)
			l.more(t)
			for _, s := range streams {
				pingPong(t, s)
				if err := s.CloseSend(); err != nil {
					t.Error(err)
				}
			}
			stop.Wait()
			l.more(t)
			for id, err := range l.end(t) {
				t.Errorf("call %s: %v", id, err)
			}
			if n := r.backends[0].calls.Load(); n < 100 {
				t.Errorf("the backend that stopped had %d calls", n)
			}
		})
	}
}

func pingPong(t *testing.T, s pb.TestService_FullDuplexCallClient) {
	t.Helper()
	if err := s.Send(outputs(10)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
}

// A backend that is cut off fails the calls that it had begun, and no others.
func TestGRPCStopFailsOnlyWhatWasBegun(t *testing.T) {
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			const held = 5
			began := make(chan struct{}, 3*held)
			release := make(chan struct{})
			unary := func(ctx context.Context, req *pb.SimpleRequest) (*pb.SimpleResponse, error) {
				if md, _ := metadata.FromIncomingContext(ctx); len(md.Get("x-hold")) > 0 {
					began <- struct{}{}
					select {
					case <-release:
					case <-ctx.Done():
						return nil, ctx.Err()
					}
				}
				return &pb.SimpleResponse{}, nil
			}
			r := way.rig(t, grpcSetup{backends: 3, unary: unary})
			var holding sync.WaitGroup
			var failed, passed atomic.Int64
			for i := range 3 * held {
				holding.Go(func() {
					id := fmt.Sprintf("held %d", i)
					err := r.unary(metadata.AppendToOutgoingContext(t.Context(), "x-hold", ""), id)
					switch {
					case err == nil:
						passed.Add(1)
					case status.Code(err) == codes.Unavailable:
						failed.Add(1)
					default:
						t.Errorf("call %s: %v, want Unavailable", id, err)
					}
					if n := r.ledger.of(id); n != 1 {
						t.Errorf("call %s was executed %d times, want once", id, n)
					}
				})
			}
			for range 3 * held {
				<-began
			}
			l := r.load(t)
			r.backends[0].server.Stop()
			l.more(t)
			close(release)
			holding.Wait()
			if failed.Load() != held || passed.Load() != 2*held {
				t.Errorf("of the calls under way %d failed and %d did not, want %d and %d", failed.Load(), passed.Load(), held, 2*held)
			}
			failures := l.end(t)
			for id, err := range failures {
				// Of an answer that has begun only the stream can be reset.
				begun := status.Code(err) == codes.Internal && r.ledger.of(id) == 1
				if status.Code(err) != codes.Unavailable && !begun {
					t.Errorf("call %s: %v, want Unavailable", id, err)
				}
			}
			if len(failures) > grpcCallers {
				t.Errorf("%d calls failed, more than the %d that can have been under way", len(failures), grpcCallers)
			}
		})
	}
}

func TestGRPCWithoutBackends(t *testing.T) {
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := way.rig(t, grpcSetup{backends: 2})
			if err := r.unary(t.Context(), "before"); err != nil {
				t.Fatal(err)
			}
			for _, b := range r.backends {
				b.server.Stop()
			}
			for range 5 {
				if err := r.unary(t.Context(), "after"); status.Code(err) != codes.Unavailable {
					t.Errorf("without backends: %v, want Unavailable", err)
				}
			}
			s, err := r.client.FullDuplexCall(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
				t.Errorf("without backends: %v, want Unavailable", err)
			}
			if n := r.ledger.of("after"); n != 0 {
				t.Errorf("calls were executed %d times without backends", n)
			}
		})
	}
}

// Probes that only connect find out which backends are there.
func TestGRPCBackendsAreProbed(t *testing.T) {
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := way.rig(t, grpcSetup{backends: 2, options: []lb.Option{
				lb.WithHealthCheck(lb.HealthCheck{Interval: 50 * time.Millisecond, FastInterval: 20 * time.Millisecond}), lb.WithFailClosed(),
			}})
			state := func(i int) string { return r.pool.Stats().Backends[i].State }
			wait(t, "healthy backends", func() bool { return state(0) == "healthy" && state(1) == "healthy" })
			r.backends[0].server.Stop()
			wait(t, "an unhealthy backend", func() bool { return state(0) == "unhealthy" })
			before := r.backends[1].calls.Load()
			for range 10 {
				if err := r.unary(t.Context(), "call"); err != nil {
					t.Error(err)
				}
			}
			if n := r.backends[1].calls.Load() - before; n != 10 || state(1) != "healthy" {
				t.Errorf("the backend that is %s had %d calls, want that it is healthy and had 10", state(1), n)
			}
		})
	}
}
