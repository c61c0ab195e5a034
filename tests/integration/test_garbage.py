"""`memwal gc` and the collection an open table does by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ingest
import wal


def entries(uri: str) -> int:
    return len([key for key in wal.open_store(uri).list("_mem_wal/") if wal.layout.parse_entry_key(key)])


def config(tmp_path: Path, uri: str, **gc: str) -> Path:
    path = tmp_path / "gc.toml"
    lines = [f'[table]\nuri = "{uri}"\n[gc]', *(f'{name} = "{value}"' for name, value in gc.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def filled(uri: str, made: Any) -> None:
    """Ten entries, all flushed, then two that are not."""
    with ingest.open(uri, schema=made.schema, key="id", regions=1, settings={"commit": {"interval": "0s"}}) as table:
        for number in range(10):
            table.put(made.rows([number]))
        table.flush()
        for number in range(10, 12):
            table.put(made.rows([number]))


def test_the_command_says_first_and_deletes_then(
    uri: str, made: Any, tmp_path: Path, memwal: Callable[..., Any]
) -> None:
    filled(uri, made)
    path = config(tmp_path, uri, wal_age_min="0s")
    dry = memwal("gc", str(path), "--dry-run")
    assert dry.code == 0
    assert "would delete 10 WAL entries" in dry.out
    assert entries(uri) == 12
    done = memwal("gc", str(path))
    assert "deleted 10 WAL entries" in done.out
    assert entries(uri) == 2
    (region,) = json.loads(memwal("gc", str(path), "--json").out)
    assert (region["entries"], region["boundary"]) == (0, 10)
    with ingest.open(uri) as table:
        assert table.count() == 12


def test_young_entries_stay_by_default(uri: str, made: Any, tmp_path: Path, memwal: Callable[..., Any]) -> None:
    filled(uri, made)
    done = memwal("gc", str(config(tmp_path, uri)))
    assert "deleted 0 WAL entries" in done.out
    assert entries(uri) == 12


def test_no_table_is_one_line(uri: str, tmp_path: Path, memwal: Callable[..., Any]) -> None:
    done = memwal("gc", str(config(tmp_path, uri)))
    assert done.code == 2
    assert len(done.error_lines) == 1
    assert "no table is there" in done.err


def test_an_open_table_collects_by_itself(uri: str, made: Any, wait_until: Callable[..., Any]) -> None:
    settings = {"commit": {"interval": "0s"}, "gc": {"interval": "100ms", "wal_age_min": "0s"}}
    with ingest.open(uri, schema=made.schema, key="id", regions=1, settings=settings) as table:
        for number in range(10):
            table.put(made.rows([number]))
        table.flush()
        wait_until(lambda: entries(uri) == 1)
        table.put(made.rows([10]))
        assert table.count() == 11
    with ingest.open(uri) as again:
        assert again.count() == 11
