// render writes what `helm template` would, of one chart and a few values files, for machines that have no helm: it is
// helm's own engine (text/template with sprig, as Debian packages both) with the six functions that helm adds and our
// chart uses. It knows no dependencies, hooks, `lookup` or `.Files`; a chart that uses those fails here.
//
//	GO111MODULE=off GOPATH=/usr/share/gocode go build render.go;  ./render CHART RELEASE NAMESPACE [VALUES.yaml ...]
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type table = map[string]interface{}

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: render CHART RELEASE NAMESPACE [VALUES.yaml ...]")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(chart, release, namespace string, more []string) error {
	about := table{}
	if err := read(filepath.Join(chart, "Chart.yaml"), about); err != nil {
		return err
	}
	values := table{}
	for _, name := range append([]string{filepath.Join(chart, "values.yaml")}, more...) {
		layer := table{}
		if err := read(name, layer); err != nil {
			return err
		}
		values = over(values, layer)
	}
	base := fmt.Sprint(about["name"], "/templates")
	top := table{
		"Values":   values,
		"Chart":    capital(about),
		"Release":  table{"Name": release, "Namespace": namespace, "Service": "Helm", "IsInstall": true, "Revision": 1},
		"Template": table{"BasePath": base},
	}
	all := template.New("chart").Option("missingkey=zero")
	all.Funcs(functions(all))
	names, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil {
		return err
	}
	sort.Strings(names)
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if _, err := all.New(base + "/" + filepath.Base(name)).Parse(string(text)); err != nil {
			return err
		}
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		var out bytes.Buffer
		path := base + "/" + filepath.Base(name)
		if err := all.ExecuteTemplate(&out, path, top); err != nil {
			return err
		}
		// as helm does: a key that is not there is written as nothing
		text := strings.ReplaceAll(out.String(), "<no value>", "")
		if strings.TrimSpace(text) != "" {
			fmt.Printf("---\n# Source: %s\n%s\n", path, strings.TrimSpace(text))
		}
	}
	return nil
}

func functions(all *template.Template) template.FuncMap {
	found := sprig.TxtFuncMap()
	delete(found, "env")
	delete(found, "expandenv")
	found["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	found["required"] = func(why string, value interface{}) (interface{}, error) {
		if text, ok := value.(string); value == nil || ok && text == "" {
			return nil, errors.New(why)
		}
		return value, nil
	}
	found["toYaml"] = func(value interface{}) (string, error) {
		var out bytes.Buffer
		writer := yaml.NewEncoder(&out)
		writer.SetIndent(2)
		err := writer.Encode(value)
		return strings.TrimSuffix(out.String(), "\n"), err
	}
	return found
}

func read(name string, into table) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	return yaml.Unmarshal(text, &into)
}

// over lays one table of values on another, key by key; a list or a number replaces.
func over(under, layer table) table {
	for key, value := range layer {
		below, isTable := under[key].(table)
		if above, ok := value.(table); ok && isTable {
			value = over(below, above)
		}
		under[key] = value
	}
	return under
}

// capital gives Chart.yaml's keys their names in templates: .Chart.AppVersion.
func capital(about table) table {
	found := table{}
	for key, value := range about {
		found[strings.ToUpper(key[:1])+key[1:]] = value
	}
	return found
}
