"""Limit the arenas of malloc in a daemon's process.

glibc's malloc gives threads their own heaps, up to eight for each processor, and keeps freed memory in each of them. A
daemon has a hundred threads, of Lance, tantivy and gRPC, which use much memory for a moment, one after the other: half
of a daemon's memory was freed memory. With two arenas for each processor, twice the number of threads that can run at
once, it is a fifth (figures: `daemon/README.md`, Decisions).
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_ARENA_MAX = -8
"""glibc's number of the setting, from its `malloc.h`."""
_ARENAS = 2
"""For each processor. With one, a daemon answered fewer reads."""


def limit_arenas() -> None:
    """Limit malloc's arenas. Call it before a thread starts.

    User settings of glibc's arenas (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`) take precedence; other C libraries have
    none.
    """
    chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None and not chosen:
        set_option(_M_ARENA_MAX, _ARENAS * len(os.sched_getaffinity(0)))
