"""Reading needs no claim: a reader reads the storage as it is, and finds daemons by the table's own notes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import memwal
from tests.conftest import INDEXES, SCHEMA, Cli, OpenSmall, Serve, SmallConfig, Tree
from tests.messages import raises

LEVELS = ("committed", "flushed", "durable", "latest")


def layers(table: Any, made: Any) -> dict[str, int]:
    """Fill the levels of `table`; return the number of rows that each level shows."""
    table.put(made.rows(range(10)))
    table.flush()
    table.commit()
    table.put(made.rows(range(10, 14)))
    table.flush()
    table.put(made.rows(range(14, 16)))
    return {"committed": 10, "flushed": 14, "durable": 16, "latest": 16}


def test_every_level_of_a_table_that_is_open_elsewhere(open_small: OpenSmall, made: Any, uri: str, tree: Tree) -> None:
    writer = open_small()
    expected = layers(writer, made)
    before = tree(Path(uri))
    with memwal.open(uri, read_only=True) as table:
        assert {level: table.count(level=level) for level in LEVELS} == expected
        assert table.get([15], ["name"]).to_pylist() == [{"name": "row 15 v0"}]
        vector = made.row(12)["vector"]
        assert table.search("vector", vector, 1, columns=["id"]).to_pylist()[0]["id"] == 12
        assert [region["owner"] for region in table.status()["regions"]] == [None, None]
        writer.put(made.rows([99]))
        assert table.count() == 17, "a later read sees what was acked since"
    assert writer.put(made.rows([100])).rows == 1, "nothing was fenced"
    after = tree(Path(uri))
    assert {name for name in after if name not in before and "/wal/" not in name} == set(), "nothing was written"


@pytest.mark.parametrize("call", [("put", []), ("delete", [1]), ("flush",), ("commit",)])
def test_what_would_write_says_how(call: Any, open_small: OpenSmall, uri: str) -> None:
    open_small().close()
    table = memwal.open(uri, read_only=True)
    with raises(memwal.Invalid):
        getattr(table, call[0])(*call[1:])


def test_arguments_are_checked_as_for_writing(open_small: OpenSmall, uri: str, tmp_path: Path) -> None:
    open_small().close()
    with raises(memwal.Invalid):
        memwal.open(uri, key="name", read_only=True)
    with raises(memwal.Invalid):
        memwal.open(uri, read_only=True, take_over=True)
    absent = tmp_path / "absent.lance"
    with raises(memwal.Invalid):
        memwal.open(absent, schema=SCHEMA, key="id", indexes=INDEXES, read_only=True)
    assert not absent.exists()


def test_daemons_are_found_by_the_address_of_the_table(
    small_config: SmallConfig, serve: Serve, made: Any, uri: str
) -> None:
    config = small_config()
    running, endpoint = serve(config)
    with memwal.connect(uri) as table:
        assert table.endpoint == endpoint
        table.put(made.rows(range(3)), durable=False)
        assert table.count() == 3
        running.kill()
        _, again = serve(config)
        assert again != endpoint
        assert table.put(made.rows(range(5)), token="loader:1").rows == 5, "the next one is found by its notes"


def test_nobody_serves_it(open_small: OpenSmall, made: Any, uri: str) -> None:
    with open_small() as writer:
        expected = layers(writer, made)
        with raises(memwal.Unavailable):
            memwal.connect(uri)
        with closing(memwal.connect(uri, fallback="durable")) as table:
            with raises(memwal.Invalid):  # it reads storage
                table.flush()
            assert {level: table.count(level=level) for level in LEVELS} == expected
    with raises(memwal.Unavailable):
        memwal.connect(uri)


def test_a_stale_note_is_not_believed(open_small: OpenSmall, made: Any, uri: str) -> None:
    writer = open_small()
    writer.put(made.rows(range(3)))
    writer.announce("grpc://127.0.0.1:1")
    with raises(memwal.Unavailable):
        memwal.connect(uri)
    assert memwal.connect(uri, fallback="durable").count() == 3


def test_the_command_line_and_the_library_answer_alike(
    open_small: OpenSmall, made: Any, uri: str, small_config: SmallConfig, cli: Cli
) -> None:
    layers(open_small(), made)
    ran = cli("query", small_config(), "--limit", "100", "--columns", "id", "--format", "json")
    told = sorted(row["id"] for row in json.loads(ran.out))
    with memwal.connect(uri, fallback="durable") as table:
        assert told == sorted(table.scan(["id"]).read_all()["id"].to_pylist()) == list(range(16))


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("localhost 80", {}),
        ("localhost:8000", {}),
        ("http://localhost:8000", {}),
        ("grpc://127.0.0.1:1", {"fallback": "durable"}),
        ("grpc://127.0.0.1:1", {"fallback": "latest"}),
    ],
)
def test_locations_that_are_none(location: str, options: dict[str, Any]) -> None:
    with raises(memwal.Invalid):
        memwal.connect(location, **options)
