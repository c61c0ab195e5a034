"""Lance's encoding settings in a column's metadata, set when the table is created, apply to the base's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import memwal

ZSTD = {"lance-encoding:compression": "zstd", "lance-encoding:compression-level": "9"}
NONE = {"lance-encoding:compression": "none"}
ROWS = 4000


def rows(seed: int, ids: range) -> pa.Table:
    """Return distinct texts of hex digits, which a compressor shrinks to half their size."""
    rng = np.random.default_rng(seed)
    return pa.table({"id": pa.array(ids), "text": [rng.bytes(100).hex() for _ in ids]})


def sizes(uri: str) -> int:
    """Return the bytes of the data files of the newest version."""
    dataset = lance.dataset(uri)
    return sum(
        (Path(uri) / "data" / file.path).stat().st_size for f in dataset.get_fragments() for file in f.data_files()
    )


@pytest.fixture
def lives(tmp_path: Path) -> dict[str, list[int]]:
    """Return for each compression the size of the base after a first commit, after a commit that replaces rows, and
    after a compaction.
    """
    found = {}
    for name, metadata in (("zstd", ZSTD), ("none", NONE)):
        uri = str(tmp_path / name)
        schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("text", pa.string(), metadata=metadata)])
        found[name] = []
        with memwal.open(uri, schema=schema, key="id", regions=1, settings={"commit": {"interval": "0s"}}) as table:
            for seed, ids in ((1, range(ROWS)), (2, range(ROWS // 2, ROWS + ROWS // 2))):
                table.put(rows(seed, ids))
                table.flush()
                table.commit()
                found[name].append(sizes(uri))
            assert table.count() == ROWS + ROWS // 2
        assert lance.dataset(uri).optimize.compact_files(materialize_deletions_threshold=0.0).files_added == 1
        found[name].append(sizes(uri))
        _check_metadata(uri, metadata)
    return found


def _check_metadata(uri: str, metadata: dict[str, str]) -> None:
    """The first and the newest version declare the encoding, and so does a table that is opened again."""
    dataset: Any = lance.dataset(uri)
    for version in (1, dataset.version):
        kept = dataset.checkout_version(version).schema.field("text").metadata
        assert {key.decode(): value.decode() for key, value in kept.items()}.items() >= metadata.items()
    with memwal.open(uri, settings={"commit": {"interval": "0s"}}) as table:
        assert table.schema.field("text").metadata[b"lance-encoding:compression"].decode() in ("zstd", "none")


def test_a_columns_compression_lasts_through_commits_and_compaction(lives: dict[str, list[int]]) -> None:
    plain = [200 * ROWS, 200 * 2 * ROWS, 200 * (ROWS + ROWS // 2)]
    for packed, whole, text in zip(lives["zstd"], lives["none"], plain, strict=True):
        assert whole > text
        assert packed < 0.65 * whole
