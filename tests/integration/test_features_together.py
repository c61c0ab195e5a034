"""Write rules, tables without a key, and columns that another program changes, all at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import memwal
from memwal.ingest.engine.read.levels import Reshaped
from memwal.ingest.engine.read.reader import Reader
from tests.append_rows import clean

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("a", pa.int64()), pa.field("b", pa.string())])
BY_HAND = {"commit": {"interval": "0s"}, "gc": {"interval": "0s"}}


def opened(uri: str, *, key: Any = "id", **table: Any) -> Any:
    settings = {**BY_HAND, "table": table}
    fresh = {"schema": SCHEMA, "key": key, "regions": 2} if not Path(uri).exists() else {}
    return memwal.open(uri, settings=settings, **fresh)


def change(uri: str) -> None:
    """Rename b to d, add c."""
    dataset = lance.dataset(uri)
    dataset.add_columns(pa.schema([("c", pa.float64())]))
    dataset.alter_columns({"path": "b", "name": "d"})


def row_of(table: Any, key: int) -> dict[str, Any]:
    (found,) = table.get([key]).to_pylist()
    return dict(found)


@pytest.mark.parametrize("published", [False, True])
def test_what_is_stored_under_other_columns_is_merged_with(published: bool, uri: str) -> None:
    with opened(uri, upsert="merge") as table:
        table.put([{"id": n, "a": n, "b": f"b{n}"} for n in range(20)])
        if published:
            table.flush()
        change(uri)
        table.put([{"id": n, "a": -n} for n in range(10)])
        assert row_of(table, 3) == {"id": 3, "a": -3, "d": "b3", "c": None}
        table.put([{"id": 3, "c": 0.5}, {"id": 40, "c": 1.5}])
        assert row_of(table, 3) == {"id": 3, "a": -3, "d": "b3", "c": 0.5}
        assert row_of(table, 40) == {"id": 40, "a": None, "d": None, "c": 1.5}
        table.put([{"id": 3, "d": "new"}])
        table.flush()
        table.commit()
        assert row_of(table, 3) == {"id": 3, "a": -3, "d": "new", "c": 0.5}
        assert row_of(table, 15) == {"id": 15, "a": 15, "d": "b15", "c": None}
    clean(uri)


def test_a_key_that_is_stored_under_other_columns_is_found(uri: str) -> None:
    with opened(uri, upsert="insert") as table:
        table.put([{"id": n, "a": n, "b": f"b{n}"} for n in range(20)])
        change(uri)
        receipt = table.put([{"id": n, "a": -n, "d": "other", "c": 1.0} for n in range(10, 30)])
        assert (receipt.rows, receipt.skipped) == (20, 10)
        assert row_of(table, 12) == {"id": 12, "a": 12, "d": "b12", "c": None}
        assert row_of(table, 25) == {"id": 25, "a": -25, "d": "other", "c": 1.0}
    clean(uri)


def test_a_region_that_meets_other_columns_writes_again_when_another_has_written(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, get = [], Reader.get

    def meets_others_once(reader: Reader, *given: Any, **more: Any) -> Any:
        if not met:
            met.append(given)
            raise Reshaped
        return get(reader, *given, **more)

    with opened(uri, upsert="insert") as table:
        table.put([{"id": n, "a": n, "b": f"b{n}"} for n in range(20)])
        monkeypatch.setattr(Reader, "get", meets_others_once)
        receipt = table.put([{"id": n, "a": -n, "b": "other"} for n in range(10, 30)])
        monkeypatch.undo()
        assert met
        assert (receipt.rows, receipt.skipped, len(receipt.positions)) == (20, 10, 2)
        assert table.count() == 30
        assert (row_of(table, 12)["a"], row_of(table, 25)["a"]) == (12, -25)
    clean(uri)


def test_rows_without_a_key_stay_where_they_are_sent(uri: str) -> None:
    with opened(uri, key=(), append_only=True) as table:
        table.put([{"id": n, "a": 1, "b": f"b{n}"} for n in range(50)], token="t:1")
        table.flush()
        table.put([{"id": n, "a": 2, "b": f"b{n}"} for n in range(50)], token="t:2")
        change(uri)
        assert table.count() == 100
        # The same rows under the new names route to the same regions, which know their tokens as applied.
        table.put([{"id": n, "a": 2, "d": f"b{n}", "c": 0.25} for n in range(50)], token="t:2")
        table.put([{"id": n, "a": 3, "d": f"b{n}", "c": 0.5} for n in range(50)], token="t:3")
        table.flush()
        clean(uri)
        table.commit()
        table.commit()
        counted = Counter((row["a"], row["d"], row["c"]) for row in table.scan().read_all().to_pylist())
        expected = [(a, f"b{n}", 0.5 if a == 3 else None) for n in range(50) for a in (1, 2, 3)]
        assert counted == Counter(expected)
    clean(uri)
    lance.dataset(uri).drop_columns(["a"])
    with opened(uri) as table:
        table.put([{"id": 1, "d": "after", "c": None}])
        table.flush()
        table.commit()
        assert table.count() == 151
    clean(uri)
