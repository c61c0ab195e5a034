"""The file-system model: which files a power cut may leave, given the calls that were made before it.

An **operation** is a call that changes or syncs something. At a cut (a line of the trace) an operation has not begun;
or it has begun, and may or may not have had its effect; or it has returned. Its effect is **durable** once a sync that
covers it has returned; a sync covers operations that had returned when it began. All other effects are **volatile**:
any of them may be on the disk, or not.

Two profiles decide what a sync covers and which losses can be combined.

`posix`, the weakest file system that POSIX allows:
 - Data: an fsync of the file covers its writes. Volatile writes of a file are lost independently, or land in part: any
   set of blocks of 512 bytes. If the size landed without the block, the block reads as zeros.
 - Names: an fsync of a directory covers the creations, links, renames and removals in it, and nothing else: neither the
   bytes of its files nor its own name in its parent. An fsync of a file does not cover its name. Volatile changes of
   names are lost independently, in any order. Only a rename is atomic; one between directories needs a sync of both.

`ext4`, as Linux' ext4 behaves with data=ordered and delayed allocation:
 - Names: one journal. Changes of names become durable in their order; an fsync of a file or directory covers every
   change up to the last one that touched it.
 - Data: an fsync of the file covers its writes. Of later writes, any number of leading blocks of 4 KiB is on
   the disk; nothing reads as zeros.

Sources: Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014), for the kinds of loss and for atomicity
and order as separate properties; POSIX.1-2017 fsync(); Linux' Documentation/filesystems/ext4 (data=ordered, delalloc).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

FILE, DIRECTORY = "file", "directory"
ROOT = 0
"""The inode of the disk's root, which is durable from the beginning."""
NEVER = 1 << 60
BLOCK = {"posix": 512, "ext4": 4096}
Tree = dict[str, bytes | None]
"""The contents of each path below the disk; None for a directory."""


@dataclass(frozen=True)
class Change:
    """A name in a directory is set to an inode, or removed (None)."""

    directory: int
    name: str
    inode: int | None


@dataclass(frozen=True)
class Operation:
    """A call in terms of inodes. `kind`: data, size, names, sync, sync all, mark."""

    kind: str
    entry: int
    exit: int
    inode: int
    """The file of data, size and sync; the directory of names."""
    changes: tuple[Change, ...] = ()
    data: bytes = field(default=b"", repr=False)
    offset: int = 0
    size: int = 0
    mark: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_change(self) -> bool:
        """Whether a power cut may lose it."""
        return self.kind in ("data", "size", "names")

    @property
    def touched(self) -> set[int]:
        """The inodes that it changes; for names, the directories and the named inodes."""
        named = {change.inode for change in self.changes if change.inode is not None}
        return {self.inode, *(change.directory for change in self.changes), *named}


