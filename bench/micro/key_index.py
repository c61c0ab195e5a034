"""Compare structures that map keys to rows, batch after batch: the evidence for memtable/key/index.py.

`python -m bench.micro.key_index` prints a table. The work is that of a put: 1,000 int64 keys at a time, a tenth of them
put before; look up the current row of each key (-1: none) and map the key to its new row. All candidates must return
the same rows. Each runs in a process of its own, so that its memory can be read from the process.

Only the map is measured; versions, order and the rows themselves cost the same with every map.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

ROWS = 1_000_000
BATCH = 1_000
REPEATS = 100
"""Keys of a batch that were put before."""
SEED = 20_240_607
PAGE = 4096


class KeyMap(ABC):
    """A map from a key to its newest row. A batch has no duplicate keys."""

    rows = ROWS
    """Number of rows to put; fewer for a candidate that would take minutes."""

    @abstractmethod
    def put(self, keys: Integers, first: int) -> Integers:
        """Map the keys to the rows first, first+1, ...; return the previous row of each key, -1 for none."""


class Dict(KeyMap):
    """A dict: one pass looks up old keys and adds new ones; then the old keys are updated."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        values, rows = keys.tolist(), range(first, first + len(keys))
        found = np.fromiter(map(self._newest.setdefault, values, rows), np.int64, len(values))
        old = found < first
        places = np.flatnonzero(old).tolist()
        self._newest.update((values[place], first + place) for place in places)
        return np.where(old, found, -1)


class Sorted(KeyMap):
    """sortedcontainers: a dict and its keys in order."""

    rows = ROWS // 10

    def __init__(self) -> None:
        from sortedcontainers import SortedDict

        self._newest: Any = SortedDict()

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        values = keys.tolist()
        found = np.fromiter(map(self._newest.get, values, repeat(-1)), np.int64, len(values))
        self._newest.update(zip(values, range(first, first + len(values)), strict=True))
        return found


class SortedRuns(KeyMap):
    """NumPy alone: every batch is a sorted run, which is merged with the previous run if it is at least as long."""

    def __init__(self) -> None:
        self._runs: list[tuple[Integers, Integers]] = []

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        found = np.full(len(keys), -1, dtype=np.int64)
        for run, rows in self._runs:  # oldest first, so that the newest row is written last
            places = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            found = np.where(run[places] == keys, rows[places], found)
        order = np.argsort(keys)
        self._runs.append((keys[order], first + order))
        while len(self._runs) > 1 and len(self._runs[-1][0]) >= len(self._runs[-2][0]):
            self._merge()
        return found

    def _merge(self) -> None:
        """Merge the two newest runs; for equal keys the newer row stays.

        The stable sort detects the two sorted halves and merges them.
        """
        newer, older = self._runs.pop(), self._runs.pop()
        keys = np.concatenate([older[0], newer[0]])
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], np.concatenate([older[1], newer[1]])[order]
        last = np.append(keys[1:] != keys[:-1], True)
        self._runs.append((keys[last], rows[last]))


class LongToLong(KeyMap):
    """faiss.MapLong2Long: std::unordered_map with one call per batch."""

    def __init__(self) -> None:
        self._map: Any = faiss.MapLong2Long()

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        found: Integers = self._map.search_multiple(keys)
        self._map.add(keys, np.arange(first, first + len(keys)))
        return found


class OneTable(KeyMap):
    """faiss.MapInt64ToInt64: open addressing in one NumPy array, allocated for all rows at once."""

    def __init__(self) -> None:
        self._map: Any = faiss.MapInt64ToInt64(1 << (2 * ROWS - 1).bit_length())

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        found: Integers = self._map.lookup(keys)
        self._map.add(keys, np.arange(first, first + len(keys)))
        return found


class DoublingTable(KeyMap):
    """The same, starting small: a half-full table is copied at once to a table twice as large."""

    def __init__(self) -> None:
        self._map: Any = faiss.MapInt64ToInt64(1 << 12)
        self._used = 0

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        found: Integers = self._map.lookup(keys)
        self._used += int(np.count_nonzero(found < 0))
        if 2 * self._used > self._map.capacity:
            taken = self._map.tab[self._map.tab[:, 1] >= 0]
            self._map = faiss.MapInt64ToInt64(2 * self._map.capacity)
            self._map.add(np.ascontiguousarray(taken[:, 0]), np.ascontiguousarray(taken[:, 1]))
        self._map.add(keys, np.arange(first, first + len(keys)))
        return found


