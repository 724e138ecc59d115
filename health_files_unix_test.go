//go:build unix

package lb_test

import (
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
		pool := newPool(t, lb.Targets("http://backend.internal"), lb.WithHealthCheck(lb.HealthCheck{Path: "/"}))
		defer pool.Close()
		for pool.Stats().Backends[0].Probe == nil {
			time.Sleep(time.Millisecond)
		}
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
