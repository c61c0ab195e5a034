"""Prepare a daemon's process before anything else: limit malloc's arenas, and keep pandas out.

**Arenas.** glibc's malloc gives threads their own heaps, up to eight for each processor, and keeps freed memory in
each of them. A daemon has a hundred threads, of Lance, tantivy and gRPC, which use much memory for a moment, one
after the other: half of a daemon's memory was freed memory. With two arenas for each processor, twice the number of
threads that can run at once, it is a fifth (figures: `daemon/README.md`, Decisions).

**pandas.** pyarrow imports pandas when it creates its first array, to recognise pandas values. The import takes a
quarter of a second, a fifth of a daemon's start. pyarrow remembers a failed import. A daemon receives rows over
Flight.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.abc import MetaPathFinder

_M_ARENA_MAX = -8
"""glibc's number of the setting, from its `malloc.h`."""
_ARENAS = 2
"""For each processor. With one, a daemon answered fewer reads."""


def prepare_process() -> None:
    """Limit malloc's arenas and keep pandas out. Call it before any other import of memwal and before a thread
    starts.

    User settings of glibc's arenas (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`) take precedence; other C libraries have
    none. If pandas is imported already, it stays. `import pandas` still works afterwards; conversions between Arrow
    and pandas do not.
    """
    chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None and not chosen:
        set_option(_M_ARENA_MAX, _ARENAS * len(os.sched_getaffinity(0)))
    if "pandas" in sys.modules:
        return
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        import pyarrow as pa

        pa.array([])
    finally:
        sys.meta_path.remove(absent)


class _Absent(MetaPathFinder):
    """An import finder that reports pandas as not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a daemon has no pandas", name=fullname)