@dataclass
class Recording:
    """All operations of one run, in order, and the namespace after them."""

    operations: list[Operation] = field(default_factory=list)
    kinds: list[str] = field(default_factory=lambda: [DIRECTORY])
    """Kind of each inode."""
    _names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def begin(self, tree: Tree, marks: Sequence[Mapping[str, Any]]) -> None:
        """Start from durable files and earlier marks. Requires: an empty recording."""
        for path, data in sorted(tree.items()):
            folder, _, name = path.rpartition("/")
            directory, inode = self.find(folder), self.new(DIRECTORY if data is None else FILE)
            assert directory is not None
            self.add(Operation("names", -3, -3, directory, changes=(Change(directory, name, inode),)))
            if data:
                self.add(Operation("data", -3, -3, inode, data=data))
        self.add(Operation("sync all", -2, -1, ROOT))
        for mark in marks:
            self.add(Operation("mark", -1, -1, ROOT, mark=mark))

    def new(self, kind: str) -> int:
        """Return a new inode."""
        self.kinds.append(kind)
        if kind == DIRECTORY:
            self._names[len(self.kinds) - 1] = {}
        return len(self.kinds) - 1

    def add(self, operation: Operation) -> None:
        """Add an operation that took effect after all others."""
        self.operations.append(operation)
        _apply(self._names, operation)

    def find(self, path: str) -> int | None:
        """Return the current inode at `path` below the disk, None if the path does not exist."""
        inode: int | None = ROOT
        for name in filter(None, path.split("/")):
            inode = self._names.get(inode, {}).get(name) if inode is not None else None
        return inode

    def name_of(self, inode: int) -> str:
        """Return the path of an inode by its most recent name."""
        if inode == ROOT:
            return "."
        last = self._last_names.get(inode)
        return f"inode {inode}" if last is None else f"{self.name_of(last[0])}/{last[1]}".removeprefix("./")

    @cached_property
    def _last_names(self) -> Mapping[int, tuple[int, str]]:
        changes = (change for operation in self.operations for change in operation.changes)
        return {change.inode: (change.directory, change.name) for change in changes if change.inode is not None}

    def content(self, inode: int) -> bytes:
        """Return the current bytes of a file."""
        mine = [operation for operation in self.operations if operation.inode == inode]
        return contents(mine, {}, BLOCK["posix"])

    def whole(self) -> Tree:
        """Return the files after all operations."""
        every = {place for place, operation in enumerate(self.operations) if operation.is_change}
        return Crash(self, every, {}, "posix").tree

    @cached_property
    def cuts(self) -> Sequence[int]:
        """The prefixes: lines of the trace at which the set of durable, volatile or acknowledged operations changes."""
        return sorted({line for each in self.operations for line in (each.entry, each.exit) if line >= 0})

    @cached_property
    def durable_at(self) -> Mapping[str, Sequence[int]]:
        """For each profile and operation, the first line of the trace where the operation is durable."""
        return {"posix": _posix(self.operations), "ext4": _ext4(self.operations)}

    def marks(self, cut: int) -> list[Mapping[str, Any]]:
        """Return the marks of the workload before the cut."""
        return [each.mark for each in self.operations if each.kind == "mark" and each.entry <= cut]

    def at(self, cut: int, profile: str) -> tuple[list[int], list[int]]:
        """Return the indices of the durable and of the volatile operations at a cut."""
        durable: list[int] = []
        volatile: list[int] = []
        for place, (operation, when) in enumerate(zip(self.operations, self.durable_at[profile], strict=True)):
            if operation.is_change and operation.entry <= cut:
                (durable if when <= cut else volatile).append(place)
        return durable, volatile


def _apply(names: dict[int, dict[str, int]], operation: Operation) -> None:
    for change in operation.changes:
        if change.inode is None:
            names.get(change.directory, {}).pop(change.name, None)
        else:
            names.setdefault(change.directory, {})[change.name] = change.inode


def _syncs(operations: Sequence[Operation]) -> dict[int, list[Operation]]:
    found: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.kind in ("sync", "sync all"):
            found.setdefault(operation.inode if operation.kind == "sync" else -1, []).append(operation)
    return found


def _first(syncs: Sequence[Operation], after: int) -> int:
    return min((sync.exit for sync in syncs if sync.entry > after), default=NEVER)


def _posix(operations: Sequence[Operation]) -> list[int]:
    syncs = _syncs(operations)

    def when(operation: Operation) -> int:
        directories = {change.directory for change in operation.changes} or {operation.inode}
        each = max(_first(syncs.get(inode, ()), operation.exit) for inode in directories)
        return min(each, _first(syncs.get(-1, ()), operation.exit))

    return [when(operation) if operation.is_change else NEVER for operation in operations]


def _ext4(operations: Sequence[Operation]) -> list[int]:
    syncs, found = _syncs(operations), [NEVER] * len(operations)
    journal = list(_journal(operations, syncs))
    for place, operation in enumerate(operations):
        if operation.kind == "names":
            found[place] = min((line for line, last in journal if last >= place), default=NEVER)
        elif operation.is_change:
            covering = (*syncs.get(operation.inode, ()), *syncs.get(-1, ()))
            found[place] = _first(covering, operation.exit)
    return found


