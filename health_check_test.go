package lb_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// What an HTTP check asks and what it takes for an answer.
func TestHealthCheckJudgesTheAnswer(t *testing.T) {
	ok := regexp.MustCompile(`^ok`)
	for _, c := range []struct {
		name   string
		check  lb.HealthCheck
		probe  lbtest.Behavior
		state  string
		reason string // a part of it
	}{
		{"200 passes", lb.HealthCheck{}, lbtest.AnswerStatus(200, ""), "healthy", "probe passed"},
		{"204 passes", lb.HealthCheck{}, lbtest.AnswerStatus(204, ""), "healthy", ""},
		{"404 fails", lb.HealthCheck{}, lbtest.AnswerStatus(404, ""), "unhealthy", "probe failed: GET /healthz: status 404, want 200 to 299"},
		{"500 fails", lb.HealthCheck{}, lbtest.AnswerStatus(500, ""), "unhealthy", "status 500"},
		{"a listed status passes", lb.HealthCheck{Statuses: []int{200, 404}}, lbtest.AnswerStatus(404, ""), "healthy", ""},
		{"one that is not listed fails", lb.HealthCheck{Statuses: []int{200, 404}}, lbtest.AnswerStatus(204, ""), "unhealthy", "status 204, want 200 404"},
		{"a body that matches passes", lb.HealthCheck{BodyMatch: ok}, lbtest.AnswerStatus(200, "ok, I think"), "healthy", ""},
		{"a body that does not match fails", lb.HealthCheck{BodyMatch: ok}, lbtest.AnswerStatus(200, "not ok"), "unhealthy", `body "not ok" does not match "^ok"`},
		{"a match beyond 64 KiB does not count", lb.HealthCheck{BodyMatch: regexp.MustCompile("end$")}, lbtest.AnswerStatus(200, text(64<<10)+"end"), "unhealthy", "does not match"},
		{"a body that is cut fails if it is looked at", lb.HealthCheck{BodyMatch: ok}, lbtest.ResetMid(10), "unhealthy", "body: "},
		{"no answer in time fails", lb.HealthCheck{}, lbtest.Hang(), "unhealthy", "no verdict in time (2s): GET /healthz: no answer"},
		{"a slow answer passes in time", lb.HealthCheck{}, lbtest.Delay(1900 * time.Millisecond), "healthy", ""},
		{"a body that never ends does not matter", lb.HealthCheck{}, lbtest.Stream(100, time.Second), "healthy", ""},
		{"a reset fails", lb.HealthCheck{}, lbtest.Reset(), "unhealthy", "GET /healthz: "},
		{"no HTTP fails", lb.HealthCheck{}, lbtest.Raw("+PONG\r\n\r\n"), "unhealthy", "malformed"},
		{"HEAD asks without a body", lb.HealthCheck{Method: "HEAD"}, lbtest.AnswerStatus(200, ""), "healthy", ""},
	} {
		bubble(t, c.name, func(t *testing.T) {
			c.check.Path = probePath
			r := newBackends(t, 1)
			r.backends[0].SetProbe(probePath, c.probe)
			r.startPool(lb.WithHealthCheck(c.check))
			r.after(2500 * time.Millisecond)
			st := r.pool.Backends()[0].Status()
			if st.String() != c.state || !strings.Contains(st.Reason, c.reason) {
				t.Errorf("%s: %q, want %s: %q", st, st.Reason, c.state, c.reason)
			}
		})
	}
}

// A probe is the request that was asked for, and carries nothing that was not.
func TestHealthCheckSendsWhatIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newProbedRig(t, 1, lb.HealthCheck{
			Path: probePath + "?deep=1&x=%2F", Method: "OPTIONS", Host: "health.test",
			Header: http.Header{"X-Probe": {"1", "2"}, "User-Agent": {"mine"}},
		})
		r.after(time.Millisecond)
		p := r.backends[0].Probes()[0]
		if p.Method != "OPTIONS" || p.Target != probePath+"?deep=1&x=%2F" || p.Host != "health.test" ||
			fmt.Sprint(p.Header["X-Probe"]) != "[1 2]" || p.Header.Get("User-Agent") != "mine" {
			t.Errorf("probe = %+v", p)
		}
		for name := range p.Header {
			switch name {
			case "X-Probe", "User-Agent", "Connection":
			default:
				t.Errorf("probe carries %s: %q", name, p.Header[name])
			}
		}
	})
}

