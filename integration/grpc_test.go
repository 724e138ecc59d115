package integration

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/lb"
)

func sum(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }

func TestGRPCCalls(t *testing.T) {
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := way.rig(t, grpcSetup{})
			for _, c := range []struct {
				name string
				try  func(*grpcRig, *testing.T)
			}{
				{"unary calls, empty and of 4 MiB both ways", (*grpcRig).tryUnary},
				{"a stream of the client", (*grpcRig).tryInput},
				{"a stream of the server", (*grpcRig).tryOutput},
				{"messages that each wait for the answer to the one before", (*grpcRig).tryPingPong},
				{"metadata", (*grpcRig).tryMetadata},
				{"errors with details", (*grpcRig).tryErrors},
			} {
				t.Run(c.name, func(t *testing.T) { c.try(r, t) })
			}
			r.wantUnblamed(t)
			if c := r.pool.Stats().Backends[0].Connections; c.Opened != 1 {
				t.Errorf("connections %+v, want that one was opened", *c)
			}
		})
	}
}

func (r *grpcRig) tryUnary(t *testing.T) {
	for _, size := range []int{0, 1, 70_000, largeGRPC} {
		req := &pb.SimpleRequest{ResponseSize: int32(size), Payload: &pb.Payload{Body: fill(size)}}
		resp, err := r.client.UnaryCall(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if got := resp.GetUsername(); got != sum(req.GetPayload().GetBody()) {
			t.Errorf("the backend was sent others than the %d bytes: %s", size, got)
		}
		if got := resp.GetPayload().GetBody(); sum(got) != sum(fill(size)) {
			t.Errorf("the client was sent %d others than the %d bytes", len(got), size)
		}
	}
}

func (r *grpcRig) tryInput(t *testing.T) {
	s, err := r.client.StreamingInputCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var want int
	for i := range 100 {
		want += i * 100
		if err := s.Send(&pb.StreamingInputCallRequest{Payload: &pb.Payload{Body: fill(i * 100)}}); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := s.CloseAndRecv()
	if err != nil || int(resp.GetAggregatedPayloadSize()) != want {
		t.Errorf("%d bytes came, %v; want %d", resp.GetAggregatedPayloadSize(), err, want)
	}
}

func (r *grpcRig) tryOutput(t *testing.T) {
	sizes := []int{1, 0, 100_000, 7, 1 << 20}
	s, err := r.client.StreamingOutputCall(t.Context(), outputs(sizes...))
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range sizes {
		if m, err := s.Recv(); err != nil || sum(m.GetPayload().GetBody()) != sum(fill(n)) {
			t.Fatalf("message %d has %d bytes, %v; want %d", i, len(m.GetPayload().GetBody()), err, n)
		}
	}
	if _, err := s.Recv(); err != io.EOF {
		t.Errorf("behind the last message: %v, want EOF", err)
	}
}

func (r *grpcRig) tryPingPong(t *testing.T) {
	var streams sync.WaitGroup
	for range 4 {
		streams.Go(func() {
			s, err := r.client.FullDuplexCall(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			for i := range 100 {
				if err := s.Send(outputs(i)); err != nil {
					t.Errorf("message %d: %v", i, err)
					return
				}
				if m, err := s.Recv(); err != nil || len(m.GetPayload().GetBody()) != i {
					t.Errorf("answer %d has %d bytes, %v", i, len(m.GetPayload().GetBody()), err)
					return
				}
			}
			if err := s.CloseSend(); err != nil {
				t.Error(err)
			}
			if _, err := s.Recv(); err != io.EOF {
				t.Errorf("at the end: %v, want EOF", err)
			}
		})
	}
	streams.Wait()
}

func (r *grpcRig) tryMetadata(t *testing.T) {
	var all []byte
	for i := range 256 {
		all = append(all, byte(i))
	}
	text, binary := []string{"one, two", "", "three"}, []string{string(all), "", "\x00"}
	md := metadata.MD{textField: text, binaryField: binary}
	var header, trailer metadata.MD
	check := func(t *testing.T) {
		t.Helper()
		for name, want := range md {
			if got := header.Get(headerSuffix + name); !slices.Equal(got, want) {
				t.Errorf("header %s = %q, want %q", name, got, want)
			}
			if got := trailer.Get(trailerSuffix + name); !slices.Equal(got, want) {
				t.Errorf("trailer %s = %q, want %q", name, got, want)
			}
		}
	}
	ctx := metadata.NewOutgoingContext(t.Context(), md)
	if _, err := r.client.UnaryCall(ctx, &pb.SimpleRequest{}, grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
		t.Fatal(err)
	}
	check(t)
	header, trailer = nil, nil
	refused := &pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: int32(codes.Aborted)}}
	if _, err := r.client.UnaryCall(ctx, refused, grpc.Header(&header), grpc.Trailer(&trailer)); status.Code(err) != codes.Aborted {
		t.Fatal(err)
	}
	check(t)
}

func (r *grpcRig) tryErrors(t *testing.T) {
	asked := &pb.EchoStatus{Code: int32(codes.FailedPrecondition), Message: "100 % naïve: \t\"a\"\nb ☃"}
	check := func(t *testing.T, err error) {
		t.Helper()
		s := status.Convert(err)
		if s.Code() != codes.FailedPrecondition || s.Message() != asked.GetMessage() {
			t.Errorf("error is %v with %q, want FailedPrecondition with %q", s.Code(), s.Message(), asked.GetMessage())
		}
		if d := s.Details(); len(d) != 1 || !proto.Equal(d[0].(proto.Message), asked) {
			t.Errorf("details = %v, want %v", d, asked)
		}
	}
	_, err := r.client.UnaryCall(t.Context(), &pb.SimpleRequest{ResponseStatus: asked}) // trailers only
	check(t, err)

	req := outputs(10, 20)
	req.ResponseStatus = asked
	s, err := r.client.StreamingOutputCall(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := s.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	_, err = s.Recv()
	check(t, err)

	if _, err := r.client.EmptyCall(t.Context(), &pb.Empty{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("a call that is not implemented gave %v", err)
	}
}

// A backend that answers a stream before its end is heard at once.
func TestGRPCEarlyAnswer(t *testing.T) {
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := way.rig(t, grpcSetup{input: func(s pb.TestService_StreamingInputCallServer) error {
				if _, err := s.Recv(); err != nil {
					return err
				}
				return status.Error(codes.ResourceExhausted, "enough")
			}})
			s, err := r.client.StreamingInputCall(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Send(&pb.StreamingInputCallRequest{}); err != nil {
				t.Fatal(err)
			}
			if err := s.RecvMsg(new(pb.StreamingInputCallResponse)); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("the answer is %v, want ResourceExhausted", err)
			}
			r.wantUnblamed(t)
		})
	}
}

