"""Get and scan over generated rows, some in the memtable, some in an SST, most in the base table.

Both sides hold the same rows at the same levels. Newer levels hold newer versions of some keys of the older levels. A
round repeats the same questions, and both sides must return the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bench.benchmark import Benchmark, Contender, Parameter, Values
from bench.digest import rows_digest, texts_digest
from bench.lance_side import LanceShard
from bench.memwal_side import MemwalTable
from bench.queries import Levels, of_lance, of_memwal
from bench.source_data import NARROW_KEY, SEED, narrow_rows

Keys = npt.NDArray[np.int64]


def _levels(values: Values) -> Levels:
    """Return ids 0 … base in the base; SST and memtable add new ids, and newer versions for a tenth as many old ids."""
    base, above = values["base"], values["above"]
    first = base + above
    return Levels(
        narrow_rows(range(base), 0),
        pa.concat_tables([narrow_rows(range(base, first), 1), narrow_rows(range(0, above, 10), 2)]),
        pa.concat_tables([narrow_rows(range(first, first + above), 3), narrow_rows(range(base, first, 10), 4)]),
        NARROW_KEY,
        {NARROW_KEY: {"type": "btree"}},
    )


def _questions(values: Values, at: str) -> list[Keys]:
    """Return, for each get, ids whose newest version is at one level, or at any level."""
    base, above = values["base"], values["above"]
    first = base + above
    ids = {
        "memtable": np.arange(first, first + above),
        "sst": np.setdiff1d(np.arange(base, first), np.arange(base, first, 10)),
        "base": np.arange(above, base),
        "any": np.arange(first + above),
    }
    picked = np.random.default_rng(SEED).choice(ids[at], values["keys"] * values["gets"], replace=False)
    return np.split(picked, values["gets"])


def _digest(answers: Sequence[pa.Table]) -> str:
    return texts_digest([rows_digest(answer, [NARROW_KEY]) for answer in answers])


def _ours(table: MemwalTable, keys: Keys) -> pa.Table:
    return table.table.get(keys.tolist())


def _scan_for(table: LanceShard, keys: Keys) -> pa.Table:
    return table.scanner().filter(f"{NARROW_KEY} IN ({', '.join(map(str, keys))})").to_table()


def _scan_all_for(table: LanceShard, keys: Keys) -> pa.Table:
    rows = table.rows()
    return rows.filter(pc.is_in(rows.column(NARROW_KEY), pa.array(keys)))


def _look_up(table: LanceShard, keys: Keys) -> pa.Table:
    return pa.concat_tables([table.lookups().plan_lookup(pa.array([key])).to_table() for key in keys])


def _get_one(at: str) -> Callable[[Values], list[Contender]]:
    """Return contenders for gets of one key whose newest version is at one level."""

    def contenders(values: Values) -> list[Contender]:
        levels, questions = _levels(values), _questions(values, at)
        made: list[Contender] = [
            of_memwal(levels, "latest", _ours, questions, _digest),
            of_lance("ShardWriter.lsm_scanner, id IN (…)", levels, _scan_for, questions, _digest),
        ]
        if at != "memtable":
            note = "does not see the memtable, which holds none of these keys"
            made.append(of_lance("LsmPointLookupPlanner", levels, _look_up, questions, _digest, note=note))
        return made

    return contenders


def _get_many(values: Values) -> list[Contender]:
    levels, questions = _levels(values), _questions(values, "any")
    return [
        of_memwal(levels, "latest", _ours, questions, _digest),
        of_lance("ShardWriter.lsm_scanner, scan all and pick", levels, _scan_all_for, questions, _digest),
        of_lance("ShardWriter.lsm_scanner, id IN (…)", levels, _scan_for, questions, _digest),
    ]


def _scan(values: Values) -> list[Contender]:
    levels = _levels(values)
    starts = np.random.default_rng(SEED).random(values["scans"]) * 0.99
    filters = [f"value >= {start:.6f} AND value < {start + 0.01:.6f}" for start in starts]

    def ours(table: MemwalTable, passing: str) -> pa.Table:
        return table.table.scan(filter=passing).read_all()

    def theirs(table: LanceShard, passing: str) -> pa.Table:
        return table.scanner().filter(passing).to_table()

    return [
        of_memwal(levels, "latest", ours, filters, _digest),
        of_lance("ShardWriter.lsm_scanner", levels, theirs, filters, _digest),
    ]


_ROWS = {
    "base": Parameter(1000, 100_000, "rows of the base table"),
    "above": Parameter(100, 20_000, "new rows of the SST, and of the memtable"),
}
_ONE = {**_ROWS, "keys": Parameter(1, 1, "keys of a get"), "gets": Parameter(3, 30, "gets of a round")}
_MANY = {**_ROWS, "keys": Parameter(20, 1000, "keys of a get"), "gets": Parameter(1, 1, "gets of a round")}
_SCANS = {**_ROWS, "scans": Parameter(2, 5, "scans of a round")}

BENCHMARKS = (
    Benchmark("get_memtable", "Get of 1 key that is in the memtable", "p50_ms", _ONE, _get_one("memtable")),
    Benchmark("get_sst", "Get of 1 key that is in an SST", "p50_ms", _ONE, _get_one("sst")),
    Benchmark("get_base", "Get of 1 key that is in the base table", "p50_ms", _ONE, _get_one("base")),
    Benchmark("get_many", "Get of 1,000 keys from all levels", "p50_ms", _MANY, _get_many),
    Benchmark("scan_narrow", "Scan, filter on a column without index, 1 % pass", "p50_ms", _SCANS, _scan),
)
