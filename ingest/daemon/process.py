"""What a daemon sets in its process before anything else: malloc's arenas, and no pandas.

**Arenas.** glibc's malloc gives threads heaps of their own, up to eight for each processor, and keeps in each what was
freed. A daemon has a hundred threads, of Lance, tantivy and gRPC, which take much memory for a moment, one after the
other: half of a daemon's memory was such free memory. With two arenas for each processor, twice as many as threads can
run at once, it is a fifth (figures: `daemon/README.md`, Decisions).

**pandas.** pyarrow imports it (a quarter of a second, a fifth of a daemon's start) when it makes its first array, to
recognise pandas' values, and remembers if the import fails. A daemon gets its rows over Flight.
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
    """Bound malloc's arenas and leave pandas out. Call it before any other import of memwal and before a thread starts.

    What the user set of glibc's arenas (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`) stays; another C library has none. Where
    pandas is imported already it stays; `import pandas` still works afterwards, conversions between Arrow and pandas
    do not.
    """
    _bound_arenas()
    _leave_pandas_out()


def _bound_arenas() -> None:
    chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None and not chosen:
        set_option(_M_ARENA_MAX, _ARENAS * len(os.sched_getaffinity(0)))


class _Absent(MetaPathFinder):
    """An import finder that reports pandas as not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a daemon has no pandas", name=fullname)


def _leave_pandas_out() -> None:
    if "pandas" in sys.modules:
        return
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        import pyarrow as pa

        pa.array([])
    finally:
        sys.meta_path.remove(absent)
