// History: reads the files that tests/histories/record.py writes.

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"strconv"
)

// forever is the return of an operation whose outcome is unknown.
const forever = math.MaxInt64

const (
	ok      = "ok"
	failed  = "failed"
	unknown = "unknown"
)

// op is one operation of one region, or what of it concerns one key.
type op struct {
	id, client, kind, level, region string
	keys                            []string         // that it reads or writes, sorted
	rows                            map[string]int64 // written or expected value of each key; nil for deletes and reads
	version                         int64
	outcome, reason                 string
	applied                         *int             // verdict of an operation with a condition, nil if not known
	found                           map[string]int64 // rows that a read returned
	call, ret                       int64
}

type line struct {
	Event   string           `json:"event"`
	ID      string           `json:"id"`
	At      *int64           `json:"at"`
	Client  string           `json:"client"`
	Op      string           `json:"op"`
	Level   string           `json:"level"`
	Region  int              `json:"region"`
	Rows    map[string]int64 `json:"rows"`
	Keys    []int64          `json:"keys"`
	Version int64            `json:"version"`
	Outcome string           `json:"outcome"`
	Why     string           `json:"why"`
	Applied *int             `json:"applied"`
}

func (o *op) reads() bool { return o.kind == "read" }

func (o *op) conditional() bool {
	return o.kind == "insert" || o.kind == "version" || o.kind == "compare"
}

func (o *op) stored() bool { return o.reads() && o.level == "stored" }

// readHistory returns all operations of the files, in the order of their calls. A last line that was cut off is left out.
func readHistory(paths []string) ([]*op, error) {
	ops := map[string]*op{}
	for _, path := range paths {
		if err := readFile(path, ops); err != nil {
			return nil, err
		}
	}
	all := make([]*op, 0, len(ops))
	for _, each := range ops {
		all = append(all, each)
	}
	sort.Slice(all, func(i, j int) bool {
		return all[i].call < all[j].call || all[i].call == all[j].call && all[i].id < all[j].id
	})
	return all, onceWritten(all)
}

func readFile(path string, ops map[string]*op) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	scanner := bufio.NewScanner(file)
	scanner.Buffer(nil, 1<<24)
	var torn error
	for number := 1; scanner.Scan(); number++ {
		if torn != nil {
			return torn // not the last line
		}
		var read line
		if err := json.Unmarshal(scanner.Bytes(), &read); err != nil {
			torn = fmt.Errorf("%s:%d: not a line of JSON: %v", path, number, err)
			continue
		}
		if err := add(&read, ops); err != nil {
			return fmt.Errorf("%s:%d: %v", path, number, err)
		}
	}
	return scanner.Err()
}

func add(read *line, ops map[string]*op) error {
	before, known := ops[read.ID]
	if read.At == nil {
		return fmt.Errorf("operation %q has no time `at`", read.ID)
	}
	switch {
	case read.Event == "invoke" && !known:
		begun, err := invoked(read)
		ops[read.ID] = begun
		return err
	case read.Event == "return" && known && before.ret == forever && before.outcome == "":
		return returned(read, before)
	}
	return fmt.Errorf("%q of operation %q is out of order", read.Event, read.ID)
}

func invoked(read *line) (*op, error) {
	begun := &op{id: read.ID, client: read.Client, kind: read.Op, level: read.Level, region: strconv.Itoa(read.Region)}
	begun.call, begun.ret, begun.version = *read.At, forever, read.Version
	switch read.Op {
	case "put", "insert", "version", "compare":
		begun.rows = read.Rows
		for key := range read.Rows {
			begun.keys = append(begun.keys, key)
		}
	case "delete", "read":
		for _, key := range read.Keys {
			begun.keys = append(begun.keys, strconv.FormatInt(key, 10))
		}
	default:
		return nil, fmt.Errorf("operation %q is no put, insert, version, compare, delete or read, but %q", read.ID, read.Op)
	}
	sort.Strings(begun.keys)
	switch {
	case len(begun.keys) == 0:
		return nil, fmt.Errorf("operation %q has no keys", read.ID)
	case begun.conditional() && len(begun.keys) > 1:
		return nil, fmt.Errorf("operation %q has a condition and more than one key", read.ID)
	case begun.reads() && read.Level != "latest" && read.Level != "durable" && read.Level != "stored":
		return nil, fmt.Errorf("read %q is not at latest, durable or stored, but at %q", read.ID, read.Level)
	}
	return begun, nil
}

func returned(read *line, begun *op) error {
	begun.outcome, begun.applied, begun.found, begun.reason = read.Outcome, read.Applied, read.Rows, read.Why
	if *read.At < begun.call {
		return fmt.Errorf("operation %q returned before it was invoked", read.ID)
	}
	switch read.Outcome {
	case unknown:
	case ok, failed:
		begun.ret = *read.At
	default:
		return fmt.Errorf("operation %q is not ok, failed or unknown, but %q", read.ID, read.Outcome)
	}
	return nil
}

// onceWritten returns an error where two operations write one value to one key: a read could not tell them apart.
func onceWritten(all []*op) error {
	type written struct {
		region, key string
		value       int64
	}
	writers := map[written]string{}
	for _, each := range all {
		if each.kind == "compare" {
			continue
		}
		for key, value := range each.rows {
			if other, twice := writers[written{each.region, key, value}]; twice {
				return fmt.Errorf("operations %q and %q write value %d to key %s", other, each.id, value, key)
			}
			writers[written{each.region, key, value}] = each.id
		}
	}
	return nil
}
