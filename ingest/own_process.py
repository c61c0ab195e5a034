"""A process of memwal, a command or a child daemon, from its start to its end.

**Standard streams.** Python has None for one that the parent closed, and the next file that is opened gets its number:
what libraries print would go into that file. It becomes the null device.

**The end.** Python is not finalized. Lance, gRPC, tantivy and OpenMP keep threads that no interface ends; beside a
finalization such a thread may release an Arrow buffer or ask for Python's lock, and the process then ends by a signal,
which hides its exit code, or does not end at all. What must be done before the end is an exit handler (open tables are
closed, spans are exported, logs are flushed), and the memory goes with the process.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def own_process(main: Callable[[], int]) -> NoReturn:
    """Run `main` as all that this process does, and end the process with the exit code that it returns or raises.

    Threads that still run then, daemon threads or not, are not waited for: join before what must be finished.
    """
    _open_standard_streams()
    faulthandler.enable()  # if native code crashes, standard error tells where each thread was
    try:
        code = main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    atexit._run_exitfuncs()  # noqa: SLF001 - has no public name
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that nobody reads any more, or a stream that is closed
            stream.flush()
    os._exit(code)


def _open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the number of the stream, unless another file has it
            os.set_inheritable(opened, True)  # as standard streams are: child processes have it too
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8"))
