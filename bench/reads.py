"""Every kind of read beside Lance's own readers, on the same files: a large base table, four SSTs and a memtable.

    python -m bench.reads [NAME …] [--smoke] [--rounds N] [--processor]

Lance's readers get the SSTs that memwal wrote. They do not see the memtable, so memwal is measured twice: at level
`flushed`, where both sides must return the same, and at level `latest`, which covers more rows than Lance's answer.
Lance matches words in the base alone; there `committed` is the same question. Hybrid search has no peer. `--processor`
measures the processor time of all threads instead of wall time, for a host with other work.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("LANCE_LOG", "critical")

import numpy as np
import pyarrow as pa

from bench.benchmark import Benchmark, Contender, Parameter, Sample, Side, Values, Watch
from bench.digest import rows_digest, texts_digest
from bench.large_table import KEY, PRICES, LargeTable, vectors_of
from bench.latencies import timed_each
from bench.mixtures import QUERIES, Ids, Vectors, nearest
from bench.result import BenchmarkResult
from bench.rounds import ResultsDiffer, run
from bench.search_path import TEXTS
from bench.source_data import SEED
from memwal.ingest.engine.api.fusion import fused

K, DEPTH = 10, 50
"""Number of requested rows, and number of candidates of each arm of a hybrid search."""
FOUND = [KEY, "price"]
WHOLE = [KEY, "price", "weight", "body"]
REFINED: Mapping[str, Any] = {"refine_base_table": True, "overfetch_factor": 2.0}
Ask = Callable[[LargeTable, Any], pa.Table]
Judge = Callable[[LargeTable, Sequence[pa.Table]], Mapping[str, float]]
Clock = Callable[[], float]

ROWS = {
    "base": Parameter(2_000, 1_000_000, "rows of the base table"),
    "above": Parameter(200, 100_000, "rows of each SST, and of the memtable; half are newer versions"),
    "questions": Parameter(20, 40, "questions of a round"),
}


class Shared:
    """The table of all benchmarks, created at its first use.

    Thread safety. One thread.
    """

    def __init__(self, at: Path, clock: Clock = time.perf_counter) -> None:
        self.clock, self._at = clock, at
        self._table: LargeTable | None = None

    def table(self, values: Values) -> LargeTable:
        """Return the table, which has the same size for all benchmarks."""
        if self._table is None:
            self._table = LargeTable(self._at, values)
        return self._table

    def close(self) -> None:
        """Close the table."""
        if self._table is not None:
            self._table.close()


class Reads(Contender):
    """Ask the same questions in one way. `digest`, `judge`: hash and measures of the answers of a round."""

    def __init__(
        self,
        name: str,
        side: Side,
        table: LargeTable,
        clock: Clock,
        ask: Ask,
        questions: Sequence[Any],
        digest: Callable[[Sequence[pa.Table]], str],
        judge: Judge | None,
        *,
        question: str,
    ) -> None:
        super().__init__(name, side, {}, question=question)
        self._table, self._clock, self._ask, self._questions = table, clock, ask, questions
        self._digest, self._judge = digest, judge

    def prepare(self, at: Path) -> None:  # noqa: ARG002 - the table is there
        """Ask every question once, so that both sides have loaded what a first question loads."""
        for each in self._questions:
            self._ask(self._table, each)

    def round(self, at: Path, watch: Watch) -> Sample:  # noqa: ARG002
        """Ask every question once."""
        answers: list[pa.Table] = []
        with watch.timed():
            taken = timed_each(lambda each: answers.append(self._ask(self._table, each)), self._questions, self._clock)
        measures = self._judge(self._table, answers) if self._judge else {}
        rows = sum(answer.num_rows for answer in answers)
        return Sample(np.asarray(taken), watch.seconds, rows, self._digest(answers), measures)


# ---- what is asked ---------------------------------------------------------------------------------------------------


def _rows_found(answers: Sequence[pa.Table]) -> str:
    return texts_digest([rows_digest(answer, [KEY]) for answer in answers])


def _scores_found(answers: Sequence[pa.Table]) -> str:
    """Hash the scores, not the rows: rows with equal scores may come in any order, and only some fit."""
    return texts_digest([f"{score:.3f}" for answer in answers for score in answer.column("_score").to_pylist()])


def _approximate(_: Sequence[pa.Table]) -> str:
    """Return no digest: both sides may miss a row, so recall is compared instead."""
    return ""


def _keys(each: int, questions: int | None = None) -> Callable[[Values], list[list[int]]]:
    """Return ids of the base; the levels above hold newer versions of some.

    `questions`: the maximum number of questions.
    """

    def keys(values: Values) -> list[list[int]]:
        rng = np.random.default_rng((SEED, each))
        count = min(values["questions"], questions or values["questions"])
        return [rng.choice(values["base"], each, replace=False).tolist() for _ in range(count)]

    return keys


def _between(column: str, share: float, most: float | None = None) -> Callable[[Values], list[str]]:
    """Return filters that a `share` of the rows pass.

    `most`: the highest value; None: the number of rows of the base.
    """

    def filters(values: Values) -> list[str]:
        highest = values["base"] if most is None else most
        starts = np.random.default_rng((SEED, *column.encode())).random(values["questions"]) * (1 - share) * highest
        shown = "{:.0f}" if highest > 1 else "{:.6f}"
        ends = [(shown.format(start), shown.format(start + share * highest)) for start in starts]
        return [f"{column} >= {low} AND {column} < {high}" for low, high in ends]

    return filters


def _vectors(values: Values) -> list[Vectors]:
    return list(vectors_of(values["questions"], QUERIES))


def _texts(values: Values) -> list[str]:
    return [TEXTS[n % len(TEXTS)] for n in range(values["questions"])]


def _both(values: Values) -> list[tuple[Vectors, str]]:
    return list(zip(_vectors(values), _texts(values), strict=True))


# ---- who is asked ----------------------------------------------------------------------------------------------------


def _look_up(table: LargeTable, keys: Sequence[int]) -> pa.Table:
    return pa.concat_tables([table.lookups.plan_lookup(pa.array([key]), columns=WHOLE).to_table() for key in keys])


def _look_up_all(table: LargeTable, keys: Sequence[int]) -> pa.Table:
    return _filtered(table, f"{KEY} IN ({', '.join(map(str, keys))})")


def _filtered(table: LargeTable, passing: str) -> pa.Table:
    return table.scanner().project(WHOLE).filter(passing).to_table()


def _counted(table: LargeTable, passing: str) -> pa.Table:
    return _number(table.scanner().project([KEY]).filter(passing).count_rows())


def _number(count: int) -> pa.Table:
    return pa.table({KEY: [count]})


def _nearest_by_lance(how: Mapping[str, Any]) -> Ask:
    def ask(table: LargeTable, vector: Vectors) -> pa.Table:
        return table.searches.plan_search(pa.array(vector), k=K, columns=FOUND, **how).to_table()

    return ask


def _matched(table: LargeTable, text: str) -> pa.Table:
    query = {"columns": ["body"], "query": text}
    return table.dataset.to_table([*FOUND, "_score"], full_text_query=query, limit=K)


def _matched_one_by_one(table: LargeTable, text: str) -> pa.Table:
    """Match in base and SSTs one by one, as a user of Lance would; older versions of a row are not left out."""
    query = {"columns": ["body"], "query": text}
    found = [each.to_table([*FOUND, "_score"], full_text_query=query, limit=2 * K) for each in table.datasets]
    return pa.concat_tables(found).sort_by([("_score", "descending")]).slice(0, K)


def _share_found(answers: Sequence[pa.Table], truth: Sequence[set[int]]) -> Mapping[str, float]:
    hits = sum(len(set(a.column(KEY).to_pylist()) & t) for a, t in zip(answers, truth, strict=True))
    return {"recall": hits / (K * len(truth))}


def _recall(level: str, queries: Sequence[Vectors]) -> Judge:
    """Return a judge of recall: the share of the ten nearest rows, by exact search, in the answers."""
    truth: list[set[int]] = []

    def judge(table: LargeTable, answers: Sequence[pa.Table]) -> Mapping[str, float]:
        if not truth:
            vectors = table.latest if level == "latest" else table.flushed
            _, ids = nearest(vectors, np.arange(len(vectors)), np.stack(queries), K)
            truth.extend(set(row) for row in ids.tolist())
        return _share_found(answers, truth)

    return judge


def _recall_of_both(level: str, questions: Sequence[tuple[Vectors, str]]) -> Judge:
    """Return a judge of recall for hybrid search.

    It is the share of rows in the answers that are no worse than the tenth row of the same fusion over exactly nearest
    rows and exact matches.
    """
    truth: list[set[int]] = []

    def judge(table: LargeTable, answers: Sequence[pa.Table]) -> Mapping[str, float]:
        if not truth:
            vectors = table.latest if level == "latest" else table.flushed
            asked = np.stack([vector for vector, _ in questions])
            distances, ids = nearest(vectors, np.arange(len(vectors)), asked, DEPTH)
            for n, (_, text) in enumerate(questions):
                matched = table.table.match("body", text, k=8 * DEPTH, columns=[KEY], level=level)
                truth.append(_best_fused(ids[n], distances[n], matched))
        return _share_found(answers, truth)

    return judge


def _best_fused(ids: Ids, distances: Vectors, matched: pa.Table) -> set[int]:
    """Return the rows that may be among the ten best: more than ten if several have the relevance of the tenth."""
    scores = dict(zip(matched.column(KEY).to_pylist(), matched.column("_score").to_pylist(), strict=True))
    last = sorted(scores.values(), reverse=True)[min(DEPTH, len(scores)) - 1]
    scores = {id: score for id, score in scores.items() if score >= last}
    near = dict(zip(ids.tolist(), distances.tolist(), strict=True))
    every = [*dict.fromkeys([*near, *scores])]
    arms = [pa.array([arm.get(id) for id in every], pa.float32()) for arm in (near, scores)]
    ranked = fused(pa.table([pa.array(every), *arms], names=[KEY, "_distance", "_score"]), len(every))
    relevance = ranked.column("_relevance_score").to_numpy()
    return set(ranked.column(KEY).to_numpy()[relevance >= relevance[K - 1]].tolist())


# ---- benchmarks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of read.

    `ours(table, question, level)`: memwal's read. `levels`: at the first one both sides return the same rows. `theirs`:
    Lance's ways to answer that question. `by_hand`: ways to get more from Lance than one call returns.
    """

    name: str
    title: str
    questions: Callable[[Values], Sequence[Any]]
    ours: Callable[[Any, Any, str], pa.Table]
    theirs: Mapping[str, Ask]
    digest: Callable[[Sequence[pa.Table]], str] = _rows_found
    levels: Sequence[str] = ("flushed", "latest")
    judge: Callable[[str, Sequence[Any]], Judge] | None = None
    by_hand: Mapping[str, Ask] = field(default_factory=dict)

    def benchmark(self, shared: Shared) -> Benchmark:
        """Return the benchmark of this kind on the shared table."""

        def contenders(values: Values) -> list[Contender]:
            table, asked, made = shared.table(values), self.questions(values), list[Contender]()

            def add(name: str, side: Side, level: str, ask: Ask, question: str) -> None:
                judge = self.judge(level, asked) if self.judge else None
                made.append(Reads(name, side, table, shared.clock, ask, asked, self.digest, judge, question=question))

            same = self.levels[0]
            for name, ask in self.theirs.items():
                add(name, "lance", same, ask, "same")
            for name, ask in self.by_hand.items():
                add(name, "lance", same, ask, "")
            for level in self.levels:
                add(f"memwal, {level}", "memwal", level, partial(self._ask, level), "same" if level == same else level)
            return made

        return Benchmark(self.name, self.title, "p50_ms", ROWS, contenders)

    def _ask(self, level: str, table: LargeTable, question: Any) -> pa.Table:
        return self.ours(table.table, question, level)


