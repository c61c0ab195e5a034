"""Tables that an earlier version wrote are opened, read, written, committed and verified."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

import memwal
from memwal import wal
from memwal.flush.verification.runner import verify_table
from tests.golden_tables import (
    ARCHIVES,
    CHANGED,
    COMMITTED,
    DELETED,
    FLUSHED,
    KINDS,
    LOGGED,
    TOKEN,
    Kind,
    rows,
)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def uri(kind: Kind, tmp_path: Path) -> str:
    with tarfile.open(ARCHIVES / f"{kind.name}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    return str(tmp_path / "table")


def newest(kind: Kind) -> list[dict[str, object]]:
    """Return every row at its newest version, by id."""
    found = {row["id"]: row for ids in (COMMITTED, FLUSHED, LOGGED) for row in rows(ids).to_pylist()}
    if kind.key == "id":
        found[CHANGED] = rows(range(CHANGED, CHANGED + 1), "changed").to_pylist()[0]
    if kind.key:
        del found[DELETED]
    return [found[id] for id in sorted(found)]


def by_id(table: pa.Table) -> list[dict[str, object]]:
    return table.sort_by("id").to_pylist()


def test_every_level_is_read_from_storage(kind: Kind, uri: str) -> None:
    table = memwal.open(uri, read_only=True)
    assert by_id(table.scan(level="committed").read_all()) == rows(COMMITTED).to_pylist()
    assert by_id(table.scan(level="flushed").read_all()) == [*rows(COMMITTED).to_pylist(), *rows(FLUSHED).to_pylist()]
    assert by_id(table.scan(level="durable").read_all()) == newest(kind)


def test_the_next_owner_goes_on(kind: Kind, uri: str) -> None:
    with memwal.open(uri) as table:
        assert by_id(table.scan().read_all()) == newest(kind)
        assert not table.put(rows(LOGGED), token=TOKEN).applied
        if kind.key:
            assert (
                table.get([kind.key_of(DELETED), kind.key_of(LOGGED.start)]).to_pylist() == rows(LOGGED).to_pylist()[:1]
            )
        if kind.indexes:
            wanted = rows(FLUSHED).to_pylist()[3]
            assert table.search("embedding", wanted["embedding"], k=1)["id"].to_pylist() == [wanted["id"]]
            assert table.match("name", "number333", k=5)["id"].to_pylist() == [333]
        more = range(LOGGED.stop, LOGGED.stop + 20)
        table.put(rows(more))
        table.flush()
        table.commit()
        assert by_id(table.scan(level="committed").read_all()) == [*newest(kind), *rows(more).to_pylist()]
    assert verify_table(wal.open_store(uri), uri, deep=True).findings == ()
