"""Split a path or URL into its table and the key of the object in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from memwal import wal
from memwal.flush import BaseTable
from memwal.ingest.errors import Invalid
from memwal.wal import layout

CAN_BE_INSPECTED = (
    "can be inspected: a table directory, a region directory (_mem_wal/UUID), a region manifest "
    "(_mem_wal/UUID/manifest/….binpb), a WAL entry (_mem_wal/UUID/wal/….lance or ….arrow), a commit plan "
    "(_mem_wal/UUID/commits/….json), an SST (_mem_wal/UUID/…_gen_N), its key sidecar (_pk_index) and bloom_filter.bin"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A path, split at the table: its root, the key below it ("" for the table itself), and the store of the table."""

    root: str
    key: str
    store: wal.ObjectStore

    def base(self) -> BaseTable:
        """Return the base table. Raises: errors of BaseTable.open."""
        return BaseTable.open(self.root, self.store.storage_options)

    def bytes(self) -> bytes:
        """Return the object at the key. Raises: Invalid if it does not exist."""
        data = self.store.get(self.key)
        if data is None:
            raise Invalid(f"{self.store.url(self.key)}: no such file; {CAN_BE_INSPECTED}")
        return data


def locate(path: str, storage_options: Mapping[str, str] | None) -> Place:
    """Split `path` at the table's root. Raises: Invalid if it does not exist or is not in a table."""
    if "://" in path and not path.startswith("file://"):
        return _located_by_url(path.rstrip("/"), storage_options)
    local = Path(unquote(urlsplit(path).path) if path.startswith("file://") else path).absolute()
    if not local.exists():
        raise Invalid(f"{path}: no such file or directory; {CAN_BE_INSPECTED}")
    parts = local.parts
    cut = parts.index("_mem_wal") if "_mem_wal" in parts else len(parts)
    root = Path(*parts[:cut])
    if not (root / "_versions").is_dir():
        raise Invalid(f"{path}: not in a Lance table; {CAN_BE_INSPECTED}")
    return Place(str(root), "/".join(parts[cut:]), wal.open_store(str(root)))


def _located_by_url(url: str, storage_options: Mapping[str, str] | None) -> Place:
    root, found, below = url.partition(f"/{layout.ROOT}")
    store, key = wal.open_store(root, storage_options), f"{layout.ROOT}{below}" if found else ""
    if not store.list("_versions/"):
        raise Invalid(f"{url}: not in a Lance table; {CAN_BE_INSPECTED}")
    if key and not store.list(key):
        raise Invalid(f"{url}: no such object; {CAN_BE_INSPECTED}")
    return Place(root, key, store)
