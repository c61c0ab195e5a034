"""Run a workload under strace and convert the trace to operations of the file-system model.

strace stops the threads of the program at each of CALLS, so the trace has Lance's calls as well as Python's, with all
bytes (`-xx -s`). A call has its effect at some time between its entry and its return; both are kept, as line numbers of
the trace.

The recorder maintains its own namespace while it reads the trace. If the trace contradicts the namespace, or the files
at the end differ from those that the operations give, a call was missed and the recording is rejected.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.power_cuts.model import DIRECTORY, FILE, Change, Operation, Recording, Tree, live_tree, materialise

CALLS = (
    "open,openat,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,copy_file_range,"
    "sendfile,splice,fsync,fdatasync,sync,syncfs,sync_file_range,link,linkat,symlink,symlinkat,rename,renameat,"
    "renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,mmap,io_uring_setup,mknod,mknodat,lseek,dup,dup2,dup3"
)
REFUSED = {
    "openat2", "creat", "pwritev", "pwritev2", "fallocate", "splice", "sync_file_range",
    "symlink", "symlinkat", "mknod", "mknodat", "dup", "dup2", "dup3", "truncate",
}  # fmt: skip
"""Calls that no program makes to a file of a table at present. The model does not support them."""
_STRING_MAX = 1 << 26
_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)")
_RESULT = re.compile(r"(?:^|\)) += (-?\d+|\?|0x[0-9a-f]+)(?:<((?:\\x[0-9a-f]{2})+)>)?(.*)$")
_HEX = re.compile(r"(?:\\x[0-9a-f]{2})+")
_IOVEC = re.compile(r'iov_base="((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"(AT_FDCWD|\d+)(?:<((?:\\x[0-9a-f]{2})+)>(\(deleted\))?)?")
MARKS = "marks"
"""Name of the file, beside the disk, that receives a line before and after each call of a workload."""
DISK = "disk"
"""Name of the directory with a workload's tables. It exists, durably, before the workload begins."""


class NotRecorded(Exception):
    """The workload failed, or its trace cannot be converted to operations; the text has the reason."""


@dataclass(frozen=True)
class Call:
    """One successful call to the file system: its arguments as strace prints them, its entry and its return."""

    name: str
    arguments: Sequence[str]
    result: int
    path: str
    """Path of the descriptor that it returned."""
    entry: int
    exit: int


