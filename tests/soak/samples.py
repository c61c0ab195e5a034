"""Measurements of a run: each process, objects of the bucket and requests by kind, files of the local disk."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from memwal.wal.layout import kind_of
from tests.fault_proxy import Request

_KINDS = (
    (r"_mem_wal/[^/]*-[^/]*/wal/", "entries"),
    (r"_mem_wal/[^/]*/manifest/.*\.binpb$", "manifests"),
    (r"_mem_wal/[^/]*/applied/", "applied snapshots"),
    (r"_mem_wal/[^/]*/[0-9a-f]{8}_gen_\d+(?=/)", "SSTs"),
    (r"_mem_wal/[^/]*/commits/", "commit plans"),
    (r"_mem_wal/staged/", "staged rows"),
    (r"_mem_wal/probe/", "probes"),
    (r"_mem_wal/paused/", "pauses"),
    (r"_mem_wal/", "notes"),
    (r"_versions/", "base versions"),
    (r"_transactions/", "transactions"),
    (r"_deletions/", "deletion files"),
    (r"_indices/[^/]+(?=/)", "index segments"),
    (r"data/", "data files"),
)
_DIRECTORIES = {"SSTs", "index segments"}
"""Kinds that are counted by directory, not by file."""


@dataclass(frozen=True)
class Sample:
    """One process at one moment.

    `at`: seconds since the start of the run. `life`: number of the process's life. `memory`: anonymous memory in bytes,
    without mapped files. `descriptors`: open ones.
    """

    at: float
    name: str
    life: int
    memory: int
    threads: int
    descriptors: int


def of_process(at: float, name: str, life: int, pid: int) -> Iterable[Sample]:
    """Yield a sample of a process; nothing if it has ended."""
    with suppress(OSError, StopIteration):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        values = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        if "RssAnon" in values:  # missing for a process that has ended and was not waited for
            yield Sample(at, name, life, 1024 * int(values["RssAnon"].split()[0]), int(values["Threads"]), descriptors)


def java_below(processes: Iterable[psutil.Process]) -> Iterable[tuple[str, int]]:
    """Yield (name, pid) of the JVMs among processes: the driver's and the executors'."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            words = each.cmdline()
            if words and words[0].endswith("java"):
                executor = any("CoarseGrainedExecutorBackend" in word for word in words)
                yield ("executor" if executor else "driver's JVM"), each.pid


def files_by_kind(objects: Path) -> Counter[str]:
    """Count the objects of a bucket by kind in the S3 server's directory: it has a directory with `xl.meta` for
    each."""
    return count_kinds(os.path.relpath(at, objects) for at, _, files in os.walk(objects) if "xl.meta" in files)


def count_kinds(keys: Iterable[str]) -> Counter[str]:
    """Count keys of objects by kind."""
    found: Counter[str] = Counter()
    directories = set()
    for key in keys:
        for pattern, kind in _KINDS:
            if match := re.search(pattern, key):
                if kind in _DIRECTORIES:
                    directories.add((kind, key[: match.end()]))
                else:
                    found[kind] += 1
                break
        else:
            found["other"] += 1
    found.update(kind for kind, _ in directories)
    return found


def requests_by_kind(requests: Iterable[Request]) -> Counter[str]:
    """Count requests by kind, such as `get log`; requests for missing entries also as `probed positions`."""
    found: Counter[str] = Counter()
    for each in requests:
        kind = kind_of(each.key)
        found[f"{each.method.lower()} {kind}"] += 1
        if kind == "log" and each.status == 404:
            found["probed positions"] += 1
    return found


def files_below(directory: Path) -> int:
    """Count the files below a directory; files may disappear meanwhile."""
    return sum(len(files) for _, _, files in os.walk(directory))