// A redirect is not followed: it leads elsewhere, and its own status counts
// (caddyserver/caddy#6291).
func TestProbeFollowsNoRedirect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		other := r.net.NewBackend(t, "login")
		r.backends[0].SetProbe(probePath, lbtest.Handle(http.RedirectHandler(other.URL(), http.StatusFound)))
		r.startPool(lb.WithHealthCheck(everySecond()))
		r.after(5 * time.Second)
		r.wantStates("unhealthy")
		if n := other.Count(); n != 0 {
			t.Errorf("probes followed %d redirects", n)
		}
	})
}

// Backends that serve by name are probed by their own name, unless told otherwise
// (apache/apisix#4906, envoyproxy/gateway PR#6118, caddyserver/caddy PR#6440).
func TestProbeHostIsTheTargets(t *testing.T) {
	named := func(name string) lbtest.Behavior {
		right := func(r *http.Request) bool { return r.Host == name }
		return lbtest.When(right, lbtest.Answer(), lbtest.AnswerStatus(421, ""))
	}
	start := func(t *testing.T, host, checkHost string) (*rig, *lb.Pool) {
		r := newBackends(t, 2)
		var targets []lb.Target
		for _, b := range r.backends {
			_, port, _ := net.SplitHostPort(b.Addr())
			name := b.Name() + ".test"
			if host == "" {
				b.SetProbe(probePath, named(name+":"+port))
			} else {
				b.SetProbe(probePath, named(host))
			}
			targets = append(targets, lb.Target{Name: b.Name(), URL: "http://" + name + ":" + port, Host: host})
		}
		dial := r.net.Transport()
		dial.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			host, port, _ := net.SplitHostPort(addr)
			return r.net.DialContext(ctx, network, net.JoinHostPort(strings.TrimSuffix(host, ".test"), port))
		}
		return r, newPool(t, targets, lb.WithTransport(dial), lb.WithHealthCheck(lb.HealthCheck{Path: probePath, Host: checkHost}))
	}
	for _, c := range []struct{ name, targetHost, checkHost, want string }{
		{"each by the host of its URL", "", "", "healthy healthy"},
		{"by Target.Host", "shop.test", "", "healthy healthy"},
		{"by HealthCheck.Host before it", "shop.test", "other.test", "unhealthy unhealthy"},
	} {
		bubble(t, c.name, func(t *testing.T) {
			r, pool := start(t, c.targetHost, c.checkHost)
			r.after(time.Second)
			if got := fmt.Sprint(pool.Backends()[0].Status(), " ", pool.Backends()[1].Status()); got != c.want {
				t.Errorf("states = %s (%s), want %s", got, pool.Backends()[0].Status().Reason, c.want)
			}
			pool.Close()
		})
	}
}

// The probe may have a port of its own, which decides alone, and traffic never gets
// there nor probes to the port of the traffic (caddyserver/caddy#7544,
// caddyserver/caddy PR#7533).
func TestProbeOnAnotherPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBackends(t, 1)
		traffic := r.backends[0]
		host, _, _ := net.SplitHostPort(traffic.Addr())
		l, err := r.net.Listen(net.JoinHostPort(host, "9999"))
		if err != nil {
			t.Fatal(err)
		}
		var probes, others atomic.Int64
		admin := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/base/healthz" && r.Host == host+":9999" {
				probes.Add(1)
				return
			}
			others.Add(1)
		})}
		go admin.Serve(l)
		check := everySecond()
		check.Port = 9999
		pool := newPool(t, []lb.Target{{Name: "a", URL: traffic.URL() + "/base"}}, over(r.net), lb.WithHealthCheck(check))
		defer pool.Close()
		r.after(10 * time.Second)
		if st := pool.Backends()[0].Status(); st.Health != lb.HealthHealthy || probes.Load() < 8 {
			t.Errorf("health = %v (%s) after %d probes", st.Health, st.Reason, probes.Load())
		}
		resp := serve(pool, probePath)
		if resp.Code != 200 || others.Load() != 0 || traffic.ProbeCount() != 0 || traffic.Count() != 1 {
			t.Errorf("request: %d; on the probe's port: %d others; on the traffic's: %d probes, %d requests",
				resp.Code, others.Load(), traffic.ProbeCount(), traffic.Count())
		}
		admin.Close() // the probe's port alone
		r.after(5 * time.Second)
		if st := pool.Backends()[0].Status(); st.Health != lb.HealthUnhealthy {
			t.Errorf("health = %v (%s) without the probe's port, want unhealthy", st.Health, st.Reason)
		}
	})
}