// waiting answers no call before its context has ended, and tells of both.
type waiting struct {
	began chan time.Duration // until the deadline, as the backend sees it
	ended chan error         // why the context ended
}

func newWaiting() *waiting {
	return &waiting{make(chan time.Duration, 1), make(chan error, 1)}
}

func (w *waiting) unary(ctx context.Context, _ *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	end, _ := ctx.Deadline()
	w.began <- time.Until(end)
	<-ctx.Done()
	w.ended <- ctx.Err()
	return nil, ctx.Err()
}

func TestGRPCDeadline(t *testing.T) {
	const limit = 300 * time.Millisecond
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			w := newWaiting()
			r := way.rig(t, grpcSetup{unary: w.unary})
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			if err := r.unary(ctx, "deadline"); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("the client was told %v, want DeadlineExceeded", err)
			}
			if d := <-w.began; d <= 0 || d > limit {
				t.Errorf("the backend saw a deadline in %v, want up to %v", d, limit)
			}
			<-w.ended
			r.wantUnblamed(t)
		})
	}
}

// A call that the client gives up ends at the backend.
func TestGRPCCancel(t *testing.T) {
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			w := newWaiting()
			r := way.rig(t, grpcSetup{unary: w.unary})
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			done := make(chan error, 1)
			go func() { done <- r.unary(ctx, "cancel") }()
			<-w.began
			cancel()
			if err := <-done; status.Code(err) != codes.Canceled {
				t.Errorf("the client was told %v, want Canceled", err)
			}
			if err := <-w.ended; err != context.Canceled {
				t.Errorf("the backend's context ended with %v, want %v", err, context.Canceled)
			}

			ctx, cancel = context.WithCancel(t.Context())
			s, err := r.client.FullDuplexCall(ctx)
			if err != nil {
				t.Fatal(err)
			}
			pingPong(t, s)
			cancel()
			if _, err := s.Recv(); status.Code(err) != codes.Canceled {
				t.Errorf("the stream ended with %v, want Canceled", err)
			}
			r.wantUnblamed(t)
		})
	}
}

// A call may wait for longer than answers of other requests.
func TestGRPCIsExemptFromTheHeaderTimeout(t *testing.T) {
	const limit = 50 * time.Millisecond
	for _, way := range grpcWays {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			r := way.rig(t, grpcSetup{
				unary: func(context.Context, *pb.SimpleRequest) (*pb.SimpleResponse, error) {
					<-time.After(5 * limit)
					return &pb.SimpleResponse{}, nil
				},
				options: []lb.Option{lb.WithTimeouts(lb.Timeouts{ResponseHeader: limit})},
			})
			if err := r.unary(t.Context(), "slow"); err != nil {
				t.Error(err)
			}
			r.wantUnblamed(t)
		})
	}
}

// The calls of one connection are spread over the backends, and a connection to each is
// enough.
func TestGRPCSpreadsTheCallsOfOneConnection(t *testing.T) {
	const calls, backends = 300, 3
	r := grpcWays[0].rig(t, grpcSetup{backends: backends})
	var next atomic.Int64
	var callers sync.WaitGroup
	for range 20 {
		callers.Go(func() {
			for i := next.Add(1); i <= calls; i = next.Add(1) {
				if err := r.unary(t.Context(), strconv.FormatInt(i, 10)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
	for i, b := range r.backends {
		if n := b.calls.Load(); n < calls/backends-10 || n > calls/backends+10 {
			t.Errorf("backend %d had %d calls, want %d ± 10", i, n, calls/backends)
		}
		if c := r.pool.Stats().Backends[i].Connections; c.Opened != 1 {
			t.Errorf("connections %+v to backend %d, want that one was opened", *c, i)
		}
	}
	r.wantUnblamed(t)
}
