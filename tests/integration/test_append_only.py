"""Tables without a key, from the outside: every row exactly once, also equal rows, at every level, after every step."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal
from memwal import flush
from memwal.flush import BaseTable
from memwal.flush.verification.runner import verify_table
from memwal.ingest.engine.table.stored import StoredTable
from memwal.wal import SystemClock, open_store
from tests import fault_proxy as faults
from tests.append_rows import QUIET, SCHEMA, WIDTH, clean, counted, opened, rows
from tests.messages import raises
from tests.support.together import together

LEVELS = ("committed", "flushed", "durable", "latest")


def test_every_row_once_at_every_level_after_every_step(uri: str) -> None:
    oracle: Counter[int | None] = Counter()
    put: list[int | None] = [1, 1, 1, None, None, *range(40)]
    with opened(uri, 4) as table:
        for step in (table.flush, table.commit, table.flush, lambda: None):
            for _ in range(2):
                assert table.put(rows(put)).rows == len(put)
                oracle.update(put)
            assert counted(table) == counted(table, "durable") == oracle
            step()
            assert counted(table) == counted(table, "durable") == oracle
            clean(uri)
        sizes = [table.count(level=level) for level in LEVELS]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) == 3  # all but durable and latest differ
        stored = StoredTable(BaseTable.open(uri), open_store(uri, None))
        assert counted(stored, "durable") == oracle
    with opened(uri) as table:
        assert counted(table) == oracle
        table.flush()
        table.commit()
        assert counted(table, "committed") == oracle
        assert Counter(lance.dataset(uri).to_table().column("n").to_pylist()) == oracle
    clean(uri)


def test_reads_by_filter_vector_and_text_see_equal_rows_of_every_level(uri: str) -> None:
    with opened(uri, 2) as table:
        for steps in ((table.flush, table.commit), (table.flush,), (table.flush,), ()):
            table.put(rows([7, *range(300, 400)]))
            for step in steps:
                step()
        for level, expected in zip(LEVELS, (1, 3, 4, 4), strict=True):
            assert table.count("n = 7", level=level) == expected
            assert table.scan(["n"], "n = 7", level=level).read_all().num_rows == expected
            assert table.scan(["n"], limit=5, level=level).read_all().num_rows == 5
            near = table.search("vector", [7.0] * WIDTH, 10, columns=["n", "body"], level=level)
            assert near.column("n").to_pylist().count(7) == expected
            assert table.match("body", "word7", 50, level=level).num_rows == expected
            assert table.match("body", "harbor", 3, "n = 7", level=level).num_rows == min(3, expected)


def test_a_token_counts_once_whatever_comes_between(uri: str) -> None:
    with opened(uri, 3) as table:
        for sequence in (1, 1, 2, 2, 1):
            table.put(rows([1, 2, 3]), token=f"source:{sequence}")
        assert counted(table) == {1: 2, 2: 2, 3: 2}
        table.flush()
        table.commit()
    with opened(uri) as table:
        assert not table.put(rows([1, 2, 3]), token="source:2").applied
        assert table.put(rows([1, 2, 3]), token="source:3").applied
        assert counted(table) == {1: 3, 2: 3, 3: 3}


def test_a_newer_owner_takes_over_every_row(uri: str) -> None:
    with opened(uri, 2) as first:
        first.put(rows([1, 1, *range(50)]))
        first.flush()
        first.put(rows([1, *range(50)]))
        with opened(uri) as second:
            with pytest.raises(memwal.FencedError):
                first.put(rows([5]))
            second.put(rows([1]))
            second.flush()
            second.commit()
            assert counted(second) == Counter([1, 1, *range(50), 1, *range(50), 1])
    clean(uri)


def test_tiny_limits_and_many_threads(uri: str) -> None:
    """Puts exceed every limit, commits run at the same time, and each put is sent twice."""
    tiny = {
        "memtable": {"rows_max": 40, "size_max": "1MiB", "unflushed_max": "64MiB"},
        "wal": {"entry_size_max": "2KiB", "linger_max": "5ms"},
        "commit": {"interval": "100ms"},
    }
    with opened(uri, 3, **tiny) as table:

        def puts(producer: int) -> None:
            for sequence in range(12):
                part = rows([producer, *range(100, 110)])
                for _ in range(2):
                    table.put(part, token=f"p{producer}:{sequence}", durable=bool(sequence % 3))

        together(*(partial(puts, producer) for producer in range(4)))
        expected = Counter({**dict.fromkeys(range(4), 12), **dict.fromkeys(range(100, 110), 48)})
        assert counted(table) == expected
    with opened(uri, commit={"interval": "0s"}) as table:
        assert counted(table) == expected
        table.flush()
        table.commit()
        assert counted(table, "committed") == expected
    clean(uri)


def test_rows_are_spread_by_the_columns_that_are_named(uri: str) -> None:
    with opened(uri, 4, regions={"by": ["body"]}) as table:
        table.put(rows([5] * 20))
        table.put(rows(range(40)))
        table.flush()
        filled = [region["ssts"] for region in table.status()["regions"]]
        assert sum(sst["rows"] for ssts in filled for sst in ssts) == 60
        assert all(filled)
        region = np.flatnonzero(np.bincount(table.base.route(rows([5] * 3)), minlength=4))
        assert len(region) == 1
    assert BaseTable.open(uri).append_by == ("body",)


def test_columns_come_go_and_are_renamed_meanwhile(uri: str) -> None:
    """Another program changes columns while rows are in an SST and in the log; only the routing columns must stay."""
    with opened(uri, 3, regions={"by": ["n"]}) as table:
        table.put(rows([1, 1]))
        table.flush()
        table.commit()
        table.put(rows(range(20)))
        table.flush()
        table.put(rows([1, *range(20)]))
    dataset = lance.dataset(uri)
    dataset.drop_columns(["vector"])
    dataset.add_columns(pa.schema([("more", pa.int32())]))
    expected = Counter([1, 1, *range(20), 1, *range(20)])
    with opened(uri) as table:
        assert counted(table) == expected
        table.put(pa.table({"n": [1], "more": [5]}))
        table.flush()
        table.commit()
        assert counted(table, "committed") == expected + Counter([1])
        assert table.scan(["more"], "more = 5").read_all().num_rows == 1
    clean(uri)
    lance.dataset(uri).drop_columns(["n"])
    with raises(memwal.Invalid):
        opened(uri)


# ---- invalid calls -------------------------------------------------------------------------------------------------


def test_keys_are_refused_in_one_line(uri: str) -> None:
    with opened(uri, 1) as table:
        table.put(rows([1]))
        for ask in (
            lambda: table.get([1]),
            lambda: table.delete([1]),
            lambda: table.delete(filter="n = 1"),
            lambda: table.get(pa.table({"n": [1]})),
        ):
            with raises(memwal.Invalid):
                ask()
        assert table.count() == 1


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forgotten": ({}, {}),
    "empty list": ({"key": []}, {}),
    "both": ({"key": "n"}, {"table": {"append_only": True}}),
    "unknown column": ({"key": ()}, {"regions": {"by": ["boddy"]}}),
    "vector": ({"key": ()}, {"regions": {"by": ["vector"]}}),
    "twice": ({"key": ()}, {"regions": {"by": ["n", "n"]}}),
    "by with a key": ({"key": "n"}, {"regions": {"by": ["n"]}}),
    "arrow": ({"key": ()}, {"wal": {"format": "arrow"}}),
    "inserts": ({"key": ()}, {"table": {"upsert": "insert"}}),
    "merges": ({"key": ()}, {"table": {"upsert": "merge"}}),
    "the first of equal keys": ({"key": ()}, {"table": {"on_duplicate": "first"}}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_nothing_is_made(name: str, uri: str) -> None:
    arguments, sections = MISTAKES[name]
    with raises(memwal.Invalid):
        memwal.open(uri, schema=SCHEMA, settings=sections, **arguments)
    assert not Path(uri).exists() or not list(Path(uri).iterdir())


def test_a_table_keeps_what_it_was_made_as(uri: str, tmp_path: Path) -> None:
    opened(uri, 1).close()
    keyed = str(tmp_path / "keyed")
    memwal.open(keyed, schema=pa.schema([pa.field("n", pa.int64(), nullable=False)]), key="n").close()
    with raises(memwal.Invalid):
        memwal.open(uri, key="n")
    with raises(memwal.Invalid):
        memwal.open(keyed, key=())
    with raises(memwal.Invalid):
        memwal.open(uri, key=(), settings={"regions": {"by": ["n"]}})
    memwal.open(uri, key=()).close()


# ---- S3 ------------------------------------------------------------------------------------------------------------


def on_s3(at: Any) -> Any:
    uri, options = at
    return memwal.open(uri, schema=SCHEMA, key=(), regions=2, storage_options=options, settings=QUIET)


def test_on_s3_committers_at_once_append_once(s3_table: Any) -> None:
    with on_s3(s3_table) as table:
        for n in range(3):
            table.put(rows([1, *range(n, n + 20)]))
            table.flush()

        def commits() -> None:
            store = open_store(*s3_table)
            flush.commit(*s3_table, store, clock=SystemClock(), retries=40, courtesy=0.0, memory_max=1)

        together(commits, commits)
        table.put(rows([1]))
        expected = Counter([1, *range(20), 1, *range(1, 21), 1, *range(2, 22)])
        assert counted(table, "committed") == expected
        assert counted(table) == expected + Counter([1])
    with on_s3(s3_table) as table:
        assert counted(table) == expected + Counter([1])
    uri, options = s3_table
    assert verify_table(open_store(uri, options), uri, deep=True).findings == ()


FAULTS = {
    "answer lost": faults.lands_then_resets(),
    "never arrived": faults.resets(),
    "refused": faults.answers(412, "PreconditionFailed"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_commit_whose_version_got_no_answer_is_there_once(
    s3_table_through_proxy: Any, fault_proxy: Any, fault: Any
) -> None:
    """In the case "answer lost", storage has the new version, and the committer gets no answer."""
    with on_s3(s3_table_through_proxy) as table:
        table.put(rows([1, 1, 2]))
        table.flush()
        fault_proxy.inject(fault, method="PUT", key="_versions/", times=1)
        try:
            table.commit()
        except memwal.MemWalError:
            fault_proxy.heal()
            table.commit()
        assert counted(table, "committed") == counted(table) == {1: 2, 2: 1}
        assert table.base.latest().committed == table.base.latest().marked
