package integration

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/lb"
)

// A pool between clients and servers of grpc-go, and what is seen at either end.

// grpcWay says which of the two connections have TLS.
type grpcWay struct {
	name        string
	front, back bool
}

var grpcWays = []grpcWay{
	{"h2c to h2c", false, false},
	{"h2c to https", false, true},
	{"TLS to h2c", true, false},
	{"TLS to https", true, true},
}

const (
	callField     = "x-call"  // names a call
	maxGRPCBytes  = 8 << 20   // of one message
	largeGRPC     = 4 << 20   // the size of large ones
	textField     = "x-text"  // is sent back in header and trailer
	binaryField   = "x-a-bin" // likewise
	headerSuffix  = "head-"
	trailerSuffix = "tail-"
)

// grpcSetup is what is behind the pool.
type grpcSetup struct {
	backends int // 1 if not set
	// unary answers unary calls; nil is answerUnary.
	unary func(context.Context, *pb.SimpleRequest) (*pb.SimpleResponse, error)
	// input answers client streams; nil is sumInput.
	input   func(pb.TestService_StreamingInputCallServer) error
	options []lb.Option
}

// grpcRig is a pool in use by one client.
type grpcRig struct {
	pool     *lb.Pool
	front    *httptest.Server
	backends []*grpcBackend
	conn     *grpc.ClientConn
	client   pb.TestServiceClient
	ledger   ledger
}

// ledger counts how often each call was executed.
type ledger struct {
	mu    sync.Mutex // guards the following
	times map[string]int
}

func (l *ledger) add(ctx context.Context) {
	md, _ := metadata.FromIncomingContext(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, call := range md.Get(callField) {
		l.times[call]++
	}
}

func (l *ledger) of(call string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.times[call]
}

// rig makes one. When the test ends, so must all that was begun.
func (w grpcWay) rig(t *testing.T, setup grpcSetup) *grpcRig {
	t.Helper()
	r := &grpcRig{ledger: ledger{times: make(map[string]int)}}
	cert, roots := certificate(t)
	var targets []lb.Target
	for range max(setup.backends, 1) {
		b := startGRPC(t, w.back, cert, setup, &r.ledger)
		r.backends = append(r.backends, b)
		targets = append(targets, target(w.back, b.addr, roots))
	}
	var err error
	if r.pool, err = lb.New(targets, setup.options...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.pool.Close() })
	r.front = startFront(t, r.pool, w.front)
	creds := insecure.NewCredentials()
	if w.front {
		creds = credentials.NewTLS(&tls.Config{RootCAs: rootsOf(r.front.Certificate())})
	}
	r.conn, err = grpc.NewClient("passthrough:///"+r.front.Listener.Addr().String(), grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxGRPCBytes)))
	if err != nil {
		t.Fatal(err)
	}
	r.client = pb.NewTestServiceClient(r.conn)
	t.Cleanup(func() {
		r.waitIdle(t)
		r.conn.Close()
	})
	return r
}

// waitIdle waits until nothing is under way in the pool and at the backends.
func (r *grpcRig) waitIdle(t *testing.T) {
	t.Helper()
	wait(t, "nothing in flight", func() bool { return r.pool.Stats().InFlight == 0 })
	for _, b := range r.backends {
		wait(t, "the handlers of "+b.addr+" to end", func() bool { return b.live.Load() == 0 })
	}
}

// wantUnblamed checks that no backend was found at fault.
func (r *grpcRig) wantUnblamed(t *testing.T) {
	t.Helper()
	r.waitIdle(t)
	for _, b := range r.pool.Stats().Backends {
		if b.Failures != 0 {
			t.Errorf("backend %s has %d failures, the last is %s; want none", b.Name, b.Failures, b.LastError)
		}
	}
}

// unary makes a call named id.
func (r *grpcRig) unary(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := r.client.UnaryCall(metadata.AppendToOutgoingContext(ctx, callField, id), &pb.SimpleRequest{})
	return err
}

// target is that of a backend at addr over HTTP/2.
func target(secure bool, addr string, roots *x509.CertPool) lb.Target {
	if secure {
		return lb.Target{URL: "https://" + addr, TLS: &tls.Config{RootCAs: roots}}
	}
	return lb.Target{URL: "h2c://" + addr}
}

// startFront starts a server that speaks HTTP/2.
func startFront(t *testing.T, h http.Handler, secure bool) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	if secure {
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Config.Protocols = new(http.Protocols)
		s.Config.Protocols.SetHTTP1(true)
		s.Config.Protocols.SetUnencryptedHTTP2(true)
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

// certificate returns one for 127.0.0.1 and who trusts it.
func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	return s.TLS.Certificates[0], rootsOf(s.Certificate())
}

func rootsOf(cert *x509.Certificate) *x509.CertPool {
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return roots
}

