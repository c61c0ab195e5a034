// Reduce: the parts of a history that are judged by themselves, and what of their unknown operations must be ordered.
//
// An operation with an unknown outcome may be placed anywhere behind its invocation, so each of them may double the
// work. Two rules make most of them harmless, and change no verdict:
//
//  1. Nobody noticed it: a put of which no read found a value, or a delete of keys that no read that returned after its
//     invocation missed; and no operation with a condition, whose verdict may depend on it, concerns its keys. It is left
//     out. If the rest is linearizable, so is the whole: it comes last. If the whole is, so is the rest: between it and
//     the next write of a key no read looked at the key.
//  2. Somebody noticed it: a read found a value of a put. Values are unique, so the put came before this read, and its
//     interval may end where the read returned.

package main

import (
	"sort"

	"github.com/anishathalye/porcupine"
)

// partition is a part of a history that is linearizable by itself: a key or a region.
type partition struct {
	name    string
	ops     []*op
	failed  []*op // writes that were surely not applied, so that they are not judged
	leftOut int   // unknown operations that nobody noticed
	open    int   // unknown operations that are ordered
}

// partitions returns each region, and before it each of its keys.
func partitions(ops []*op) []*partition {
	regions, keys := map[string]*partition{}, map[string]*partition{}
	for _, each := range ops {
		if each.reads() && each.outcome != ok {
			continue
		}
		put(regions, "region "+each.region, each)
		for _, key := range each.keys {
			put(keys, "region "+each.region+", key "+key, each.only(key))
		}
	}
	var all []*partition
	for _, parts := range []map[string]*partition{keys, regions} {
		for _, part := range parts {
			if len(part.ops) > 0 {
				all = append(all, part)
			}
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].name > all[j].name })
	return all
}

func put(parts map[string]*partition, name string, o *op) {
	if parts[name] == nil {
		parts[name] = &partition{name: name}
	}
	if o.outcome == failed {
		parts[name].failed = append(parts[name].failed, o)
		return
	}
	parts[name].ops = append(parts[name].ops, o)
}

// only is what of o concerns one key.
func (o *op) only(key string) *op {
	part := *o
	part.keys = []string{key}
	one := func(rows map[string]int64) map[string]int64 {
		if value, there := rows[key]; there {
			return map[string]int64{key: value}
		}
		return map[string]int64{}
	}
	if o.rows != nil {
		part.rows = one(o.rows)
	}
	if o.found != nil {
		part.found = one(o.found)
	}
	return &part
}

// noticed is what the reads of a partition tell of its unknown operations.
type noticed struct {
	found       map[cell]int64 // when the first read that found a value returned
	shown       map[cell]int64 // the same of reads through an owner
	missed      map[string]int64
	conditional map[string]bool
}

type cell struct {
	key   string
	value int64
}

func notice(ops []*op) noticed {
	n := noticed{map[cell]int64{}, map[cell]int64{}, map[string]int64{}, map[string]bool{}}
	for _, each := range ops {
		for _, key := range each.keys {
			n.conditional[key] = n.conditional[key] || each.conditional()
			value, there := each.found[key]
			switch {
			case each.reads() && !there:
				n.missed[key] = max(n.missed[key], each.ret)
			case each.reads():
				earliest(n.found, cell{key, value}, each.ret)
				if !each.stored() {
					earliest(n.shown, cell{key, value}, each.ret)
				}
			case each.kind == "compare" && each.applied != nil && *each.applied == 1:
				earliest(n.found, cell{key, each.rows[key]}, each.ret)
			}
		}
	}
	return n
}

func earliest(times map[cell]int64, of cell, at int64) {
	if before, known := times[of]; !known || at < before {
		times[of] = at
	}
}

// unnoticed is rule 1.
func (n noticed) unnoticed(o *op) bool {
	for _, key := range o.keys {
		if n.conditional[key] {
			return false
		}
		if o.kind == "delete" && n.missed[key] >= o.call {
			return false
		}
		if _, found := n.found[cell{key, o.rows[key]}]; found && o.kind != "delete" {
			return false
		}
	}
	return true
}

// until is rule 2: when o was applied at the latest, by the reads in `times`.
func until(o *op, times map[cell]int64) int64 {
	latest := int64(forever)
	if o.kind == "compare" {
		return latest
	}
	for key, value := range o.rows {
		if at, found := times[cell{key, value}]; found {
			latest = min(latest, at)
		}
	}
	return latest
}

// steps returns what Porcupine orders, and notes what was left out. Of `all` operations nothing is left out or bounded.
func (p *partition) steps(all bool) []porcupine.Operation {
	found, split := notice(p.ops), false
	for _, each := range p.ops {
		split = split || each.stored()
	}
	var steps []porcupine.Operation
	clients := map[string]int{}
	add := func(o *op, half string, ret int64) {
		if all {
			ret = forever
		}
		if _, known := clients[o.client]; !known {
			clients[o.client] = len(clients)
		}
		steps = append(steps, porcupine.Operation{
			ClientId: clients[o.client], Input: step{o, half}, Call: o.call, Return: min(o.ret, ret),
		})
	}
	for _, each := range p.ops {
		open := each.outcome != ok
		switch {
		case each.reads():
			add(each, "", forever)
		case open && !all && found.unnoticed(each):
			p.leftOut++
			continue
		case !split:
			add(each, "", until(each, found.found))
		default:
			add(each, "logged", until(each, found.found))
			if each.applied == nil || *each.applied != 0 {
				add(each, "shown", until(each, found.shown))
			}
		}
		if open {
			p.open++
		}
	}
	return steps
}