class TablesOfDoublingSize(KeyMap):
    """The same without copies: when a table is half full, further keys go into another one, twice as large.

    A key stays in its first table, and its row is updated there. A lookup searches all tables, the largest first.
    """

    def __init__(self) -> None:
        self._maps: list[Any] = []
        self._used = self._most = 0

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        rows = np.arange(first, first + len(keys))
        found = np.full(len(keys), -1, dtype=np.int64)
        missing = np.arange(len(keys))
        for map in reversed(self._maps):
            asked = keys[missing]
            answered = map.lookup(asked)
            here = answered >= 0
            if here.any():
                found[missing[here]] = answered[here]
                map.add(asked[here], rows[missing[here]])
                missing = missing[~here]
        if self._used + len(missing) > self._most:
            capacity = 2 * self._maps[-1].capacity if self._maps else 1 << 16
            self._maps.append(faiss.MapInt64ToInt64(capacity))
            self._used, self._most = 0, capacity // 2
        self._used += len(missing)
        self._maps[-1].add(keys[missing], rows[missing])
        return found


class Pandas(KeyMap):
    """pandas' Int64HashTable, which grows by doubling; private to pandas."""

    def __init__(self) -> None:
        self._map: Any = import_module("pandas._libs.hashtable").Int64HashTable()

    def put(self, keys: Integers, first: int) -> Integers:
        """See KeyMap."""
        found: Integers = self._map.lookup(keys)
        self._map.map_keys_to_values(keys, np.arange(first, first + len(keys)))
        return found


CANDIDATES: Mapping[str, type[KeyMap]] = {
    "dict.setdefault": Dict,
    "sortedcontainers.SortedDict": Sorted,
    "NumPy sorted runs, merged": SortedRuns,
    "faiss.MapLong2Long": LongToLong,
    "faiss.MapInt64ToInt64, one table": OneTable,
    "faiss.MapInt64ToInt64, doubled": DoublingTable,
    "faiss.MapInt64ToInt64, several": TablesOfDoublingSize,
    "pandas Int64HashTable": Pandas,
}


def batches(rows: int) -> list[Integers]:
    """Return the keys of each batch, spread over all of int64."""
    rng = np.random.default_rng(SEED)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, rows + rows // 100, dtype=np.int64))
    fresh = rng.permutation(keys)[:rows].reshape(-1, BATCH)
    made = [fresh[0]]
    for number in range(1, len(fresh)):
        before = fresh[rng.integers(0, number, REPEATS), rng.permutation(BATCH)[:REPEATS]]
        made.append(np.concatenate([np.unique(before), fresh[number, len(np.unique(before)) :]]))
    return made


def measure(name: str) -> dict[str, float]:
    """Measure one candidate in this process."""
    faiss.omp_set_num_threads(1)  # as in memwal: region writers must not compete for the cores
    everything = batches(CANDIDATES[name].rows)
    seconds = np.zeros(len(everything))
    sum_found = 0
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed by key generation would be reused and not be counted
    before = _resident()
    candidate = CANDIDATES[name]()
    for number, keys in enumerate(everything):
        began = time.perf_counter()
        found = candidate.put(keys, number * BATCH)
        seconds[number] = time.perf_counter() - began
        sum_found += int(found.sum())
    held = _resident() - before
    distinct = len(np.unique(np.concatenate(everything)))
    microseconds, tenth = 1e6 * seconds, len(seconds) // 10
    return {
        "rows": candidate.rows,
        "first": float(np.median(microseconds[:tenth])),
        "last": float(np.median(microseconds[-tenth:])),
        "mean": float(microseconds.mean()),
        "worst": float(microseconds.max()) / 1e3,
        "bytes": held / distinct,
        "found": sum_found,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def main() -> None:
    """Measure every candidate and print the results."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    print(f"{ROWS:,} int64 keys in batches of {BATCH:,}, {REPEATS} of them put before; per batch, and bytes per key\n")
    print("| structure | keys | p50, first tenth | p50, last tenth | mean | worst | bytes |")
    print("|---|---|---|---|---|---|---|")
    found: dict[float, float] = {}
    for name in CANDIDATES:
        command = [sys.executable, "-m", "bench.micro.key_index", name]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert found.setdefault(told["rows"], told["found"]) == told["found"], f"{name} found other rows"
        times = " | ".join(f"{told[part]:,.0f} µs" for part in ("first", "last", "mean"))
        print(f"| {name} | {told['rows']:,.0f} | {times} | {told['worst']:.1f} ms | {told['bytes']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
