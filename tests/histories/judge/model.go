// Model: what one owner after the other does to the rows of a region, as Porcupine's sequential specification.
//
// The state is what the owner shows (`shown`), and the writes that are in the log and that it does not show yet
// (`ahead`), in order. Storage shows both. A write is in the log first and shown then, both between its invocation and
// its return; so, where reads from storage are judged too, it is two steps of the same interval, which must come in the
// order of the log. Without reads from storage nobody can see the difference, and a write is one step.

package main

import (
	"fmt"
	"sort"
	"strconv"
	"strings"

	"github.com/anishathalye/porcupine"
)

// step is what Porcupine orders: an operation, or one of the two halves of a write.
type step struct {
	*op
	half string // "logged", "shown", or "" for the whole
}

// view is a set of rows as text that can be compared: "key=value@version;" in the order of the keys.
type view string

type state struct {
	shown view
	ahead string // of each write in the log that is not shown yet: its id and "\n"
}

type row struct{ value, version int64 }

func (v view) rows() map[string]row {
	rows := map[string]row{}
	for _, each := range strings.Split(strings.TrimSuffix(string(v), ";"), ";") {
		if key, rest, found := strings.Cut(each, "="); found {
			value, version, _ := strings.Cut(rest, "@")
			rows[key] = row{number(value), number(version)}
		}
	}
	return rows
}

func viewOf(rows map[string]row) view {
	keys := make([]string, 0, len(rows))
	for key := range rows {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	var text strings.Builder
	for _, key := range keys {
		fmt.Fprintf(&text, "%s=%d@%d;", key, rows[key].value, rows[key].version)
	}
	return view(text.String())
}

func number(text string) int64 {
	parsed, _ := strconv.ParseInt(text, 10, 64)
	return parsed
}

// changed returns the rows of v after the write o, and whether its condition holds.
func (v view) changed(o *op) (view, bool) {
	rows := v.rows()
	for _, key := range o.keys {
		now, there := rows[key]
		switch o.kind {
		case "insert":
			if there {
				return v, false
			}
		case "version":
			if there && now.version > o.version {
				return v, false
			}
		case "compare":
			if !there || now.value != o.rows[key] {
				return v, false
			}
		}
		if o.kind == "delete" || o.kind == "compare" {
			delete(rows, key)
		} else {
			rows[key] = row{o.rows[key], o.version}
		}
	}
	return viewOf(rows), true
}

// shows tells whether a read of o's keys in v finds what o found.
func (v view) shows(o *op) bool {
	rows := v.rows()
	found := 0
	for _, key := range o.keys {
		now, there := rows[key]
		value, seen := o.found[key]
		if there != seen || there && now.value != value {
			return false
		}
		if seen {
			found++
		}
	}
	return found == len(o.found)
}

// model is the specification of the operations in `ops`, by id.
func model(ops map[string]*op) porcupine.Model {
	return porcupine.Model{
		Init: func() interface{} { return state{} },
		Step: func(before, input, _ interface{}) (bool, interface{}) {
			now, what := before.(state), input.(step)
			switch {
			case what.stored():
				return now.logged(ops).shows(what.op), now
			case what.reads():
				return now.shown.shows(what.op), now
			case what.half == "shown":
				return now.show(what.op)
			}
			return now.write(what, ops)
		},
		DescribeOperation: func(input, _ interface{}) string { return input.(step).String() },
		DescribeState:     func(now interface{}) string { return now.(state).String() },
	}
}

// logged is what storage shows.
func (s state) logged(ops map[string]*op) view {
	all := s.shown
	for _, id := range strings.Split(strings.TrimSuffix(s.ahead, "\n"), "\n") {
		if id != "" {
			all, _ = all.changed(ops[id])
		}
	}
	return all
}

// write is a write's whole, or its first half. The condition of one that has none always holds.
func (s state) write(what step, ops map[string]*op) (bool, state) {
	after, holds := s.logged(ops).changed(what.op)
	switch {
	case what.applied != nil && *what.applied == 0:
		// A delete by filter first looks for rows at what the owner shows.
		_, held := s.shown.changed(what.op)
		return !holds || what.kind == "compare" && !held, s
	case what.applied != nil && !holds:
		return false, s
	case !holds:
		return true, s
	case what.half == "":
		return true, state{shown: after}
	}
	return true, state{s.shown, s.ahead + what.id + "\n"}
}

// show is the second half of a write: the owner shows it, which is the next in the log.
func (s state) show(o *op) (bool, state) {
	if rest, next := strings.CutPrefix(s.ahead, o.id+"\n"); next {
		after, _ := s.shown.changed(o)
		return true, state{after, rest}
	}
	// One whose verdict nobody was told may have changed nothing.
	return o.conditional() && o.applied == nil && !strings.Contains(s.ahead, o.id+"\n"), s
}

func (s state) String() string {
	text := "{" + strings.ReplaceAll(string(s.shown), "@0;", ";") + "}"
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
	case o.outcome != ok:
		return "unknown"
	case o.applied != nil:
		return fmt.Sprintf("applied %d", *o.applied)
	}
	return ok
}
