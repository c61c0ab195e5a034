"""The end of a command: an exit code and, after a failure, one line per problem on standard error.

Exit code 2: the user can correct the request or the configuration. 1: anything else. `MEMWAL_TRACEBACK` in the
environment adds the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from memwal.ingest.errors import Internal, Invalid, MemWalError, classify


def exit_code(command: Callable[[], int | None]) -> int:
    """Run `command`, report its error if it fails, and return its exit code."""
    try:
        code = command() or 0
        sys.stdout.flush()  # a failed write is an error of the command
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BaseException as error:  # noqa: BLE001 - the edge of the program
        from memwal.wal.panics import as_exception  # not above: most commands start faster without the storage packages

        return _report(as_exception(error))
    return code


def _report(error: BaseException) -> int:
    """Print an error, one line per problem; return the exit code."""
    usage = getattr(error, "format_message", None)
    if usage is not None and not usage():
        return Invalid.exit_code  # no command was given: Typer has printed the help already
    found: MemWalError = Invalid(f"{usage()} (see memwal --help)") if usage is not None else classify(error)
    for line in lines_of(found):
        print(f"memwal: {line}", file=sys.stderr)
    if os.environ.get("MEMWAL_TRACEBACK"):
        raise error
    return found.exit_code


def lines_of(error: MemWalError) -> tuple[str, ...]:
    """Return one line per problem; for an internal error one line in total, since its text is arbitrary."""
    if not isinstance(error, Internal):
        return error.lines
    return (f"{error.lines[0]}; this is a bug in memwal: please report it with the output of MEMWAL_TRACEBACK=1",)
