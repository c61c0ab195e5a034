"""Cut micro-batches off between two of their Arrow batches, and compare the table after each.

A micro-batch of 2,000 rows is 50 batches. A stage in Spark's plan passes the first k batches to the sink's task and
waits (`tests.pausing`); then the query is stopped, or its job is cancelled, or the worker that feeds the task is
killed, or its executor. The query is started again from its checkpoint: every row must be in the table once, every bad
row once among the letters.

`python -m tests.cut_short --rounds 200 --seed 1` goes through boundaries, ways and cases in an order decided by the
seed, for `--longest` seconds at most, and prints a line per round; `--cluster` uses a Spark of two executor processes.
Exit code 1: a row is missing, doubled, or older than it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import lance
import psutil

import memwal
from memwal.flush import BaseTable
from memwal.ingest.engine.table.create import find_or_create
from memwal.ingest.settings.load import Settings, load
from memwal.ingest.spark.errors import found_in, of_spark
from memwal.ingest.spark.pipeline.checks import written_schema
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.sink import foreach_batch as spark_sink
from memwal.ingest.spark.sink.foreach_batch import MemWalSink
from memwal.ingest.spark.source.stream import read_stream
from tests.chaos import CLUSTER
from tests.cluster import spread, start_daemon
from tests.conftest import ROOT, starter, toml, wait_until
from tests.pausing import Pausing, Seen, Waiting, WatchedOne, WatchedSend, seen

ROWS, BATCH = 2000, 40
BATCHES = ROWS // BATCH
FIRST_BAD, BAD_EVERY = ROWS // 4, 10
"""With letters every tenth row is bad, except in the first quarter, so that the one task of a small micro-batch
may have only good rows when it is cut."""
REGIONS = 2
COLUMNS = {"id": "int64", "name": "string", "price": "int64"}
SPARK = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH),
    # A batch is larger than this, so the JVM sends each at once; with its default it would keep some ten of them back.
    "spark.sql.execution.pandas.udf.buffer.size": "1024",
    "spark.deploy.maxExecutorRetries": "-1",
}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.task.duration.threshold": "1s",
}
"""A task that takes longer than a second is started a second time in parallel, in a cluster on another host."""
_ENDS_WITHIN = 120.0

ONE_TASK, ROUTE, SEND = "one task", "before the shuffle", "behind the shuffle"
"""What is cut: the one task of a small micro-batch; the first, or the second, of the two tasks of a large one."""
TASKS = {ONE_TASK: {"OneTask"}, ROUTE: set[str](), SEND: {"SendTask"}}
"""The sink's tasks that send rows, by what is cut: before the shuffle none has begun."""


@dataclass(frozen=True)
class Case:
    """One kind of micro-batches."""

    where: str
    append: bool = False
    """Whether the table has no key."""
    letters: bool = False
    daemons: int = 0
    """Number of configured daemons; 0: a child daemon, a new one after every cut."""
    without_paths: bool = False
    """Whether rows come without the paths of their files; one task only."""

    def __str__(self) -> str:
        table = "append_only" if self.append else "keyed"
        daemons = f"{self.daemons} daemons" if self.daemons else "child daemon"
        return ", ".join(
            [self.where, table, daemons, *["letters"] * self.letters, *["without_paths"] * self.without_paths]
        )


CASES = tuple(
    Case(where, append, letters, daemons, without_paths)
    for where, append, letters, daemons, without_paths in product(
        (ONE_TASK, ROUTE, SEND), (False, True), (False, True), (0, 2), (False, True)
    )
    if not without_paths or (where == ONE_TASK and not letters)
)


# ---- ways ------------------------------------------------------------------------------------------------------------


def stop(query: Any, feeding: psutil.Process) -> None:
    """Stop the query, as a user does, or SIGTERM to `memwal run`."""
    query.stop()


def cancel(query: Any, feeding: psutil.Process) -> None:
    """Cancel the job, as Spark's page of jobs does."""
    from pyspark import SparkContext

    SparkContext.getOrCreate().cancelAllJobs()


