// Model: what one owner after the other does to the rows of a region, as Porcupine's sequential specification.
//
// The state is what the owner shows (`shown`), and the writes that are in the log and that it does not show yet
// (`ahead`), in order. Storage shows both. A write is in the log first and shown then, both between its invocation and
// its return; so, where reads from storage are judged too, it is two steps of the same interval, which must come in the
// order of the log. Without reads from storage nobody can see the difference, and a write is one step.

package main

import (
	"fmt"
	"maps"
	"sort"
	"strings"

	"github.com/anishathalye/porcupine"
)

// step is what Porcupine orders: an operation, or one of the two halves of a write.
type step struct {
	*op
	half string // "logged", "shown", or "" for the whole
}

// view is a set of rows; there is one of each set, so that views are compared by their address.
type view struct {
	text string // "key=value@version;" in the order of the keys
	rows map[string]row
}

type row struct{ value, version int64 }

type state struct {
	shown *view
	ahead string // of each write in the log that is not shown yet: its id and "\n"
	// The same of each write whose first half changed nothing, and whose second half is to come.
	nothing string
}

// model has the operations of a partition by id, and remembers what it has worked out.
type model struct {
	ops     map[string]*op
	views   map[string]*view
	changes map[write]change
	logs    map[state]*view
}

type write struct {
	before *view
	id     string
}

type change struct {
	after *view
	holds bool
}

func newModel(ops map[string]*op) *model {
	return &model{ops, map[string]*view{}, map[write]change{}, map[state]*view{}}
}

// porcupine is the specification for Porcupine, which uses it in one goroutine.
func (m *model) porcupine() porcupine.Model {
	return porcupine.Model{
		Init: func() interface{} { return state{shown: m.view(map[string]row{})} },
		Step: func(before, input, _ interface{}) (bool, interface{}) {
			now, what := before.(state), input.(step)
			switch {
			case what.stored():
				return m.logged(now).shows(what.op), now
			case what.reads():
				return now.shown.shows(what.op), now
			case what.half == "shown":
				return m.show(now, what.op)
			}
			return m.write(now, what)
		},
		DescribeOperation: func(input, _ interface{}) string { return input.(step).String() },
		DescribeState:     func(now interface{}) string { return now.(state).String() },
	}
}

// view returns the one view that has these rows.
func (m *model) view(rows map[string]row) *view {
	keys := make([]string, 0, len(rows))
	for key := range rows {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	var text strings.Builder
	for _, key := range keys {
		fmt.Fprintf(&text, "%s=%d@%d;", key, rows[key].value, rows[key].version)
	}
	if m.views[text.String()] == nil {
		m.views[text.String()] = &view{text.String(), rows}
	}
	return m.views[text.String()]
}

// changed returns the rows of v after the write o, and whether its condition holds.
func (m *model) changed(v *view, o *op) (*view, bool) {
	known, done := m.changes[write{v, o.id}]
	if !done {
		known = change{v, v.meets(o)}
		if known.holds {
			rows := maps.Clone(v.rows)
			for _, key := range o.keys {
				delete(rows, key)
				if value, put := o.rows[key]; put && o.kind != "compare" {
					rows[key] = row{value, o.version}
				}
			}
			known.after = m.view(rows)
		}
		m.changes[write{v, o.id}] = known
	}
	return known.after, known.holds
}

// meets tells whether the condition of o holds; one that has none is always met.
func (v *view) meets(o *op) bool {
	now, there := v.rows[o.keys[0]]
	switch o.kind {
	case "insert":
		return !there
	case "version":
		return !there || now.version <= o.version
	case "compare":
		return there && now.value == o.rows[o.keys[0]]
	}
	return true
}

// shows tells whether a read of o's keys in v finds what o found.
func (v *view) shows(o *op) bool {
	seen := 0
	for _, key := range o.keys {
		now, there := v.rows[key]
		value, found := o.found[key]
		if there != found || there && now.value != value {
			return false
		}
		if found {
			seen++
		}
	}
	return seen == len(o.found)
}

// logged is what storage shows.
func (m *model) logged(s state) *view {
	if s.ahead == "" {
		return s.shown
	}
	if m.logs[s] == nil {
		all := s.shown
		for _, id := range strings.Fields(s.ahead) {
			all, _ = m.changed(all, m.ops[id])
		}
		m.logs[s] = all
	}
	return m.logs[s]
}

// write is a write's whole, or its first half.
func (m *model) write(s state, what step) (bool, state) {
	after, holds := m.changed(m.logged(s), what.op)
	switch {
	case what.applied != nil && *what.applied == 0:
		// A delete by filter first looks for rows at what the owner shows.
		return !holds || what.kind == "compare" && !s.shown.meets(what.op), s
	case what.applied != nil && !holds:
		return false, s
	case !holds && what.half == "":
		return true, s
	case !holds:
		return true, state{s.shown, s.ahead, s.nothing + what.id + "\n"}
	case what.half == "":
		return true, state{shown: after}
	}
	return true, state{s.shown, s.ahead + what.id + "\n", s.nothing}
}

// show is the second half of a write: the owner shows it, which is the next in the log.
func (m *model) show(s state, o *op) (bool, state) {
	if rest, next := strings.CutPrefix(s.ahead, o.id+"\n"); next {
		after, _ := m.changed(s.shown, o)
		return true, state{after, rest, s.nothing}
	}
	before, rest, nothing := strings.Cut("\n"+s.nothing, "\n"+o.id+"\n")
	return nothing, state{s.shown, s.ahead, strings.TrimPrefix(before+"\n"+rest, "\n")}
}

func (s state) String() string {
	text := "{" + strings.ReplaceAll(s.shown.text, "@0;", ";") + "}"
	if s.ahead != "" {
		text += ", in the log only: " + strings.Join(strings.Fields(s.ahead), " ")
	}
	return text
}

func (s step) String() string {
	what := map[string]string{"logged": " (in the log)", "shown": " (shown)"}[s.half]
	switch {
	case s.reads():
		return fmt.Sprintf("%s read of %s at %s -> %v", s.client, strings.Join(s.keys, ","), s.level, s.found)
	case s.kind == "delete":
		return fmt.Sprintf("%s delete of %s -> %s%s", s.client, strings.Join(s.keys, ","), s.told(), what)
	case s.kind == "version":
		return fmt.Sprintf("%s put %v of version %d -> %s%s", s.client, s.rows, s.version, s.told(), what)
	}
	return fmt.Sprintf("%s %s %v -> %s%s", s.client, s.kind, s.rows, s.told(), what)
}

func (o *op) told() string {
	switch {
	case o.reason != "":
		return fmt.Sprintf("%s (%s)", o.outcome, o.reason)
	case o.outcome != ok:
		return unknown
	case o.applied != nil:
		return fmt.Sprintf("applied %d", *o.applied)
	}
	return ok
}
