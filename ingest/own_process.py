"""The start and end of a memwal process, a command or a child daemon.

**Standard streams.** Python has None for a stream that the parent closed, and the next opened file gets its number,
so the output of libraries would go into that file. The null device replaces a closed stream.

**The end.** Python is not finalized. Lance, gRPC, tantivy and OpenMP keep threads that cannot be ended. During a
finalization, one of them may release an Arrow buffer or request Python's lock. The process then ends by a signal,
which hides its exit code, or hangs. Exit handlers do the necessary work (close open tables, export spans, flush
logs), and the system frees the memory.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import NoReturn


def own_process(main: Callable[[], int]) -> NoReturn:
    """Run `main` as the only work of this process, and end the process with its exit code.

    Threads that are still running, daemon threads or not, are not waited for: join them before, if their work must
    finish.
    """
    _open_standard_streams()
    faulthandler.enable()  # after a crash in native code, standard error shows the position of each thread
    try:
        code = main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    atexit._run_exitfuncs()  # noqa: SLF001 - has no public name
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe without a reader, or a closed stream
            stream.flush()
    os._exit(code)


class _Absent(Loader, MetaPathFinder):
    """An import finder whose pandas cannot be imported."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == "pandas" else None

    def create_module(self, spec: ModuleSpec) -> None:
        raise ModuleNotFoundError("this process does without pandas", name=spec.name)


_ABSENT = _Absent()


def without_pandas() -> None:
    """Make `import pandas` fail in this process from now on, as if it were not installed.

    pyarrow imports pandas with its first array, to recognise its values. That takes a third of the processor time of a
    short command, and a fifth of a daemon's start.
    """
    sys.meta_path.insert(0, _ABSENT)


def with_pandas() -> None:
    """End `without_pandas`, if it was called: PySpark needs pandas. pyarrow still converts nothing to pandas then, if
    it has been imported."""
    if _ABSENT in sys.meta_path:
        sys.meta_path.remove(_ABSENT)


def _open_standard_streams() -> None:
    """Open the null device in place of each closed standard stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the number of the stream, unless another file has it
            os.set_inheritable(opened, True)  # child processes inherit standard streams
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8"))
