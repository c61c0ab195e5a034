"""Measure what a region costs after many claims: requests and milliseconds of reads of its manifests and its log.

`python -m bench.growth [--smoke | --claims N …]` prints a table.

The region is synthesised on a local disk as N claims leave it: a sentinel and two manifest versions per claim, no rows.

* newest: the newest manifest, with a hint that is right, lost, or set back to version 1.
* claim: the next claim, from its listing to its last check.
* tail: a read at `durable` from storage, without the writer.
* collect: a collection by a new process: the first one ever, and a later one.
* prune: the manifests that remain after collections with age 0, and the requests of those collections.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from memwal.wal import (
    EntryHeader,
    LanceCodec,
    LocalStore,
    ManifestCollector,
    ManifestStore,
    ObjectInfo,
    RegionManifest,
    SystemClock,
    SystemIds,
    WalCollector,
    bucket_region,
    claim,
    read_tail,
)
from memwal.wal.layout import entry_key, manifest_key, version_hint_key

SMOKE, FULL = (10, 100), (10, 100, 1_000, 10_000, 100_000)
REGION = bucket_region(0)
PAGE = 1000
"""Keys of a page of S3's listings; each page is one request."""
CODEC = LanceCodec(pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), False)]))


class Counting(LocalStore):
    """A local store that counts its requests, with listings counted by pages."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def get(self, key: str) -> bytes | None:
        self.requests["get"] += 1
        return super().get(key)

    def exists(self, key: str) -> bool:
        self.requests["head"] += 1
        return super().exists(key)

    def describe(self, prefix: str) -> list[ObjectInfo]:
        found = super().describe(prefix)
        self.requests["list"] += 1 + len(found) // PAGE
        return found

    def list_some(self, prefix: str, most: int) -> list[str]:
        self.requests["list"] += 1
        return super().list_some(prefix, most)

    def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        super().delete(key)


def synthesise(root: Path, claims: int) -> None:
    """Write the objects of a region as `claims` claims leave it, without syncing."""
    objects = {}
    for version in range(1, 2 * claims):
        manifest = RegionManifest(version, 1 + version // 2, REGION, last_seen=(version - 1) // 2)
        objects[manifest_key(REGION, version)] = manifest
    for folder in ("wal", "manifest"):
        (root / f"_mem_wal/{REGION}/{folder}").mkdir(parents=True)
    for key, manifest in objects.items():
        (root / key).write_bytes(manifest.encode())
    for position in range(1, claims):
        header = EntryHeader(position + 1, 1, f"{position:032x}", {"loader": 1}, sentinel=True)
        (root / entry_key(REGION, position, "lance")).write_bytes(CODEC.encode(header, CODEC.no_rows))
    last = RegionManifest(2 * claims, claims, REGION, last_seen=claims - 1, replay_after=claims - 1, edit_id="f" * 32)
    (root / manifest_key(REGION, 2 * claims)).write_bytes(last.encode())
    set_hint(root, 2 * claims)


def set_hint(root: Path, version: int | None) -> None:
    """Set the hint to `version`, or remove it."""
    path = root / version_hint_key(REGION)
    path.unlink(missing_ok=True)
    if version is not None:
        path.write_bytes(b'{"version":%d}' % version)


def measured(root: Path, work: Callable[[Counting], object]) -> str:
    """Return requests and milliseconds of `work` with the store of a new process."""
    store = Counting(root)
    began = time.perf_counter()
    work(store)
    seconds = time.perf_counter() - began
    return f"{store.requests.total():,} / {seconds * 1e3:,.1f} ms"


def figures(root: Path, claims: int) -> dict[str, str]:
    """Return the row of the table for `claims` claims."""
    clock, newest = SystemClock(), 2 * claims
    found = {}
    for name, hint in (("hint right", newest), ("hint lost", None), ("hint set back", 1)):
        set_hint(root, hint)
        found[name] = measured(root, lambda store: ManifestStore(store, REGION).latest())
    set_hint(root, newest)
    found["tail"] = measured(root, lambda store: read_tail(store, REGION, CODEC, claims - 1))
    found["claim"] = measured(
        root, lambda store: claim(store, REGION, spec_id=1, codec=CODEC, ids=SystemIds(), clock=clock)
    )
    for name in ("collect, first", "collect, later"):
        found[name] = measured(root, lambda store: WalCollector(store, REGION, CODEC, clock).collect(-1.0))
    found["prune"] = measured(root, lambda store: pruned(store, clock))
    kept = len(list((root / f"_mem_wal/{REGION}/manifest").iterdir())) - 1
    return found | {"manifests kept": f"{kept:,}"}


def pruned(store: Counting, clock: SystemClock) -> None:
    """Collect until nothing is left to delete, because each collection deletes a bounded number of versions."""
    while ManifestCollector(store, REGION, clock).collect(lambda _: False, -1.0).versions:
        continue


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few claims: does it run at all")
    parser.add_argument("--claims", type=int, nargs="+", help="numbers of claims")
    parser.add_argument("--workdir", type=Path, help="where the regions are put meanwhile")
    given = parser.parse_args(arguments)
    heads: list[str] = []
    for claims in given.claims or (SMOKE if given.smoke else FULL):
        root = Path(tempfile.mkdtemp(prefix="growth-", dir=given.workdir))
        try:
            synthesise(root, claims)
            row = {"claims": f"{claims:,}"} | figures(root, claims)
        finally:
            shutil.rmtree(root)
        if not heads:
            heads = list(row)
            print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        print(f"| {' | '.join(row.values())} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