def kill_worker(query: Any, feeding: psutil.Process) -> None:
    """Send SIGKILL to the Python worker that feeds the sink's task, as the kernel does if memory runs out."""
    feeding.kill()


def kill_executor(query: Any, feeding: psutil.Process) -> None:
    """Send SIGKILL to the JVM of the task; the driver lives, and another executor repeats the task."""
    executor = next(each for each in feeding.parents() if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline()))
    executor.kill()


Way = Callable[[Any, psutil.Process], None]
WAYS: Mapping[str, Way] = {"stop": stop, "cancel": cancel, "kill worker": kill_worker}
ON_CLUSTER: Mapping[str, Way] = {**WAYS, "kill executor": kill_executor}


# ---- one table -------------------------------------------------------------------------------------------------------


class Scene:
    """A source, a table and its daemons below `directory`, and the rows that the table must have."""

    def __init__(self, spark: Any, directory: Path, case: Case, start: Callable[..., Any]) -> None:
        """Create the table with a small micro-batch. `spark`: from `cut_spark`; `start`: as the fixture."""
        self.spark, self.directory, self.case = spark, directory, case
        (directory / "in").mkdir()
        (directory / "marks").mkdir()
        endpoints = spread(case.daemons, REGIONS) if case.daemons else []
        config = directory / "config.toml"
        config.write_text(toml(self._sections(endpoints)))
        self.settings: Settings = load(config, {})
        self.rows: Counter[tuple[int, str, int]] = Counter()
        self.letters: Counter[str] = Counter()
        self._newest: dict[int, tuple[int, str, int]] = {}
        self._landed = self._cuts = 0
        find_or_create(self.settings, {})
        for daemon in [start_daemon(start, config, each) for each in endpoints]:
            daemon.line_with("serving")
        self.sink = self._new_sink()
        self._land(BATCH)
        self.run()

    def _sections(self, endpoints: list[str]) -> dict[str, dict[str, Any]]:
        key = {"append_only": True} if self.case.append else {"key": ["id"]}
        return {
            "table": {"uri": str(self.directory / "table.lance"), "columns": COLUMNS, **key},
            "regions": {"count": REGIONS},
            "source": {"format": "json", "path": str(self.directory / "in"), "files_per_trigger": 1},
            "commit": {"interval": "0s"},
            "dlq": {"mode": "table" if self.case.letters else "fail"},
            "daemon": {"endpoints": endpoints} if endpoints else {},
        }

    def cut(self, boundary: int, way: Way) -> list[Seen]:
        """Land a micro-batch, end it when its task has `boundary` batches, and return the sink's tasks, all ended."""
        pausing = self._landed_for(boundary)
        with self._paused(pausing):
            query = self._started(pausing)
            try:
                way(query, self._cut_off(query, pausing).worker)
                with suppress(Exception):  # the error depends on the way
                    query.awaitTermination(_ENDS_WITHIN)
                assert not query.isActive
            finally:
                pausing.release()
                query.stop()
            return self._over(pausing)

    def run_twice(self, boundary: int, *, race: bool) -> list[Seen]:
        """Land a micro-batch whose task waits at `boundary` until Spark runs a copy of it (`SPECULATION`); return the
        sink's tasks, all ended.

        `race`: the task then continues beside its copy; otherwise Spark kills it when the copy is done.
        """
        pausing = self._landed_for(boundary)
        with self._paused(pausing):
            query = self._started(pausing)
            try:
                self._cut_off(query, pausing)
                if race:
                    wait_until(lambda: len(seen(Path(pausing.place))) > 1)
                    pausing.release()
                assert query.awaitTermination(_ENDS_WITHIN)
            finally:
                pausing.release()
                query.stop()
            return self._over(pausing)

    def _landed_for(self, boundary: int) -> Pausing:
        self._land(ROWS)
        self._cuts += 1
        place = self.directory / "marks" / str(self._cuts)
        place.mkdir()
        return Pausing(boundary, str(place))

    def _over(self, pausing: Pausing) -> list[Seen]:
        place = Path(pausing.place)
        wait_until(lambda: all(each.over for each in seen(place)))
        return seen(place)

    def _cut_off(self, query: Any, pausing: Pausing) -> Waiting:
        """Return where `pausing` waits, once the sink's task has all batches passed on; then let the other tasks
        continue."""

        def waits() -> Waiting | None:
            assert query.isActive, f"the query is over: {query.exception()}"
            waiting = pausing.waits()
            came = {each.came for each in seen(Path(pausing.place))}
            return waiting if waiting and (self.case.where == ROUTE or waiting.handed in came) else None

        found: Waiting = wait_until(waits)
        pausing.let_others()
        return found

    def resume(self, *, anew: bool = True) -> None:
        """Process what is left, as the next start of the same program does, or (not `anew`) with the same sink."""
        if anew:
            self.sink.close()
            self.sink = self._new_sink()
        self.run()

    def run(self) -> None:
        """Process all available rows. Raises: the error that ended the query."""
        query = self._started()
        try:
            assert query.awaitTermination(_ENDS_WITHIN)
        except Exception as error:
            raise (self.sink.failure or of_spark(error)) from error
        finally:
            query.stop()

    def check(self) -> None:
        """Compare the table, and its dead letters, with the landed rows."""
        with memwal.connect(self.settings.table.uri) as table:
            stored = table.scan(list(COLUMNS)).read_all().to_pylist()
        rows = Counter((row["id"], row["name"], row["price"]) for row in stored)
        letters: Counter[str] = Counter()
        if Path(self.settings.dead_letters).exists():
            raw = lance.dataset(self.settings.dead_letters).to_table(columns=["raw_value"])["raw_value"].to_pylist()
            letters.update(each.decode() for each in raw)
        wrong = [difference("rows", rows, self.rows), difference("letters", letters, self.letters)]
        assert not any(wrong), "; ".join(filter(None, wrong))

    def close(self) -> None:
        """End the child daemon; the starter ends configured ones."""
        self.sink.close()

    def _new_sink(self) -> MemWalSink:
        return MemWalSink(self.settings, tasks=1)  # all batches pass one task after the shuffle too

    def _land(self, count: int) -> None:
        """Write a file of `count` rows; if the table has a key, half of them update keys of the file before."""
        number = self._landed
        self._landed += 1
        first = number * (ROWS if self.case.append else ROWS // 2)
        lines = []
        for row in range(count):
            if self.case.letters and row >= FIRST_BAD and row % BAD_EVERY == 0:
                lines.append(f"no JSON {number}:{row}")
                self.letters[lines[-1]] += 1
            else:
                id = first + row
                lines.append(json.dumps({"id": id, "name": f"row {id} v{number}", "price": id + number}))
                self._expect((id, f"row {id} v{number}", id + number))
        hidden = self.directory / "in" / ".coming"
        hidden.write_text("\n".join(lines) + "\n")
        hidden.rename(hidden.with_name(f"{number:03d}.json"))

    def _expect(self, row: tuple[int, str, int]) -> None:
        if not self.case.append and row[0] in self._newest:
            del self.rows[self._newest[row[0]]]
        self._newest[row[0]] = row
        self.rows[row] += 1

    def _started(self, pausing: Pausing | None = None) -> Any:
        schema = written_schema(self.settings, BaseTable.open(self.settings.table.uri))
        frame = read_stream(self.spark, self.settings.source, schema).frame
        if pausing is not None and self.case.where != SEND:
            frame = frame.mapInArrow(pausing, frame.schema)
        checkpoint = str(self.directory / "checkpoint")
        writer = frame.writeStream.foreachBatch(self.sink).option("checkpointLocation", checkpoint)
        return writer.trigger(availableNow=True).start()

    @contextmanager
    def _paused(self, pausing: Pausing) -> Iterator[None]:
        """Watch the sink's tasks; pass the shuffle's output through `pausing` if that is to be cut."""
        routed_frame = spark_sink.routed_frame

        def through(*given: Any) -> Any:
            frame = routed_frame(*given)
            return frame.mapInArrow(pausing, frame.schema) if self.case.where == SEND else frame

        self.sink._small = None if self.case.where == ONE_TASK else 0
        with (
            mock.patch.object(spark_sink, "routed_frame", through),
            mock.patch.object(spark_sink, "OneTask", partial(WatchedOne, place=pausing.place)),
            mock.patch.object(spark_sink, "SendTask", partial(WatchedSend, place=pausing.place)),
            mock.patch.object(spark_sink, "WITHOUT_PATHS_FROM", 0 if self.case.without_paths else ROWS + 1),
        ):
            yield


def difference(what: str, found: Counter[Any], expected: Counter[Any]) -> str:
    """Describe the difference in a line; "" if both are equal."""
    missing, more = expected - found, found - expected
    if not missing and not more:
        return ""
    examples = [str(each) for each in (*list(missing)[:2], *list(more)[:2])]
    return f"{missing.total()} {what} are missing, {more.total()} should not be there: {', '.join(examples)}"


def cut_spark(directory: Path, master: str = "local[2]", more: Mapping[str, str] | None = None) -> Any:
    """Start a Spark whose micro-batches of 2,000 rows are 50 batches. `directory`: any absolute one. `more`: additional
    configuration.
    """
    spark = {**SPARK, "spark.master": master, **(more or {})}
    settings = load({"table": {"uri": str(directory)}, "source": {"spark": spark}}, {})
    return start_session(configuration(settings, REGIONS, once=True))


# ---- at length -------------------------------------------------------------------------------------------------------


def rounds(ways: Mapping[str, Way], seed: int) -> list[tuple[Case, int, str]]:
    """Return every combination of case, boundary and way, in an order decided by the seed."""
    every = list(product(CASES, range(BATCHES + 1), ways))
    random.Random(seed).shuffle(every)
    return every


def said_of(spark: Any, directory: Path, case: Case, boundary: int, way: Way, *, anew: bool) -> tuple[bool, str]:
    """Run one round; return whether it succeeded, and a description."""
    with ExitStack() as stack:
        scene = Scene(spark, directory, case, stack.enter_context(contextmanager(starter)()))
        stack.callback(scene.close)
        try:
            tasks = scene.cut(boundary, way)
            scene.resume(anew=anew)
            scene.check()
        except (AssertionError, memwal.MemWalError) as error:
            return False, str(error)
    return True, "; ".join(map(how_it_ended, tasks)) or "no task of the sink had begun"


def how_it_ended(task: Seen) -> str:
    """Describe the end of a task."""
    error = found_in(task.how)
    return f"{task.name} had {task.came} and {f'raised {error.kind}: {error}' if error else task.how or 'died'}"


def main() -> int:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=3600.0, help="seconds behind which no round begins")
    parser.add_argument("--cluster", action="store_true", help="two executors; these are killed too")
    given = parser.parse_args()
    os.chdir(ROOT)
    ways = ON_CLUSTER if given.cluster else WAYS
    chance, began = random.Random(given.seed), time.monotonic()
    bad = done = 0
    with tempfile.TemporaryDirectory(prefix="memwal-cut-") as root:
        spark = cut_spark(Path(root), CLUSTER if given.cluster else "local[2]")
        for case, boundary, name in rounds(ways, given.seed)[: given.rounds]:
            if time.monotonic() - began > given.longest:
                break
            directory, anew = Path(root) / str(done), chance.random() < 0.5
            directory.mkdir()
            good, said = said_of(spark, directory, case, boundary, ways[name], anew=anew)
            done, bad = done + 1, bad + (not good)
            again = "a new sink" if anew else "the same sink"
            print(f"{done:4d} {'ok ' if good else 'BAD'} {boundary:2d} {name}; {again}; {case}: {said}", flush=True)
            shutil.rmtree(directory, ignore_errors=True)
        spark.stop()
    print(f"{done} rounds by the seed {given.seed}, {bad} of them bad, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
