"""A daemon and an embedded table that read a damaged log: both name the object, change nothing, and end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memwal
from memwal.wal import bucket_region
from memwal.wal.layout import entry_key
from tests.messages import raises


@pytest.fixture
def damaged(open_small: Callable[..., Any], made: Any, uri: str) -> tuple[Path, bytes]:
    """Flip one bit in the second of three entries; return its path and its former bytes."""
    table = open_small(regions=1)
    for id in range(3):
        table.put(made.table([id]))
    table.close()
    path = Path(uri) / entry_key(bucket_region(0), 2, "lance")
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 4]) + whole[101:])
    return path, whole


def test_a_damaged_entry_stops_the_table_and_is_named(
    damaged: tuple[Path, bytes], open_small: Callable[..., Any], uri: str, tree: Callable[[Path], dict[str, int]]
) -> None:
    path, whole = damaged
    before = tree(Path(uri))
    with raises(memwal.Corrupted):
        open_small()
    after = tree(Path(uri))
    assert {name: after.get(name) for name in before} == before  # nothing was deleted
    path.write_bytes(whole)
    assert open_small().count() == 3


def test_a_reader_names_it_too(damaged: tuple[Path, bytes], small_config: Callable[..., Path], cli: Any) -> None:
    ran = cli("query", small_config(), "--level", "durable", "--filter", "id >= 0")
    assert ran.code == 1
    assert len(ran.error_lines) == 1
    assert damaged[0].name in ran.error_lines[0]


def test_the_daemon_says_so_once_and_ends(
    damaged: tuple[Path, bytes], small_config: Callable[..., Path], cli: Any, uri: str
) -> None:
    ran = cli("serve", small_config(), timeout=300)
    assert ran.code == 1
    assert len(ran.error_lines) == 1
    assert damaged[0].name in ran.error_lines[0]
    claims = list((Path(uri) / "_mem_wal" / str(bucket_region(0)) / "manifest").glob("*.binpb"))
    assert len(claims) <= 4  # those of the first writer, the claim, and the position of its sentinel
