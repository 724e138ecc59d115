//go:build unix

package lb_test

import (
	"context"
	"os"
	"syscall"
	"testing"
	"time"

	"example.com/lb"
)

// A look-up that fails because files have run out here is nobody's failure. The
// resolver hides why.
func TestResolverWithoutFilesBlamesNobody(t *testing.T) {
	if err := withoutFiles(t, func() {
		probed := make(chan struct{}, 1)
		ask := lb.CheckerFunc(func(ctx context.Context, p lb.ProbeTarget) (lb.Verdict, error) {
			select {
			case probed <- struct{}{}:
			case <-ctx.Done():
			}
			c, err := p.Dial(ctx)
			if err != nil {
				return 0, err
			}
			return lb.VerdictHealthy, c.Close()
		})
		pool := newPool(t, lb.Targets("http://backend.internal"), lb.WithChecker(ask), lb.WithHealthCheck(lb.HealthCheck{Interval: time.Minute, FastInterval: time.Millisecond}))
		defer pool.Close()
		<-probed
		<-probed // so that the first one is known, and one more may be
		<-probed
		if b := pool.Stats().Backends[0]; b.State != "unknown" || b.Probe.Verdict != "none" || b.Probe.Failures != 0 {
			t.Errorf("backend = %+v, probe %+v", b, b.Probe)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// withoutFiles calls f while this process cannot open any more files.
func withoutFiles(t *testing.T, f func()) error {
	t.Helper()
	restore, err := limitFiles(64)
	if err != nil {
		return err
	}
	defer restore()
	var files []*os.File
	defer func() {
		for _, file := range files {
			file.Close()
		}
	}()
	for {
		file, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		files = append(files, file)
	}
	f()
	return nil
}

// limitFiles lowers the number of files that this process may have open.
func limitFiles(n uint64) (restore func(), err error) {
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		return nil, err
	}
	less := was
	less.Cur = n
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &less); err != nil {
		return nil, err
	}
	return func() { _ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was) }, nil // as it was: cannot fail
}
