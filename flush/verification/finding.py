"""The view of a table that the checks of `flush.verification.runner` read, and the findings that they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from lance.file import LanceFileReader

from memwal.flush.base.state import TableState, read_state
from memwal.flush.base.table import BaseTable
from memwal.wal import Corrupt, ManifestStore, ObjectStore, RegionManifest, regions
from memwal.wal.errors import first_line
from memwal.wal.panics import is_panic


@dataclass(frozen=True)
class Finding:
    """One instance of damage on storage.

    Invariants. Two findings with equal `check` and `where` are the same damage, even if the numbers in `what` differ.
    """

    check: str
    """Short name of the check, such as "manifest" or "sidecar"."""
    where: str
    """Key of the object below the table's root, or a name of the place."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


@dataclass(frozen=True, eq=False)
class View:
    """The table at one moment: the newest manifest of each region, then the newest version of the base.

    Thread safety. Any thread; immutable.
    Invariants. The manifests were read first. A generation that the base has committed is in them, or was published
    after they were read; then the next view has newer manifests.
    """

    store: ObjectStore
    base: BaseTable
    state: TableState
    manifests: Mapping[UUID, RegionManifest]
    """Newest manifest by region, without regions whose newest manifest cannot be read; see check_chain."""
    regions: tuple[UUID, ...]
    """All regions with any object on storage."""
    deep: bool = False
    """Whether checks read everything, not only recent objects."""

    @property
    def versions(self) -> tuple[int, Mapping[UUID, int]]:
        """Version of the base and of each region's manifest; equal in two views of an unchanged table."""
        return self.base.version, {region: manifest.version for region, manifest in self.manifests.items()}

    def file(self, key: str) -> LanceFileReader:
        """Open a Lance file. Raises what pylance raises; see `reading`."""
        return LanceFileReader(self.store.url(key), storage_options=dict(self.store.storage_options))


Check = Callable[[View], Iterator[Finding]]
"""Reads storage, writes nothing, yields findings. Raises StoreUnavailable, StoreRefused."""


def take_view(store: ObjectStore, uri: str, *, deep: bool = False) -> View:
    """Return a view of the table at `uri`, the root of `store`. Raises what BaseTable.open raises."""
    on_storage = tuple(regions(store))
    manifests = {}
    for region in on_storage:
        try:
            manifest = ManifestStore(store, region).latest()
        except Corrupt:
            continue
        if manifest is not None:
            manifests[region] = manifest
    base = BaseTable.open(uri, store.storage_options)
    return View(store, base, read_state(store, base.version), manifests, on_storage, deep)


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending runs of consecutive numbers, as first and last: (1, 3), (7, 7) for 1, 2, 3, 7."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def missing_text(what: str, first: int, last: int) -> str:
    """Return "position 4 is missing" or "positions 4 to 6 are missing"."""
    return f"{what} {first} is missing" if first == last else f"{what}s {first} to {last} are missing"


class Unreadable(Exception):
    """pylance cannot read a file; the text has the reason, in one line."""


@contextmanager
def reading() -> Iterator[None]:
    """Convert the errors of pylance for a file that it cannot read to Unreadable.

    A panic of its Rust code, as with an empty file, is not an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, OSError | ValueError | RuntimeError) and not is_panic(error):
            raise
        raise Unreadable(first_line(error)[:160]) from error