def _journal(operations: Sequence[Operation], syncs: Mapping[int, Sequence[Operation]]) -> Iterator[tuple[int, int]]:
    """Yield for each sync the line at which it returned, and the index of the last change of names that it covers."""
    touching: dict[int, list[int]] = {-1: []}
    for place, operation in enumerate(operations):
        if operation.kind == "names":
            for inode in (-1, *operation.touched):
                touching.setdefault(inode, []).append(place)
    for inode, mine in syncs.items():
        for sync in mine:
            covered = [place for place in touching.get(inode, ()) if operations[place].exit < sync.entry]
            if covered:
                yield sync.exit, covered[-1]


@dataclass(frozen=True)
class Tear:
    """The part of a write that landed: a set of blocks. The file has the size of the whole write."""

    blocks: frozenset[int]
    cuts_size: bool
    """Whether the file ends after the last of these blocks instead of reading as zeros."""


def contents(operations: Sequence[Operation], tears: Mapping[int, Tear], block: int) -> bytes:
    """Return the bytes of a file after `operations`. `tears`: by the index in `operations`."""
    found = bytearray()
    for place, operation in enumerate(operations):
        if operation.kind == "size":
            found = found[: operation.size].ljust(operation.size, b"\0")
        elif operation.kind == "data":
            _write(found, operation, tears.get(place), block)
    return bytes(found)


def _write(found: bytearray, operation: Operation, tear: Tear | None, block: int) -> None:
    data, begin = operation.data, operation.offset
    if tear is not None:
        last = max(tear.blocks, default=-1) + 1
        if tear.cuts_size:
            data = data[: last * block]
        kept = bytearray(len(data))
        for number in tear.blocks:
            kept[number * block : (number + 1) * block] = data[number * block : (number + 1) * block]
        data = bytes(kept)
        if not data:
            return
    if len(found) < begin + len(data):
        found.extend(bytes(begin + len(data) - len(found)))
    found[begin : begin + len(data)] = data


class Crash:
    """The files that one power cut leaves: the operations `kept`, with those in `tears` landed in part."""

    def __init__(self, recording: Recording, kept: set[int], tears: Mapping[int, Tear], profile: str) -> None:
        """`kept`, keys of `tears`: indices of the recording's operations."""
        self._recording, self._block = recording, BLOCK[profile]
        self._names: dict[int, dict[str, int]] = {}
        self._of_file: dict[int, list[int]] = {}
        self._tears = tears
        for place in sorted(kept):
            operation = recording.operations[place]
            if operation.kind == "names":
                _apply(self._names, operation)
            else:
                self._of_file.setdefault(operation.inode, []).append(place)

    @cached_property
    def tree(self) -> Tree:
        """The contents of each path below the disk; None for directories."""
        return dict(self._walk(ROOT, ""))

    def _walk(self, directory: int, path: str) -> Iterator[tuple[str, bytes | None]]:
        for name, inode in sorted(self._names.get(directory, {}).items()):
            if self._recording.kinds[inode] == DIRECTORY:
                yield path + name, None
                yield from self._walk(inode, f"{path}{name}/")
            else:
                yield path + name, self._bytes(inode)

    def _bytes(self, inode: int) -> bytes:
        places = self._of_file.get(inode, ())
        tears = {number: self._tears[place] for number, place in enumerate(places) if place in self._tears}
        key = (inode, tuple(places), tuple(tears.items()), self._block)
        cache: dict[Any, bytes] = self._recording.__dict__.setdefault("cached_bytes", {})
        if key not in cache:
            operations = [self._recording.operations[place] for place in places]
            cache[key] = contents(operations, tears, self._block)
        return cache[key]


def materialise(tree: Tree, place: Path) -> None:
    """Write the files of a tree into the empty directory `place`."""
    for path, data in tree.items():
        if data is None:
            (place / path).mkdir()
        else:
            (place / path).write_bytes(data)


def live_tree(disk: Path) -> Tree:
    """Return the files below a directory."""
    return {
        str(path.relative_to(disk)): path.read_bytes() if path.is_file() else None for path in sorted(disk.rglob("*"))
    }
