"""What the checks of `flush.verification.runner` look at, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

from memwal.flush.base.state import TableState, read_state
from memwal.flush.base.table import BaseTable
from memwal.wal import Corrupt, ManifestStore, ObjectStore, RegionManifest, regions
from memwal.wal.errors import first_line
from memwal.wal.panics import is_panic


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong on storage.

    Invariants. Two findings with equal `check` and `where` are of the same damage, whatever the numbers in `what`.
    """

    check: str
    """Short name of the check, such as "manifest" or "sidecar"."""
    where: str
    """Key of the object, or a name of the place, below the table's root."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


@dataclass(frozen=True, eq=False)
class View:
    """The table at one moment: the newest manifest of each region, then the newest version of the base.

    Thread safety. Any thread; immutable.
    Invariants. The manifests were read first: whatever the base says is committed was published by then, or is being
    published now, and then the next view has other manifests.
    """

    store: ObjectStore
    base: BaseTable
    state: TableState
    manifests: Mapping[UUID, RegionManifest]
    """Regions whose newest manifest cannot be read are left out; see check_chain."""
    found: tuple[UUID, ...]
    """All regions that have anything on storage."""
    deep: bool = False
    """Whether checks read all there is, not only what changed lately."""

    @property
    def moment(self) -> tuple[int, Mapping[UUID, int]]:
        """What two views of an unchanged table have in common."""
        return self.base.version, {region: manifest.version for region, manifest in self.manifests.items()}


Check = Callable[[View], Iterator[Finding]]
"""Reads storage, writes nothing, yields what is wrong. Raises StoreUnavailable, StoreRefused."""


def take_view(store: ObjectStore, uri: str, *, deep: bool = False) -> View:
    """The table at `uri`, the root of `store`, as it is now. Raises what BaseTable.open raises."""
    found = tuple(regions(store))
    manifests = {}
    for region in found:
        try:
            manifest = ManifestStore(store, region).latest()
        except Corrupt:
            continue
        if manifest is not None:
            manifests[region] = manifest
    base = BaseTable.open(uri, store.storage_options)
    return View(store, base, read_state(store, base.version), manifests, found, deep)


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending runs of consecutive numbers, as first and last: 1, 2, 3, 7 are (1, 3), (7, 7)."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def said(what: str, first: int, last: int) -> str:
    """position 4 is missing, positions 4 to 6 are missing"""
    return f"{what} {first} is missing" if first == last else f"{what}s {first} to {last} are missing"


def unreadable(error: BaseException) -> str | None:
    """In one line why pylance could not read a file; None where `error` is of another kind.

    A panic of its Rust code, as over an empty file, is no Exception.
    """
    if not isinstance(error, OSError | ValueError | RuntimeError) and not is_panic(error):
        return None
    return first_line(error)[:160]