// A HealthURL is asked as it stands, for one target.
func TestHealthURL(t *testing.T) {
	for _, c := range []struct{ name, url, want string }{
		{"with a path, in place of the check's", "http://{addr}/status?full=1", "/status?full=1"},
		{"without one, for the check's", "http://{addr}", probePath},
		{"with a slash alone, the same", "http://{addr}/", probePath},
		{"with a query alone, for the root", "http://{addr}?x=1", "/?x=1"},
		{"with a slash at its end, as it stands", "http://{addr}/a%2Fb/", "/a%2Fb/"},
	} {
		bubble(t, c.name, func(t *testing.T) {
			r := newBackends(t, 1)
			health := r.net.NewBackend(t, "sidecar")
			health.SetProbe(probePath, lbtest.Answer())
			target := lb.Target{Name: "a", URL: r.backends[0].URL() + "/prefix", Host: "shop.test", HealthURL: strings.ReplaceAll(c.url, "{addr}", health.Addr())}
			check := everySecond()
			check.Interval, check.FastInterval = time.Hour, time.Hour // the second probe may come soon after the first
			pool := newPool(t, []lb.Target{target}, over(r.net), lb.WithHealthCheck(check))
			defer pool.Close()
			r.after(time.Millisecond)
			asked := append(health.Received(), health.Probes()...)
			if len(asked) != 1 || asked[0].Target != c.want || asked[0].Host != health.Addr() {
				t.Errorf("asked %+v, want %s of %s", asked, c.want, health.Addr())
			}
		})
	}
}

// A change of HealthURL keeps the backend, and the first verdict from there decides.
func TestChangedHealthURLDecidesAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newProbedRig(t, 1, everySecond())
		r.after(3 * time.Second)
		r.wantStates("healthy")
		a := r.pool.Backends()[0]
		r.fail(0)
		target := lb.Target{Name: "a", URL: a.URL(), HealthURL: a.URL() + probePath + "?v=2"}
		if err := r.pool.SetTargets([]lb.Target{target}); err != nil {
			t.Fatal(err)
		}
		r.after(time.Millisecond)
		if r.pool.Backends()[0] != a || a.Status().Health != lb.HealthUnhealthy {
			t.Errorf("backend kept: %t, health %v, want unhealthy at once", r.pool.Backends()[0] == a, a.Status().Health)
		}
		r.backends[0].Set(lbtest.AnswerStatus(404, ""))
		target.HealthURL = ""
		r.pass(0)
		if err := r.pool.SetTargets([]lb.Target{target}); err != nil {
			t.Fatal(err)
		}
		r.after(time.Millisecond)
		r.wantStates("healthy")
	})
}

// sniServer serves TLS on l with a certificate for example.com alone and refuses
// other names. It counts the handshakes and what was not TLS.
type sniServer struct {
	right, wrong, plain atomic.Int64
	http                *http.Server
}

// exampleCertificate returns net/http's certificate for example.com, and whom to
// trust for it.
func exampleCertificate() ([]tls.Certificate, *x509.CertPool) {
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	trust := x509.NewCertPool()
	trust.AddCert(s.Certificate())
	return s.TLS.Certificates, trust
}

func newSNIServer(l net.Listener, certificates []tls.Certificate) *sniServer {
	s := new(sniServer)
	config := &tls.Config{
		Certificates: certificates,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			if hello.ServerName != "example.com" {
				s.wrong.Add(1)
				return nil, errors.New("unknown name")
			}
			s.right.Add(1)
			return nil, nil
		},
	}
	s.http = &http.Server{
		Handler:  http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "ok") }),
		ErrorLog: log.New(io.Discard, "", 0),
	}
	go s.http.Serve(tls.NewListener(sniffer{l, &s.plain}, config))
	return s
}

// sniffer counts connections whose first byte is not that of a TLS handshake.
type sniffer struct {
	net.Listener
	plain *atomic.Int64
}

func (s sniffer) Accept() (net.Conn, error) {
	nc, err := s.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &sniffed{Conn: nc, plain: s.plain}, nil
}

type sniffed struct {
	net.Conn
	plain *atomic.Int64
	seen  bool
}

func (s *sniffed) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	if n > 0 && !s.seen {
		s.seen = true
		if p[0] != 22 {
			s.plain.Add(1)
		}
	}
	return n, err
}

