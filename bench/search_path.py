"""Scan by B-tree, vector search and text match over the real packages, spread over memtable, SST and base table.

Lance has no vector or text search that sees a memtable, so search and match are measured twice: at the highest level
that Lance also searches, and at level `latest`, where Lance's time is for a smaller question and its answer is not
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.benchmark import Benchmark, Contender, Parameter, Values
from bench.digest import rows_digest, texts_digest
from bench.lance_side import LanceShard
from bench.memwal_side import MemwalTable
from bench.put_path import PACKAGE_INDEXES
from bench.queries import Levels, Measure, of_lance, of_memwal
from bench.source_data import PACKAGES_KEY, SEED, newest, package_updates, packages

K = 10
COLUMNS = ["package", "installed_kb"]
SMALLER = "smaller question"
NO_MEMTABLE = "does not see the memtable; its time is for base and SST alone"
NO_SST = "sees the base table alone; its time is for that"
TEXTS = (
    "python library",
    "documentation for the web server",
    "fast compression",
    "terminal emulator",
    "debug symbols",
    "network monitoring tool",
    "fonts",
    "image viewer",
    "mathematics",
    "kernel module",
)
PROBES = int(PACKAGE_INDEXES["embedding"]["num_partitions"])
"""Lance probes every partition, as memwal does at this size."""
REFINED: Mapping[str, Any] = {"nprobes": PROBES, "refine_base_table": True, "overfetch_factor": 2.0}
UNREFINED: Mapping[str, Any] = {"nprobes": PROBES}


def _levels(values: Values) -> Levels:
    """Return the packages and their updates, spread over the levels as a stream would leave them."""
    base, above = values["base"], values["above"]
    updates = package_updates().slice(0, above)
    half = updates.num_rows // 2
    return Levels(
        packages().slice(0, base),
        pa.concat_tables([packages().slice(base, above), updates.slice(0, half)]),
        pa.concat_tables([packages().slice(base + above, above), updates.slice(half)]),
        PACKAGES_KEY,
        PACKAGE_INDEXES,
    )


# ---- scan ----------------------------------------------------------------------------------------------------------


def _scan(values: Values) -> list[Contender]:
    levels = _levels(values)
    starts = np.random.default_rng(SEED).integers(1, 2000, values["scans"])
    filters = [f"installed_kb >= {start} AND installed_kb < {start + start // 5 + 1}" for start in starts]
    columns = ["package", "version", "installed_kb"]

    def ours(table: MemwalTable, passing: str) -> pa.Table:
        return table.table.scan(columns, filter=passing).read_all()

    def theirs(table: LanceShard, passing: str) -> pa.Table:
        return table.scanner().project(columns).filter(passing).to_table()

    def digest(answers: Sequence[pa.Table]) -> str:
        return texts_digest([rows_digest(answer, [PACKAGES_KEY]) for answer in answers])

    return [
        of_memwal(levels, "latest", ours, filters, digest),
        of_lance("ShardWriter.lsm_scanner", levels, theirs, filters, digest),
    ]


# ---- search --------------------------------------------------------------------------------------------------------


def _vectors(rows: pa.Table) -> npt.NDArray[np.float32]:
    flat = rows.column("embedding").combine_chunks().flatten().to_numpy()
    return np.asarray(flat, np.float32).reshape(rows.num_rows, -1)


def _queries(levels: Levels, count: int) -> list[npt.NDArray[np.float32]]:
    """Return vectors between two real ones: near existing rows, equal to none."""
    vectors = _vectors(levels.base)
    pairs = vectors[np.random.default_rng(SEED).integers(0, len(vectors), (count, 2))]
    mixed = pairs[:, 0] * np.float32(0.6) + pairs[:, 1] * np.float32(0.4)
    return list(np.asarray(mixed / np.linalg.norm(mixed, axis=1, keepdims=True), np.float32))


def _recall(rows: pa.Table, queries: Sequence[npt.NDArray[np.float32]]) -> Measure:
    """Return a measure of the share of the exact ten nearest rows in the answers."""
    vectors, names = _vectors(rows), np.asarray(rows.column(PACKAGES_KEY).to_pylist())
    exact = [set(names[np.argsort(((vectors - query) ** 2).sum(axis=1))[:K]]) for query in queries]

    def measure(answers: Sequence[pa.Table]) -> Mapping[str, float]:
        found = [set(answer.column(PACKAGES_KEY).to_pylist()) for answer in answers]
        hits = sum(len(truth & names) for truth, names in zip(exact, found, strict=True))
        return {"recall": hits / (K * len(exact))}

    return measure


def _approximate(_: Sequence[pa.Table]) -> str:
    """Return no digest: both sides may miss a row, so recall is compared instead."""
    return ""


def _theirs(settings: Mapping[str, Any]) -> Callable[[LanceShard, npt.NDArray[np.float32]], pa.Table]:
    def ask(table: LanceShard, query: npt.NDArray[np.float32]) -> pa.Table:
        plan = table.searches("embedding").plan_search(pa.array(query), k=K, columns=COLUMNS, **settings)
        return plan.to_table()

    return ask


def _search(level: str) -> Callable[[Values], list[Contender]]:
    """Return contenders for the ten nearest packages at one read level."""

    def ours(table: MemwalTable, query: npt.NDArray[np.float32]) -> pa.Table:
        return table.table.search("embedding", query, k=K, columns=COLUMNS, level=level)

    def contenders(values: Values) -> list[Contender]:
        levels = _levels(values)
        queries = _queries(levels, values["searches"])
        flushed = newest([levels.base, levels.sst], PACKAGES_KEY)
        seen = newest([flushed, levels.memtable], PACKAGES_KEY) if level == "latest" else flushed
        judge = _recall(flushed, queries)
        made: list[Contender] = [of_memwal(levels, level, ours, queries, _approximate, _recall(seen, queries))]
        note = NO_MEMTABLE if level == "latest" else ""
        for name, settings in (("refined", REFINED), ("default", UNREFINED)):
            made.append(
                of_lance(
                    f"LsmVectorSearchPlanner, {name}",
                    levels,
                    _theirs(settings),
                    queries,
                    _approximate,
                    judge,
                    settings,
                    note=note,
                )
            )
        return made

    return contenders


# ---- match ---------------------------------------------------------------------------------------------------------


def _scores(answers: Sequence[pa.Table]) -> str:
    """Hash the scores, not the packages: rows with equal scores may come in any order, and only ten fit."""
    return texts_digest([f"{score:.3f}" for answer in answers for score in answer.column("_score").to_pylist()])


def _match(level: str) -> Callable[[Values], list[Contender]]:
    """Return contenders for the ten best packages for some words at one read level."""

    def ours(table: MemwalTable, text: str) -> pa.Table:
        return table.table.match("description", text, k=K, columns=COLUMNS, level=level)

    def theirs(table: LanceShard, text: str) -> pa.Table:
        query = {"columns": ["description"], "query": text}
        return table.dataset.to_table([*COLUMNS, "_score"], full_text_query=query, limit=K)

    def contenders(values: Values) -> list[Contender]:
        levels = _levels(values)
        texts = [TEXTS[n % len(TEXTS)] for n in range(values["matches"])]
        question, note = (SMALLER, NO_SST) if level == "latest" else ("same", "")
        return [
            of_memwal(levels, level, ours, texts, _scores),
            of_lance("LanceDataset, full_text_query", levels, theirs, texts, _scores, question=question, note=note),
        ]

    return contenders


_ROWS = {
    "base": Parameter(300, 3000, "packages in the base table"),
    "above": Parameter(50, 500, "further packages in the SST, and in the memtable; as many updates over both"),
}
_SCANS = {**_ROWS, "scans": Parameter(2, 10, "scans of a round")}
_SEARCHES = {**_ROWS, "searches": Parameter(2, 20, "searches of a round")}
_MATCHES = {**_ROWS, "matches": Parameter(2, 20, "matches of a round")}

BENCHMARKS = (
    Benchmark("scan_packages", "Scan of real packages, filter on a B-tree column", "p50_ms", _SCANS, _scan),
    Benchmark("search_flushed", "Vector search, k = 10, base and SST", "p50_ms", _SEARCHES, _search("flushed")),
    Benchmark("search_latest", "Vector search, k = 10, all levels", "p50_ms", _SEARCHES, _search("latest")),
    Benchmark("match_committed", "Text match, k = 10, base", "p50_ms", _MATCHES, _match("committed")),
    Benchmark("match_latest", "Text match, k = 10, all levels", "p50_ms", _MATCHES, _match("latest")),
)
