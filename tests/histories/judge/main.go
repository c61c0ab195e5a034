// Command judge tells whether histories of memwal are linearizable, by Porcupine.
//
// judge [-timeout 60s] [-html DIR] [-all] FILE... reads the files of one history and prints a JSON object for each key and
// each region: how many operations, of which reads at which level, and Porcupine's verdict. Exit code 0: all are
// linearizable; 1: one is not; 3: one took longer than the timeout, and none was found wrong; 2: not a history.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// verdict is what is printed of a partition.
type verdict struct {
	Partition  string         `json:"partition"`
	Verdict    string         `json:"verdict"` // Ok, Illegal or Unknown, as Porcupine says
	Operations int            `json:"operations"`
	Reads      map[string]int `json:"reads"` // by level
	Unknown    int            `json:"unknown"`
	LeftOut    int            `json:"left_out"`
	Seconds    float64        `json:"seconds"`
	Why        string         `json:"why,omitempty"`
	HTML       string         `json:"html,omitempty"`
}

func main() {
	timeout := flag.Duration("timeout", time.Minute, "longest search in a partition")
	html := flag.String("html", "", "directory for Porcupine's picture of each partition that is not linearizable")
	all := flag.Bool("all", false, "order every operation whose outcome is unknown, as if nobody's reads told about it")
	flag.Parse()
	ops, err := readHistory(flag.Args())
	if err == nil && flag.NArg() == 0 {
		err = fmt.Errorf("no file given")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
		os.Exit(2)
	}
	worst := 0
	for _, part := range partitions(ops) {
		said := judge(part, *all, *timeout, *html)
		printed, _ := json.Marshal(said)
		fmt.Println(string(printed))
		switch {
		case said.Verdict == string(porcupine.Illegal):
			worst = 1
		case said.Verdict == string(porcupine.Unknown) && worst == 0:
			worst = 3
		}
	}
	os.Exit(worst)
}

func judge(part *partition, all bool, timeout time.Duration, html string) verdict {
	byID, reads := map[string]*op{}, map[string]int{}
	for _, each := range part.ops {
		byID[each.id] = each
		if each.reads() {
			reads[each.level]++
		}
	}
	began, steps, specification := time.Now(), part.steps(all), newModel(byID).porcupine()
	result := porcupine.CheckOperationsTimeout(specification, steps, timeout)
	said := verdict{
		Partition: part.name, Verdict: string(result), Operations: len(part.ops), Reads: reads,
		Unknown: part.open, LeftOut: part.leftOut, Seconds: time.Since(began).Seconds(),
	}
	if result == porcupine.Ok {
		return said
	}
	// Again, to see how far it gets, which takes longer; with a new model, since the first search may not have ended.
	specification = newModel(byID).porcupine()
	_, info := porcupine.CheckOperationsVerbose(specification, steps, timeout)
	said.Why = part.why(specification, steps, info)
	if html != "" {
		said.HTML = filepath.Join(html, strings.NewReplacer(", ", "-", " ", "-").Replace(part.name)+".html")
		if err := porcupine.VisualizePath(specification, info, said.HTML); err != nil {
			fmt.Fprintln(os.Stderr, "judge:", err)
			os.Exit(2)
		}
	}
	return said
}

// why tells how far the longest order of the steps gets, which steps none can put next, and what came before them.
func (p *partition) why(specification porcupine.Model, steps []porcupine.Operation, info porcupine.LinearizationInfo) string {
	var longest []porcupine.Operation
	for _, order := range info.PartialLinearizationsOperations()[0] {
		if len(order) > len(longest) {
			longest = order
		}
	}
	placed, now := map[step]bool{}, specification.Init()
	for _, each := range longest {
		placed[each.Input.(step)] = true
		_, now = specification.Step(now, each.Input, nil)
	}
	first := int64(forever) // the return before which the next step is invoked
	for _, each := range steps {
		if !placed[each.Input.(step)] {
			first = min(first, each.Return)
		}
	}
	var next []string
	for _, each := range steps {
		if !placed[each.Input.(step)] && each.Call <= first && each.Return != forever {
			next = append(next, during(each.Input.(step), each.Call, each.Return))
		}
	}
	return fmt.Sprintf("%d of %d steps can be ordered; the rows are then %v, and none of these can be next: %s; before: %s",
		len(longest), len(steps), now, strings.Join(next[:min(len(next), 6)], "; "), strings.Join(p.before(first), "; "))
}

// before returns the last writes, and the last reads, that were invoked before `first`, in the order of their calls; the
// writes that were surely not applied among them, since one that was applied all the same is what to look for.
func (p *partition) before(first int64) []string {
	var last []*op
	reads, writes := 12, 12
	all := append(append([]*op{}, p.ops...), p.failed...)
	sort.Slice(all, func(i, j int) bool { return all[i].call > all[j].call })
	for _, each := range all {
		left := &writes
		if each.reads() {
			left = &reads
		}
		if each.call <= first && *left > 0 {
			*left--
			last = append(last, each)
		}
	}
	slices.Reverse(last)
	said := make([]string, len(last))
	for i, each := range last {
		said[i] = during(step{each, ""}, each.call, each.ret)
	}
	return said
}

// during is what was done, and from when to when; an operation whose outcome is unknown has no end.
func during(what step, call, ret int64) string {
	if ret == forever {
		return fmt.Sprintf("%s [%d, ]", what, call)
	}
	return fmt.Sprintf("%s [%d, %d]", what, call, ret)
}
