"""How a process of memwal ends: without finalizing Python beside threads of native code.

Lance, gRPC, tantivy and OpenMP keep threads that no interface ends. While Python finalizes itself, such a thread may
release an Arrow buffer or ask for Python's lock; the process then ends by a signal, which hides its exit code, or does
not end at all. Nothing needs the finalization: what must be done before the end is an exit handler (open tables are
closed, spans are exported, logs are flushed), and the memory goes with the process.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Run the exit handlers, flush standard output and error, and end the process with `code`.

    Threads that still run, daemon threads or not, are not waited for: join before what must be finished.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - has no public name
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that nobody reads any more, or a stream that is closed
            stream.flush()
    os._exit(code)
