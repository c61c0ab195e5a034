"""The six kinds of error a caller meets, each defined by what the caller must do.

Packages raise their own precise exceptions (`wal.errors`, `memtable.errors`, `flush.errors`); the edges of the program
(CLI, Flight, the Spark sink, the embedded table) turn them into one of these with `classify`. Kinds after slatedb's
`rfcs/0007-api-errors.md`:

===============  ==========================================================  =========
kind             the caller must                                             exit code
===============  ==========================================================  =========
INVALID          fix the request or the configuration                        2
UNAVAILABLE      retry with the same token                                   1
UNKNOWN_OUTCOME  retry with the same token; the rows may be applied already  1
FENCED           stop: a newer writer owns the region                        1
CORRUPT          stop and look: storage holds what no writer of ours writes  1
INTERNAL         report it: a fault of this program                          1
===============  ==========================================================  =========

Where package errors become the six kinds: every public method is wrapped once, here.

Spark and Avro are extras of the distribution. Nothing imports them at the start; where one is missing when it is
needed, the error names the command that installs it.
"""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

from memwal.ingest.suggest import suggestion

_MEANT = {
    "where": "filter",
    "predicate": "filter",
    "condition": "filter",
    "select": "columns",
    "fields": "columns",
    "top_k": "k",
    "n": "k",
    "query": "text",
    "primary_key": "key",
    "index": "indexes",
}
"""What others call our arguments."""

UNAUTHENTICATED = "unauthenticated"
"""In the details of an error: the daemon did not take the token."""
BUSY, DRAINING, NOT_OWNER, LOST, RESIZED = "busy", "draining", "not_owner", "lost", "resized"
MOVED = "moved"
"""Why a daemon is Unavailable, as `details["reason"]`: past the back-pressure limit; about to end; another one owns
`details["region"]`. And why a client finds it so: there was no answer; the table has another routing by now; while it
waited another daemon has claimed the region."""
_EXTRAS = {
    "pyspark": ("PySpark", "spark"),
    "py4j": ("PySpark", "spark"),
    "pandas": ("pandas, which PySpark needs,", "spark"),
    "fastavro": ("fastavro", "kafka"),
}
"""By the name that is imported: how to call it, and the extra of the distribution that installs it."""
SILENT = "source_silent"
"""Why a run is Unavailable, in the details of the error: the source does not answer, which passes by itself."""