// grpcBackend is one server.
type grpcBackend struct {
	pb.UnimplementedTestServiceServer
	setup  grpcSetup
	server *grpc.Server
	addr   string
	ledger *ledger
	live   atomic.Int64 // handlers that run
	calls  atomic.Int64
}

func startGRPC(t *testing.T, secure bool, cert tls.Certificate, setup grpcSetup, l *ledger) *grpcBackend {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &grpcBackend{setup: setup, addr: listener.Addr().String(), ledger: l}
	if b.setup.unary == nil {
		b.setup.unary = answerUnary
	}
	if b.setup.input == nil {
		b.setup.input = sumInput
	}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxGRPCBytes), grpc.WaitForHandlers(true),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			defer b.begin(ctx)()
			return handle(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			defer b.begin(s.Context())()
			return handle(srv, s)
		}),
	}
	if secure {
		options = append(options, grpc.Creds(credentials.NewServerTLSFromCert(&cert)))
	}
	b.server = grpc.NewServer(options...)
	pb.RegisterTestServiceServer(b.server, b)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := b.server.Serve(listener); err != nil {
			t.Errorf("backend %s: %v", b.addr, err)
		}
	})
	t.Cleanup(func() {
		b.server.Stop()
		serving.Wait()
	})
	return b
}

// begin notes that a handler runs, until what it returns is called.
func (b *grpcBackend) begin(ctx context.Context) (end func()) {
	b.live.Add(1)
	b.calls.Add(1)
	b.ledger.add(ctx)
	return func() { b.live.Add(-1) }
}

func (b *grpcBackend) UnaryCall(ctx context.Context, req *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	return b.setup.unary(ctx, req)
}

func (b *grpcBackend) StreamingInputCall(s pb.TestService_StreamingInputCallServer) error {
	return b.setup.input(s)
}

// answerUnary sends back what the request asks for, and its metadata.
func answerUnary(ctx context.Context, req *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	if err := echoMetadata(ctx); err != nil {
		return nil, err
	}
	if asked := req.GetResponseStatus(); asked.GetCode() != 0 {
		return nil, refusal(asked)
	}
	return &pb.SimpleResponse{Payload: &pb.Payload{Body: fill(int(req.GetResponseSize())), Type: req.GetPayload().GetType()}, Username: sum(req.GetPayload().GetBody())}, nil
}

// echoMetadata sends the fields of the request in header and trailer, if it has any.
func echoMetadata(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	header, trailer := metadata.MD{}, metadata.MD{}
	for _, name := range []string{textField, binaryField} {
		if values := md.Get(name); len(values) > 0 {
			header[headerSuffix+name], trailer[trailerSuffix+name] = values, values
		}
	}
	if len(header) == 0 {
		return nil
	}
	if err := grpc.SendHeader(ctx, header); err != nil {
		return err
	}
	return grpc.SetTrailer(ctx, trailer)
}

// refusal is an error with details.
func refusal(asked *pb.EchoStatus) error {
	s, err := status.New(codes.Code(asked.GetCode()), asked.GetMessage()).WithDetails(asked)
	if err != nil {
		return err
	}
	return s.Err()
}

// sumInput answers with the size of all that came.
func sumInput(s pb.TestService_StreamingInputCallServer) error {
	var size int
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return s.SendAndClose(&pb.StreamingInputCallResponse{AggregatedPayloadSize: int32(size)})
		}
		if err != nil {
			return err
		}
		size += len(m.GetPayload().GetBody())
	}
}

func (b *grpcBackend) StreamingOutputCall(req *pb.StreamingOutputCallRequest, s pb.TestService_StreamingOutputCallServer) error {
	if err := sendAll(req, s.Send); err != nil {
		return err
	}
	if asked := req.GetResponseStatus(); asked.GetCode() != 0 {
		return refusal(asked)
	}
	return nil
}

// FullDuplexCall answers each message before it reads the next.
func (b *grpcBackend) FullDuplexCall(s pb.TestService_FullDuplexCallServer) error {
	for {
		m, err := s.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := sendAll(m, s.Send); err != nil {
			return err
		}
	}
}

func sendAll(req *pb.StreamingOutputCallRequest, send func(*pb.StreamingOutputCallResponse) error) error {
	for _, p := range req.GetResponseParameters() {
		if err := send(&pb.StreamingOutputCallResponse{Payload: &pb.Payload{Body: fill(int(p.GetSize()))}}); err != nil {
			return err
		}
	}
	return nil
}

// outputs is a request for messages of these sizes.
func outputs(sizes ...int) *pb.StreamingOutputCallRequest {
	var req pb.StreamingOutputCallRequest
	for _, n := range sizes {
		req.ResponseParameters = append(req.ResponseParameters, &pb.ResponseParameters{Size: int32(n)})
	}
	return &req
}

// fill returns n bytes, whose content depends on n.
func fill(n int) []byte {
	unit := []byte(strings.Repeat("gRPC", 7) + string(rune('a'+n%26)))
	return slices.Repeat(unit, n/len(unit)+1)[:n]
}