_KINDS = (
    _Kind(
        "get",
        "Get of 1 key",
        _keys(1),
        lambda table, keys, level: table.get(keys, columns=WHOLE, level=level),
        {"LsmPointLookupPlanner": _look_up},
    ),
    _Kind(
        "get_many",
        "Get of 1,000 keys",
        _keys(1000, 2),
        lambda table, keys, level: table.get(keys, columns=WHOLE, level=level),
        {"LsmScanner, id IN (…)": _look_up_all},
    ),
    _Kind(
        "scan_btree",
        "Scan, filter on a B-tree column, 0.1 % pass",
        _between("price", 0.001, PRICES),
        lambda table, passing, level: table.scan(WHOLE, filter=passing, level=level).read_all(),
        {"LsmScanner": _filtered},
    ),
    _Kind(
        "scan_plain",
        "Scan, filter on a column without an index, 1 % pass",
        _between("weight", 0.01, 1.0),
        lambda table, passing, level: table.scan(WHOLE, filter=passing, level=level).read_all(),
        {"LsmScanner": _filtered},
    ),
    _Kind(
        "range_ordered",
        "Range of the key, 0.1 % of the base, in order",
        _between(KEY, 0.001),
        lambda table, passing, level: table.scan(WHOLE, filter=passing, order_by=KEY, level=level).read_all(),
        {"LsmScanner, sorted by Arrow": lambda table, passing: _filtered(table, passing).sort_by(KEY)},
    ),
    _Kind(
        "count",
        "Count, filter on a B-tree column, 10 % pass",
        _between("price", 0.1, PRICES),
        lambda table, passing, level: _number(table.count(passing, level=level)),
        {"LsmScanner": _counted},
    ),
    _Kind(
        "search",
        "Vector search, k = 10",
        _vectors,
        lambda table, vector, level: table.search("vector", vector, k=K, columns=FOUND, level=level),
        {"LsmVectorSearchPlanner": _nearest_by_lance({}), "refined": _nearest_by_lance(REFINED)},
        _approximate,
        judge=_recall,
    ),
    _Kind(
        "match",
        "Text match, k = 10",
        _texts,
        lambda table, text, level: table.match("body", text, k=K, columns=FOUND, level=level),
        {"LanceDataset, the base alone": _matched},
        _scores_found,
        ("committed", "flushed", "latest"),
        by_hand={"base and SSTs one by one": _matched_one_by_one},
    ),
    _Kind(
        "hybrid",
        "Hybrid search, k = 10",
        _both,
        lambda table, both, level: table.hybrid(*both, k=K, columns=FOUND, level=level),
        {},
        _approximate,
        judge=_recall_of_both,
    ),
)