def record(
    command: Sequence[str], place: Path, *, tree: Tree | None = None, marks: Sequence[Mapping[str, Any]] = ()
) -> Recording:
    """Run `command` below strace, with `place`/disk and `place`/marks for it, and return its operations.

    `tree`: the durable files on the disk at the start. `marks`: earlier marks. Raises: NotRecorded.
    """
    disk, trace = place / DISK, place / "trace"
    disk.mkdir(parents=True)
    materialise(tree or {}, disk)
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", str(_STRING_MAX)]
    strace += ["-e", f"trace={CALLS}", "-e", "signal=none", "-o", str(trace)]
    surroundings = {**os.environ, "LANCE_LOG": "critical", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*strace, *command], env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRecorded(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    with trace.open(encoding="latin-1") as lines:
        recorder = _Recorder(str(place))
        recorder.recording.begin(tree or {}, marks)
        recording = recorder.read(lines)
    trace.unlink()
    if (simulated := recording.whole()) != (real := live_tree(disk)):
        different = sorted(name for name in simulated.keys() | real.keys() if simulated.get(name) != real.get(name))
        raise NotRecorded(f"the operations do not give the files on the disk: {different[:5]}")
    return recording


def python(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of the tests, without pandas: its import makes thousands of calls."""
    prepare = "from memwal.ingest.own_process import without_pandas; without_pandas()"
    run = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    return [sys.executable, "-c", f"{prepare}; {run}", module, *arguments]


def calls(lines: Iterator[str]) -> Iterator[Call]:
    """Yield the successful calls of a trace in the order of their entries. Raises: NotRecorded."""
    begun: dict[str, tuple[str, str, int]] = {}
    done: dict[int, Call] = {}
    for number, line in enumerate(lines):
        if (parsed := _LINE.match(line)) is None:
            continue
        thread, resumed, name, rest = parsed.groups()
        if resumed:
            name, before, entry = begun.pop(thread)
            rest = before + rest
        elif rest.endswith("<unfinished ...>"):
            begun[thread] = name, rest.removesuffix("<unfinished ...>"), number
            continue
        else:
            entry = number
        if (found := _RESULT.search(rest)) is None:
            raise NotRecorded(f"line {number} of the trace cannot be read: {line[:200]}")
        if not found[1].startswith("-") and found[1] != "?":
            arguments = rest[: found.start()].strip().removesuffix(")").split(", ")
            result = int(found[1], 16 if found[1].startswith("0x") else 10)
            done[entry] = Call(name, arguments, result, text(found[2] or ""), entry, number)
    yield from (done[entry] for entry in sorted(done))


def text(escaped: str) -> str:
    """Decode a string that strace printed in hexadecimal."""
    return raw(escaped).decode("utf-8", "surrogateescape")


def raw(escaped: str) -> bytes:
    """Decode the bytes of a string that strace printed in hexadecimal."""
    return bytes.fromhex(escaped.strip('"').replace("\\x", ""))


@dataclass
class _Recorder:
    """The namespace below `place` while its trace is read."""

    place: str
    recording: Recording = field(default_factory=Recording)
    positions: dict[tuple[int, str], int] = field(default_factory=dict)
    """Offset of the next write, by (inode, descriptor)."""
    former: dict[str, int] = field(default_factory=dict)
    """The inode of each removed path."""
    early: list[Call] = field(default_factory=list)
    """Syncs of files that are not known yet."""

    def read(self, lines: Iterator[str]) -> Recording:
        """Return the operations of a trace. Raises: NotRecorded."""
        # Operations are ordered by their return: of two that overlap, the later one saw the effect of the earlier one.
        for call in sorted(calls(lines), key=lambda call: call.exit):
            if call.name == "io_uring_setup":
                raise NotRecorded("the workload uses io_uring, whose writes strace does not see")
            handler = getattr(self, f"_{call.name}", None)
            if handler is not None:
                self._handle(handler, call)
            elif call.name in REFUSED and any(self._below(path) for path in self._paths(call)):
                raise NotRecorded(f"{call.name} of a file below the disk: the model does not know this call")
        if self.early:
            raise NotRecorded(f"{self.early[0].arguments}: the trace syncs a file that it did not create")
        return self.recording

    def _handle(self, handler: Callable[[Call], None], call: Call) -> None:
        """Handle a call. A sync may name a file by a name that comes from a rename which returns later."""
        try:
            handler(call)
        except NotRecorded:
            if call.name not in ("fsync", "fdatasync"):
                raise
            self.early.append(call)
            return
        early, self.early = self.early, []
        for sync in early:
            self._handle(handler=self._fsync, call=sync)

    # ---- names ----

    def _below(self, path: str) -> str | None:
        """Return `path` relative to the disk, None if it is elsewhere."""
        disk = f"{self.place}/{DISK}"
        normal = os.path.normpath(path)
        return normal[len(disk) + 1 :] if normal == disk or normal.startswith(f"{disk}/") else None

    def _paths(self, call: Call) -> Iterator[str]:
        for argument in call.arguments:
            for escaped in _HEX.findall(argument):
                yield text(escaped)

    def _at(self, directory: str, name: str) -> str | None:
        """Return the path, relative to the disk, of a name relative to a descriptor."""
        found = _DESCRIPTOR.match(directory)
        if not (base := text(found[2] or "") if found is not None else "") and not text(name).startswith("/"):
            raise NotRecorded(f"{text(name)}: a path below the current directory, which strace does not tell here")
        return self._below(os.path.join(base, text(name)))  # noqa: PTH118 - joins a relative and an absolute path alike

    def _open_file(self, argument: str) -> tuple[int | None, str]:
        """Return inode and number of an open descriptor; the inode is None for anything but a file below the disk."""
        found = _DESCRIPTOR.match(argument)
        if found is None or not found[2] or found[3]:
            return None, ""
        path = self._below(text(found[2]))
        if path is None:
            return None, ""
        # strace resolves the path at the entry of the call; another thread may have renamed the file since.
        known = self.recording.find(path) is not None or path not in self.former
        return (self._inode(path) if known else self.former[path]), found[1]

    def _inode(self, path: str) -> int:
        inode = self.recording.find(path)
        if inode is None:
            raise NotRecorded(f"{path}: the trace uses a file that it did not create")
        return inode

    def _parent(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self._inode(folder), name

    # ---- operations ----

    def _add(self, call: Call, kind: str, inode: int, **what: Any) -> None:
        self.recording.add(Operation(kind, call.entry, call.exit, inode, **what))

    def _open(self, call: Call) -> None:
        self._opened(call, self._at("AT_FDCWD", call.arguments[0]), call.arguments[1])

    def _openat(self, call: Call) -> None:
        self._opened(call, self._at(call.arguments[0], call.arguments[1]), call.arguments[2])

    def _opened(self, call: Call, path: str | None, flags: str) -> None:
        if path is None or ("O_WRONLY" not in flags and "O_RDWR" not in flags):
            return
        inode = self.recording.find(path)
        if inode is None or "O_EXCL" in flags:
            if inode is not None:
                raise NotRecorded(f"{path}: two threads use one name at the same time; record it again")
            parent, name = self._parent(path)
            inode = self.recording.new(FILE)
            self._add(call, "names", parent, changes=(Change(parent, name, inode),))
        elif "O_TRUNC" in flags:
            self._add(call, "size", inode, size=0)
        if "O_APPEND" in flags:
            raise NotRecorded(f"{path}: opened to append; the model does not know that")
        self.positions[inode, str(call.result)] = 0

    def _mkdir(self, call: Call) -> None:
        self._made(call, self._at("AT_FDCWD", call.arguments[0]))

    def _mkdirat(self, call: Call) -> None:
        self._made(call, self._at(call.arguments[0], call.arguments[1]))

    def _made(self, call: Call, path: str | None) -> None:
        if path is not None:
            parent, name = self._parent(path)
            self._add(call, "names", parent, changes=(Change(parent, name, self.recording.new(DIRECTORY)),))

    def _write(self, call: Call) -> None:
        inode, number = self._open_file(call.arguments[0])
        if inode is None:
            if text(_DESCRIPTOR.match(call.arguments[0])[2] or "") == f"{self.place}/{MARKS}":  # type: ignore[index]
                self.recording.add(
                    Operation("mark", call.entry, call.entry, 0, mark=json.loads(raw(call.arguments[1])))
                )
            return
        offset = self.positions[inode, number]
        self._wrote(call, inode, raw(call.arguments[1]), offset)
        self.positions[inode, number] = offset + call.result

    def _writev(self, call: Call) -> None:
        inode, number = self._open_file(call.arguments[0])
        if inode is not None:
            data = b"".join(raw(piece) for piece in re.findall(_IOVEC, ", ".join(call.arguments)))
            offset = self.positions[inode, number]
            self._wrote(call, inode, data, offset)
            self.positions[inode, number] = offset + call.result

    def _pwrite64(self, call: Call) -> None:
        inode, _ = self._open_file(call.arguments[0])
        if inode is not None:
            self._wrote(call, inode, raw(call.arguments[1]), int(call.arguments[3]))

    def _wrote(self, call: Call, inode: int, data: bytes, offset: int) -> None:
        if call.result:  # the end of a file is copied as an empty write
            self._add(call, "data", inode, data=data[: call.result], offset=offset)

    def _copy_file_range(self, call: Call) -> None:
        self._copied(call, call.arguments[2], call.arguments[0], call.arguments[1], call.arguments[3])

    def _sendfile(self, call: Call) -> None:
        self._copied(call, call.arguments[0], call.arguments[1], call.arguments[2], "NULL")

    def _copied(self, call: Call, to: str, source: str, source_offset: str, offset: str) -> None:
        """Add a copy inside the kernel: the bytes are those of the source, which no workload changes."""
        inode, number = self._open_file(to)
        if inode is None:
            return
        from_inode, from_number = self._open_file(source)
        if from_inode is None or offset != "NULL":
            raise NotRecorded(f"{call.name} from a file outside of the disk")
        if source_offset == "NULL":
            begin = self.positions.get((from_inode, from_number), 0)
            self.positions[from_inode, from_number] = begin + call.result
        else:
            begin = int(source_offset[1:].partition("]")[0])
        data = self.recording.content(from_inode)[begin : begin + call.result]
        at = self.positions[inode, number]
        self._wrote(call, inode, data, at)
        self.positions[inode, number] = at + call.result

    def _lseek(self, call: Call) -> None:
        inode, number = self._open_file(call.arguments[0])
        if inode is not None and (inode, number) in self.positions:
            self.positions[inode, number] = call.result

    def _ftruncate(self, call: Call) -> None:
        inode, _ = self._open_file(call.arguments[0])
        if inode is not None:
            self._add(call, "size", inode, size=int(call.arguments[1]))

    def _mmap(self, call: Call) -> None:
        if "MAP_SHARED" in call.arguments[3] and "PROT_WRITE" in call.arguments[2]:
            inode, _ = self._open_file(call.arguments[4])
            if inode is not None:
                raise NotRecorded("a file below the disk is written through memory, which strace does not see")

    def _fsync(self, call: Call) -> None:
        inode, _ = self._open_file(call.arguments[0])
        if inode is not None:
            self._add(call, "sync", inode)

    _fdatasync = _fsync

    def _sync(self, call: Call) -> None:
        self._add(call, "sync all", 0)

    _syncfs = _sync

    def _link(self, call: Call) -> None:
        self._linked(call, self._at("AT_FDCWD", call.arguments[0]), self._at("AT_FDCWD", call.arguments[1]))

    def _linkat(self, call: Call) -> None:
        old = self._at(call.arguments[0], call.arguments[1])
        self._linked(call, old, self._at(call.arguments[2], call.arguments[3]))

    def _linked(self, call: Call, old: str | None, new: str | None) -> None:
        if old is None or new is None:
            return
        parent, name = self._parent(new)
        if self.recording.find(new) is not None:
            raise NotRecorded(f"{new}: two threads use one name at the same time; record it again")
        self._add(call, "names", parent, changes=(Change(parent, name, self._inode(old)),))

    def _unlink(self, call: Call) -> None:
        self._unlinked(call, self._at("AT_FDCWD", call.arguments[0]))

    _rmdir = _unlink

    def _unlinkat(self, call: Call) -> None:
        self._unlinked(call, self._at(call.arguments[0], call.arguments[1]))

    def _unlinked(self, call: Call, path: str | None) -> None:
        if path is not None:
            self.former[path] = self._inode(path)
            parent, name = self._parent(path)
            self._add(call, "names", parent, changes=(Change(parent, name, None),))

    def _rename(self, call: Call) -> None:
        self._renamed(call, self._at("AT_FDCWD", call.arguments[0]), self._at("AT_FDCWD", call.arguments[1]))

    def _renameat(self, call: Call) -> None:
        old = self._at(call.arguments[0], call.arguments[1])
        self._renamed(call, old, self._at(call.arguments[2], call.arguments[3]))

    _renameat2 = _renameat

    def _renamed(self, call: Call, old: str | None, new: str | None) -> None:
        if old is None and new is None:
            return
        if old is None or new is None:
            raise NotRecorded("a rename between the disk and another place")
        inode, (from_parent, from_name), (parent, name) = self._inode(old), self._parent(old), self._parent(new)
        self.former[old] = inode
        changes = (Change(from_parent, from_name, None), Change(parent, name, inode))
        self._add(call, "names", parent, changes=changes)
