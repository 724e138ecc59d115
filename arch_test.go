package lb_test

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

// aPackage is what these tests ask of the go command about a package.
type aPackage struct {
	ImportPath string
	Name       string
	Doc        string
	Imports    []string
	Module     struct{ Path string }
}

// rel returns path below the module, "" for the root package, and whether path is
// in the module at all.
func (p *aPackage) rel(path string) (rel string, ours bool) {
	if path == p.Module.Path {
		return "", true
	}
	return strings.CutPrefix(path, p.Module.Path+"/")
}

func packages(t *testing.T) []aPackage {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(goCommand(t, "list", "-json=ImportPath,Name,Doc,Imports,Module", "./...")))
	var list []aPackage
	for {
		var p aPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
}

func goCommand(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("go", args...).Output()
	if ee, ok := errors.AsType[*exec.ExitError](err); ok {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, ee.Stderr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestImportsOnlyGoDown holds the picture in the README to the code: examples, then
// packages beside the root, then the root, then internal, then the standard
// library. Packages of one level do not import one another.
func TestImportsOnlyGoDown(t *testing.T) {
	for _, p := range packages(t) {
		from, _ := p.rel(p.ImportPath)
		for _, path := range p.Imports {
			to, ours := p.rel(path)
			if !mayImport(from, path, to, ours) {
				t.Errorf("%s must not import %s", p.ImportPath, path)
			}
		}
	}
}

// mayImport tells whether from may import path; to is path below the module, if it
// is ours.
func mayImport(from, path, to string, ours bool) bool {
	level := func(rel string) string {
		first, _, _ := strings.Cut(rel, "/")
		return first
	}
	switch {
	case !ours:
		return !strings.Contains(level(path), ".") // the standard library
	case level(from) == "examples":
		return level(to) != "internal" && level(to) != "examples" // no back doors
	case from == "":
		return level(to) == "internal"
	case level(from) != "internal":
		return to == "" || level(to) == "internal"
	}
	return false
}

func TestMayImportKnowsTheDirections(t *testing.T) {
	for _, c := range []struct {
		name, from, path, to string
		ours, want           bool
	}{
		{name: "the root may use the standard library", from: "", path: "net/http", want: true},
		{name: "the root may use internal", from: "", to: "internal/ring", ours: true, want: true},
		{name: "the root may not use what is beside it", from: "", to: "lbtest", ours: true},
		{name: "nobody may use other modules", from: "internal/ring", path: "golang.org/x/net/http2"},
		{name: "what is beside the root may use it", from: "lbtest", to: "", ours: true, want: true},
		{name: "what is beside the root may not use its like", from: "lbtest", to: "lbadmin", ours: true},
		{name: "internal may not use the root", from: "internal/ring", to: "", ours: true},
		{name: "an example may use the root", from: "examples/x", to: "", ours: true, want: true},
		{name: "an example has no back door", from: "examples/x", to: "internal/ring", ours: true},
		{name: "an example stands alone", from: "examples/x", to: "examples/y", ours: true},
	} {
		if got := mayImport(c.from, c.path, c.to, c.ours); got != c.want {
			t.Errorf("%s: mayImport(%q, %q, %q, %v) = %v, want %v", c.name, c.from, c.path, c.to, c.ours, got, c.want)
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, p := range packages(t) {
		rel, _ := p.rel(p.ImportPath)
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + rel[strings.LastIndexByte(rel, '/')+1:] + " "
		}
		if !strings.HasPrefix(p.Doc, want) {
			t.Errorf("%s: its comment begins %q, want %q", p.ImportPath, p.Doc, want)
		}
	}
}

func TestModuleRequiresNothing(t *testing.T) {
	var mod struct {
		Require []struct{ Path, Version string }
		Replace []struct{ Old struct{ Path string } }
	}
	if err := json.Unmarshal([]byte(goCommand(t, "mod", "edit", "-json")), &mod); err != nil {
		t.Fatal(err)
	}
	if len(mod.Require) > 0 || len(mod.Replace) > 0 {
		t.Errorf("go.mod has require %v, replace %v, want none", mod.Require, mod.Replace)
	}
}