def lines(result: BenchmarkResult) -> Iterator[str]:
    """Yield a result as text: the median of each way, and memwal's ratio to each of Lance's."""
    yield f"{result.name}  {result.title}"
    for each in result.contenders:
        measures = "".join(f"   {name} {number:.3f}" for name, number in each.measures().items())
        yield f"  {each.name:<36}{each.median('p50_ms'):>10.2f} ms (p99 {each.median('p99_ms'):.2f}){measures}"
    lance = [each for each in result.contenders if each.side == "lance"]
    for ours in (each for each in result.contenders if each.side == "memwal"):
        for theirs in lance:
            ratios = sorted(b.p50_ms / a.p50_ms for a, b in zip(ours.rounds, theirs.rounds, strict=True))
            shown = f"{median(ratios):.2f} x ({ratios[0]:.2f} - {ratios[-1]:.2f})"
            yield f"  {ours.name} is {shown} as fast as {theirs.name}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, or all, and print the results; return 1 if the sides returned different rows."""
    parser = argparse.ArgumentParser("python -m bench.reads")
    parser.add_argument("names", nargs="*", choices=[[], *(each.name for each in _KINDS)])
    parser.add_argument("--smoke", action="store_true", help="tiny values: does it run at all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="processor time in place of time")
    parser.add_argument("--workdir", type=Path, default=Path(__file__).resolve().parent.parent / "build")
    given = parser.parse_args(arguments)
    given.workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.workdir, prefix="bench-") as directory:
        at, clock = Path(directory), time.process_time if given.processor else time.perf_counter
        with closing(Shared(at / "table", clock)) as shared:
            for kind in _KINDS:
                if given.names and kind.name not in given.names:
                    continue
                try:
                    result = run(kind.benchmark(shared), at / "rounds", smoke=given.smoke, rounds=given.rounds)
                except ResultsDiffer as error:
                    print(f"bench: {error}", file=sys.stderr)
                    return 1
                print("\n".join(lines(result)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
