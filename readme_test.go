package lb_test

import (
	"encoding/json"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"example.com/lb"
	"example.com/lb/lbtest"
)

// byTenant gives tenants backends of their own and picks the least busy of them.
func byTenant(r *http.Request, candidates []*lb.Backend) (best *lb.Backend) {
	for _, b := range candidates {
		tenant, _ := b.Metadata("tenant")
		if tenant == r.Header.Get("Tenant") && (best == nil || b.InFlight() < best.InFlight()) {
			best = b
		}
	}
	return best // nil if the tenant has none, which is answered with 503
}

func TestByTenantKeepsTheContract(t *testing.T) {
	lbtest.RunBalancer(t, func() lb.Balancer { return lb.BalancerFunc(byTenant) })
}

// statsHandler serves the counters of pool as JSON.
func statsHandler(pool *lb.Pool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(pool.Stats()); err != nil {
			log.Print(err)
		}
	})
}

func TestStatsHandlerServesWhatStatsHas(t *testing.T) {
	pool, err := lb.New(lb.Targets("http://a.test"), lb.WithName("shop"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	w := httptest.NewRecorder()
	statsHandler(pool).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", http.NoBody))
	var got lb.Stats
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || got.Name != "shop" || len(got.Backends) != 1 {
		t.Errorf("statsHandler served %s (%v), want the Stats of shop with one backend", w.Body, err)
	}
}

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// readmeBlocks returns the blocks of README.md in the given language.
func readmeBlocks(t *testing.T, language string) (blocks []string) {
	t.Helper()
	for _, m := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(readme(t), -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

func isProgram(block string) bool { return strings.HasPrefix(block, "package main\n") }

// TestReadmeCodeIsInTheRepository holds each piece of Go in README.md to a Go file,
// which the compiler and the tests have seen. The complete program is built by
// TestReadmeProgramBuildsInAnotherModule.
func TestReadmeCodeIsInTheRepository(t *testing.T) {
	var code strings.Builder
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		text, err := os.ReadFile(path)
		code.Write(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	blocks := readmeBlocks(t, "go")
	if len(blocks) < 3 {
		t.Fatalf("README.md has %d blocks of Go, want 3 or more: are they found?", len(blocks))
	}
	for _, block := range blocks {
		if !isProgram(block) && !strings.Contains(code.String(), block) {
			t.Errorf("this block of README.md is in no Go file:\n%s", block)
		}
	}
}

// TestReadmeProgramBuildsInAnotherModule follows the README's "Get it" in an empty
// module, without a network.
func TestReadmeProgramBuildsInAnotherModule(t *testing.T) {
	root, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, block := range readmeBlocks(t, "go") {
		if !isProgram(block) {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(block), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	ran := 0
	for line := range strings.Lines(strings.Join(readmeBlocks(t, "sh"), "")) {
		line, _, _ = strings.Cut(line, " #")
		args := strings.Fields(line)
		if len(args) < 2 || args[0] != "go" || (args[1] != "mod" && args[1] != "build") {
			continue
		}
		ran++
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "/path/to/lb", root)
		}
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	if ran != 4 {
		t.Errorf("ran %d commands of README.md, want 4: init, replace, tidy, build", ran)
	}
}

// TestReadmePathsExist holds the map of the repository and the links to what there
// is.
func TestReadmePathsExist(t *testing.T) {
	var paths []string
	for _, m := range regexp.MustCompile(`\]\(([^)#:]+)\)`).FindAllStringSubmatch(readme(t), -1) {
		paths = append(paths, m[1])
	}
	for _, block := range readmeBlocks(t, "text") {
		for _, m := range regexp.MustCompile(`(?m)^([\w./]*(?:\.go|/|run)) `).FindAllStringSubmatch(block, -1) {
			paths = append(paths, m[1])
		}
	}
	for _, m := range regexp.MustCompile(`go run (\./\S+)`).FindAllStringSubmatch(readme(t), -1) {
		paths = append(paths, m[1])
	}
	if len(paths) < 20 {
		t.Fatalf("found %d paths in README.md, want 20 or more: are they found?", len(paths))
	}
	for _, path := range paths {
		if _, err := os.Stat(filepath.FromSlash(path)); err != nil {
			t.Errorf("README.md speaks of %s: %v", path, err)
		}
	}
}

// TestReadmeExamplesExist holds the examples that README.md names to the code.
func TestReadmeExamplesExist(t *testing.T) {
	files, err := filepath.Glob("example*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for _, file := range files {
		part, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, part...)
	}
	names := regexp.MustCompile("`(Example\\w*)`").FindAllStringSubmatch(readme(t), -1)
	if len(names) < 10 {
		t.Fatalf("found %d examples in README.md, want 10 or more: are they found?", len(names))
	}
	for _, m := range names {
		if !strings.Contains(string(text), "func "+m[1]+"()") {
			t.Errorf("README.md names %s, which no file of examples has", m[1])
		}
	}
}