class MemWalError(Exception):
    """What a caller meets: a kind, one line (or several, one problem each), and details fit for JSON.

    Thread safety. Immutable after construction. Pickles, so Spark tasks may raise it.
    Invariants. `str(error)` is `"\\n".join(error.lines)`; `kind` and `exit_code` belong to the class.
    """

    kind: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, dict(details or {}))
        self.message = message
        self.details: dict[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return self.message

    @property
    def lines(self) -> tuple[str, ...]:
        """The message as the edge prints it: one line per problem, never empty."""
        return tuple(self.message.splitlines()) or (type(self).__name__,)


class Invalid(MemWalError):
    """The request or the configuration is wrong; nothing was written. Fix it and ask again."""

    kind = "INVALID"
    exit_code = 2

    @classmethod
    def of(cls, problems: Iterable[str]) -> Invalid:
        """One error that carries every problem found, one line each."""
        return cls("\n".join(problems))


class Unavailable(MemWalError):
    """Storage or a daemon does not answer; nothing is known to be applied. Retry with the same token."""

    kind = "UNAVAILABLE"


class UnknownOutcome(MemWalError):
    """The request may or may not be applied. Retry with the same token; it is applied once."""

    kind = "UNKNOWN_OUTCOME"


class FencedError(MemWalError):
    """A newer writer owns the region. Stop; `details` holds `ours` and `theirs` (writer epochs)."""

    kind = "FENCED"


class Corrupted(MemWalError):
    """Storage holds something no writer of ours writes. Stop and look; nothing was skipped."""

    kind = "CORRUPT"


class Internal(MemWalError):
    """A fault of this program. Report it."""

    kind = "INTERNAL"


KINDS: Mapping[str, type[MemWalError]] = {
    each.kind: each for each in (Invalid, Unavailable, UnknownOutcome, FencedError, Corrupted, Internal)
}


def classify(error: BaseException) -> MemWalError:
    """The kind a package's exception belongs to, decided by its type and never by its text, but for the number of an
    error of the operating system, which Lance's exceptions have nowhere else.

    A MemWalError is returned as it is; everything else keeps its message. `__cause__` is the original.
    A lost connection counts as UNAVAILABLE here; whoever knows that rows were already on their way raises
    `UnknownOutcome` itself.
    """
    if isinstance(error, MemWalError):
        return error
    if isinstance(error, OSError):
        found = _of_os_error(error)
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _EXTRAS:
        found = _of_missing_extra(error)
    else:
        found = _of_type(error)
    found.__cause__ = error
    return found


def to_wire(error: MemWalError) -> dict[str, Any]:
    """Kind, message and details as JSON-ready values, for Flight and for Spark tasks."""
    return {"kind": error.kind, "message": error.message, "details": error.details}


def from_wire(wire: Mapping[str, Any]) -> MemWalError:
    """The error that `to_wire` described; a kind this version does not know becomes Internal."""
    kind = KINDS.get(str(wire.get("kind")), Internal)
    return kind(str(wire.get("message", "")), wire.get("details") or {})


def _of_missing_extra(error: ModuleNotFoundError) -> MemWalError:
    what, extra = _EXTRAS[str(error.name).partition(".")[0]]
    return Invalid(f"{what} is not installed, and this needs it: pip install 'memwal[{extra}]'")


def _of_type(error: BaseException) -> MemWalError:
    details = {name: getattr(error, name) for name in ("ours", "theirs", "column", "row") if hasattr(error, name)}
    for types, kind in _kinds_by_type():
        if isinstance(error, types):
            reason = getattr(error, "reason", None) if kind is Unavailable else None
            return kind(str(error), details if reason is None else details | {"reason": reason})
    if _NUMBER.search(str(error)):  # a read of Lance's that Arrow hands on
        return _of_os_error(error)
    return Internal(f"{type(error).__name__}: {error}", details)


@cache
def _kinds_by_type() -> tuple[tuple[tuple[type[BaseException], ...], type[MemWalError]], ...]:
    """Which exception of which package is of which kind; the first that fits wins.

    Imported here, not above: Spark tasks import this module and have no use for the storage packages.
    """
    from pyarrow import flight

    import memwal.flush.errors
    import memwal.memtable.errors
    import memwal.wal.errors
    import memwal.wal.panics

    wrong_request = (
        memwal.memtable.errors.InvalidRows,
        memwal.wal.errors.StoreRefused,
        memwal.flush.errors.NotALanceTable,
        memwal.flush.errors.TableExists,
        memwal.flush.errors.NotInitialised,
        memwal.flush.errors.UnsupportedTable,
        memwal.flush.errors.InvalidFileOptions,
        memwal.flush.errors.InvalidResize,
        flight.FlightUnauthenticatedError,
        flight.FlightUnauthorizedError,
    )
    may_pass = (
        memwal.wal.errors.Poisoned,
        memwal.wal.errors.StoreUnavailable,
        memwal.wal.errors.Overtaken,
        memwal.wal.errors.Sealed,
        memwal.wal.errors.Resized,
        memwal.flush.errors.SstInvalid,
        memwal.flush.errors.CommitConflict,
        flight.FlightUnavailableError,
    )
    # MemTableFailed: the rows are in the WAL already, and the next claim of the region replays them.
    may_be_applied = (
        memwal.wal.errors.OutcomeUnknown,
        memwal.memtable.errors.MemTableFailed,
        flight.FlightTimedOutError,
    )
    return (
        ((memwal.wal.errors.Fenced,), FencedError),
        (may_be_applied, UnknownOutcome),
        ((memwal.wal.errors.Corrupt, memwal.flush.errors.CountMismatch), Corrupted),
        (wrong_request, Invalid),
        (may_pass, Unavailable),
        ((memwal.wal.panics.RustPanic,), Internal),
    )


_OS_INVALID = {
    errno.ENOENT: "create it or correct the path",
    errno.ENOTDIR: "a part of the path is a file; correct the path",
    errno.EISDIR: "a file is needed here; correct the path",
    errno.EACCES: "give this user the permission or choose another path",
    errno.EPERM: "give this user the permission or choose another path",
    errno.EROFS: "the file system is read-only; choose another path",
    errno.EADDRINUSE: "choose another port, or port = 0 for any free one",
    errno.EADDRNOTAVAIL: "choose an address of this machine, such as 127.0.0.1",
}


_SOURCE_PLACE = re.compile(r",? /\S+\.rs:\d+(:\d+)?")
"""Where in its source Lance found the error: of no use to whoever reads the message."""

_NUMBER = re.compile(r"\(os error (\d+)\)")
"""How Lance, which is Rust, says which error of the operating system it met: its exceptions have no errno."""

_ANSWER_TEXT = re.compile(r":? *<\?xml.*", re.DOTALL)
"""The whole answer of an object store, which Lance puts behind its status."""


def _of_os_error(error: BaseException) -> MemWalError:
    """Operating-system errors by number: what the configuration can mend is INVALID, the rest may pass by itself."""
    name, said, number = (getattr(error, part, None) for part in ("filename", "strerror", "errno"))
    message = f"{name}: {said}" if name else str(said or error)
    message = _ANSWER_TEXT.sub("", _SOURCE_PLACE.sub("", message))
    by_lance = _NUMBER.search(message)
    number = int(by_lance[1]) if by_lance and number is None else number
    remedy = _OS_INVALID.get(number or 0)
    if remedy is not None:
        return Invalid(f"{message}; {remedy}")
    if number == errno.ENOSPC:
        return Unavailable(f"{message}; free some space")
    return Unavailable(message)


P = ParamSpec("P")
R = TypeVar("R")


def translate_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Let `method` raise only `MemWalError`s; the original stays as `__cause__`."""

    @wraps(method)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except MemWalError:
            raise
        except TypeError as error:
            raise wrong_call(method, args, kwargs) or classify(error) from error
        except BaseException as error:
            from memwal.wal.panics import (
                as_exception,  # only now: with it comes Lance, and a daemon starts without pandas
            )

            raise classify(as_exception(error)) from error

    return translated


def wrong_call(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Invalid | None:
    """What is wrong with the arguments of a call that Python itself refuses; None where they fit the method."""
    signature, name = inspect.signature(method), method.__name__.removesuffix("_embedded")  # `memwal.open`
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = [name for name in signature.parameters if name != "self"]
        unknown = next((name for name in kwargs if name not in takes), None)
        if unknown is None:
            said = f"{error}; its arguments are {', '.join(takes)}" if takes else f"{error}; it has no arguments"
            return Invalid(f"{name}(): {said}")
        meant = _MEANT.get(unknown)
        hint = f"; write {meant}" if meant in takes else suggestion(unknown, takes) if takes else "; it has none"
        return Invalid(f"{name}() has no argument {unknown!r}{hint}")
    return None