// Probes of an https target go over TLS with the settings of traffic: its authority,
// its server name (caddyserver/caddy#3450, caddyserver/caddy PR#5591,
// six-group/haproxy-operator#46).
func TestProbeUsesTheTLSOfTraffic(t *testing.T) {
	certificates, trust := exampleCertificate()
	for _, c := range []struct {
		name, path, serverName string
		trusted                bool
		want                   string
	}{
		{"HTTP check", probePath, "example.com", true, "healthy"},
		{"connect check makes a handshake", "", "example.com", true, "healthy"},
		{"HTTP check, wrong name", probePath, "", true, "unhealthy"},
		{"connect check, wrong name", "", "other.test", true, "unhealthy"},
		{"HTTP check, unknown authority", probePath, "example.com", false, "unhealthy"},
		{"connect check, unknown authority", "", "example.com", false, "unhealthy"},
	} {
		bubble(t, c.name, func(t *testing.T) {
			network := lbtest.NewNetwork()
			l, err := network.Listen("secure.test:443")
			if err != nil {
				t.Fatal(err)
			}
			s := newSNIServer(l, certificates)
			template := network.Transport()
			template.TLSClientConfig = &tls.Config{ServerName: c.serverName}
			if c.trusted {
				template.TLSClientConfig.RootCAs = trust
			}
			pool := newPool(t, []lb.Target{{Name: "a", URL: "https://secure.test"}}, lb.WithTransport(template),
				lb.WithHealthCheck(lb.HealthCheck{Path: c.path}))
			advance(time.Minute)
			if st := pool.Backends()[0].Status(); st.String() != c.want {
				t.Errorf("state = %s (%s), want %s", st, st.Reason, c.want)
			}
			if n := s.plain.Load(); n != 0 {
				t.Errorf("%d probes came in plain text", n)
			}
			if c.want == "healthy" {
				if s.right.Load() < 10 || s.wrong.Load() != 0 {
					t.Errorf("handshakes: %d with the right name, %d with another", s.right.Load(), s.wrong.Load())
				}
				if got := serve(pool, "/"); got.Code != 200 {
					t.Errorf("traffic got %d", got.Code)
				}
			}
			pool.Close()
			s.http.Close()
			advance(time.Second)
		})
	}
}

// Without a path a connection is all that is asked for: nothing is sent, and one that
// is refused, or that hangs, fails.
func TestConnectCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		check := everySecond()
		check.Path = ""
		r := newProbedRig(t, 1, check)
		r.after(10 * time.Second)
		r.wantStates("healthy")
		if n := r.backends[0].TotalConns(); n < 8 || r.count() != 0 || r.backends[0].ProbeCount() != 0 {
			t.Errorf("connections = %d, requests = %d, want a connection each second and no request", n, r.count())
		}
		if n := r.backends[0].OpenConns(); n != 0 {
			t.Errorf("open connections = %d, want 0", n)
		}
		r.backends[0].Set(lbtest.Refuse())
		r.after(4 * time.Second)
		r.wantStates("unhealthy")
		r.backends[0].Set(lbtest.Answer())
		r.after(3 * time.Second)
		r.wantStates("healthy")
		r.net.Blackhole(r.backends[0].Addr(), true)
		r.after(5 * time.Second)
		r.wantStates("unhealthy")
	})
}

// Probes have connections of their own, one at a time, whatever they are answered,
// and leave those of the traffic alone (fatedier/frp PR#1156, djylb/nps PR#320,
// google/inverting-proxy PR#59, traefik/traefik#6885).
func TestProbesLeaveConnectionsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newProbedRig(t, 1, everySecond())
		b := r.backends[0]
		b.SetProbe(probePath, lbtest.AnswerStatus(200, text(1<<20)))
		for range 300 {
			r.wantStatus(r.must("GET", "", nil), 200)
			r.after(time.Second)
			if n := b.OpenConns(); n > 2 {
				t.Fatalf("open connections = %d, want at most one of the traffic and one of a probe", n)
			}
		}
		conns := map[int]bool{}
		for _, got := range b.Received() {
			conns[got.Conn] = true
		}
		if n := b.ProbeCount(); n < 280 || len(conns) != 1 {
			t.Errorf("probes = %d, connections of the traffic = %d; want about 300 and 1", n, len(conns))
		}
		r.wantStates("healthy")
	})
}

// A transport that is not net/http's carries the probes too.
func TestProbesOverAnotherRoundTripper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var probes atomic.Int64
		rt := roundTripperFunc(func(r *http.Request) (*http.Response, error) {
			status := 200
			if r.URL.Path == probePath {
				probes.Add(1)
				status = 503
			}
			return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader("x")), Request: r}, nil
		})
		pool := newPool(t, lb.Targets("http://a"), lb.WithTransport(rt), lb.WithHealthCheck(everySecond()))
		advance(10 * time.Second)
		if st := pool.Backends()[0].Status(); probes.Load() < 8 || st.Health != lb.HealthUnhealthy {
			t.Errorf("probes = %d, health %v, want one each second and unhealthy", probes.Load(), st.Health)
		}
		pool.Close()
	})
}
