"""All benchmarks, and their selection by name."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from bench import (
    commit_path,
    flush_path,
    memtable_path,
    memtable_puts,
    put_path,
    query_path,
    replay_path,
    search_path,
    sustained_puts,
)
from bench.benchmark import Benchmark

ALL: tuple[Benchmark, ...] = (
    *put_path.BENCHMARKS,
    *sustained_puts.BENCHMARKS,
    *memtable_puts.BENCHMARKS,
    *memtable_path.BENCHMARKS,
    *flush_path.BENCHMARKS,
    *replay_path.BENCHMARKS,
    *query_path.BENCHMARKS,
    *search_path.BENCHMARKS,
    *commit_path.BENCHMARKS,
)


def chosen(names: Sequence[str], more: Sequence[Benchmark] = ()) -> list[Benchmark]:
    """Return benchmarks by name or pattern, in their own order; without names, all of ALL.

    `more`: benchmarks that are returned by name only.

    Raises: LookupError with the nearest name.
    """
    every = (*ALL, *more)
    wanted = matching(names, [each.name for each in every])
    return [each for each in every if each.name in wanted] if names else list(ALL)


def matching(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the members of `known` that match a name or pattern.

    Raises: LookupError, with the nearest name, if a name matches none.
    """
    for name in names:
        if not fnmatch.filter(known, name):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise LookupError(f"no benchmark is called {name}; {hint}")
    return [each for each in known if any(fnmatch.fnmatch(each, name) for name in names)]
