"""The six kinds of errors in the public API, each defined by what the caller must do.

Packages raise their own precise exceptions (`wal.errors`, `memtable.errors`, `flush.errors`). `classify` converts
them to one of these kinds: in every public method (`translate_errors`), in the CLI, in the Flight service and in the
Spark sink. The kinds follow slatedb's `rfcs/0007-api-errors.md`:

===============  ==============================================================  =========
kind             the caller must                                                 exit code
===============  ==============================================================  =========
INVALID          fix the request or the configuration                            2
UNAVAILABLE      retry with the same token                                       1
UNKNOWN_OUTCOME  retry with the same token; the rows may be applied already      1
FENCED           stop: a newer writer owns the region                            1
CORRUPT          stop and examine: storage holds data that memwal did not write  1
INTERNAL         report it: a fault of this program                              1
===============  ==============================================================  =========
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

from memwal.ingest.suggest import suggestion

P = ParamSpec("P")
R = TypeVar("R")

# ---- reasons, as `details["reason"]` of an error -------------------------------------------------------------------

UNAUTHENTICATED = "unauthenticated"
"""Invalid: the daemon rejected the token."""
NO_TABLE = "no_table"
"""Invalid: the daemon has no table of this name, or several tables and the call names none."""
MISFIT = "misfit"
"""Invalid: the table does not fit the configuration, its template in a fleet, or cannot be opened with it."""
PROTOCOL = "protocol"
"""Invalid: the two processes have incompatible protocol versions."""
BUSY = "busy"
"""Unavailable: the region or the table has reached a limit, named in `details["limit"]`, or the daemon its limit of
calls."""
UNFLUSHED_MAX, PENDING_MAX = "memtable.unflushed_max", "commit.pending_max"
MEMORY_MAX, PUT_RATE_MAX = "table.memory_max", "table.put_rate_max"
"""The limits that reject puts, by the names of their settings."""
FLUSH_FAILING = "flush_failing"
"""Unavailable: memtables are full because flushes fail. Waiting does not help, so clients raise it at once."""
DRAINING = "draining"
"""Unavailable: the daemon is about to end."""
NOT_OWNER = "not_owner"
"""Unavailable: another process owns `details["region"]`."""
LOST = "lost"
"""Unavailable, raised by the client: no answer. `details["ended"]`: the daemons that had begun to answer.
`details["not_reached"]`: no process listens at the endpoint."""
SIZE, LATE, MEMORY = "size", "late", "memory"
"""Invalid: more bytes, time or memory than the daemon permits for one call."""
RESIZED = "resized"
"""Unavailable: the table has another routing now."""
MOVED = "moved"
"""Unavailable, raised by the client: another daemon claimed the region during the wait."""
SILENT = "source_silent"
"""Unavailable, raised by a run: the source does not answer. Retrying later may succeed."""


# ---- kinds ---------------------------------------------------------------------------------------------------------


class MemWalError(Exception):
    """The base of all errors of the public API: a kind, a message of one line per problem, and details for JSON.

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
        """The printed message: one line per problem, never empty."""
        return tuple(self.message.splitlines()) or (type(self).__name__,)


class Invalid(MemWalError):
    """The request or the configuration is wrong; nothing was written. Fix it and retry."""

    kind = "INVALID"
    exit_code = 2

    @classmethod
    def of(cls, problems: Iterable[str]) -> Invalid:
        """Return one error with all problems, one line each."""
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
    """Storage holds data that memwal did not write. Stop and examine it; nothing was skipped."""

    kind = "CORRUPT"


class Internal(MemWalError):
    """A fault of this program. Report it."""

    kind = "INTERNAL"


KINDS: Mapping[str, type[MemWalError]] = {
    error.kind: error for error in (Invalid, Unavailable, UnknownOutcome, FencedError, Corrupted, Internal)
}


def to_wire(error: MemWalError) -> dict[str, Any]:
    """Return kind, message and details as JSON values, for Flight and for Spark tasks."""
    return {"kind": error.kind, "message": error.message, "details": error.details}


def from_wire(wire: Mapping[str, Any]) -> MemWalError:
    """Return the error that `to_wire` described; an unknown kind becomes Internal."""
    kind = KINDS.get(str(wire.get("kind")), Internal)
    return kind(str(wire.get("message", "")), wire.get("details") or {})


# ---- exceptions of packages to kinds -------------------------------------------------------------------------------


_EXTRAS = {
    "pyspark": ("PySpark", "spark"),
    "py4j": ("PySpark", "spark"),
    "pandas": ("pandas, which PySpark needs,", "spark"),
    "fastavro": ("fastavro", "kafka"),
    "opentelemetry": ("OpenTelemetry", "otel"),
}
"""Optional libraries by import name: the name in messages, and the extra that installs it.

They are imported only where they are used. If one is missing, the error names the command that installs it.
"""


def denies_access(error: MemWalError) -> bool:
    """Return whether `error` means that the daemon is alive but rejects the token, or presents an untrusted
    certificate."""
    return error.details.get("reason") == UNAUTHENTICATED or bool(error.details.get("untrusted"))


def classify(error: BaseException) -> MemWalError:
    """Return the error of the matching kind for a package's exception, with its message; `__cause__` is the original.

    The kind depends on the type, never on the text, with one exception: Lance's exceptions contain the number of an
    operating-system error only in their text. A MemWalError is returned unchanged. A lost connection is UNAVAILABLE
    here; code that had already sent rows raises `UnknownOutcome` itself.
    """
    if isinstance(error, MemWalError):
        return error
    if isinstance(error, OSError):
        classified = _of_os_error(error)
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _EXTRAS:
        what, extra = _EXTRAS[str(error.name).partition(".")[0]]
        classified = Invalid(f"{what} is not installed, and this needs it: pip install 'memwal[{extra}]'")
    else:
        classified = _of_type(error)
    classified.__cause__ = error
    return classified


def _of_type(error: BaseException) -> MemWalError:
    details = {name: getattr(error, name) for name in ("ours", "theirs", "column", "row") if hasattr(error, name)}
    for types, kind in _kinds_by_type():
        if isinstance(error, types):
            reason = getattr(error, "reason", None) if kind is Unavailable else None
            text = without_source_places(str(error))
            return kind(text, details if reason is None else details | {"reason": reason})
    if _NUMBER.search(str(error)):  # a read error in Lance that Arrow passes on
        return _of_os_error(error)
    return Internal(without_source_places(f"{type(error).__name__}: {error}"), details)


@cache
def _kinds_by_type() -> tuple[tuple[tuple[type[BaseException], ...], type[MemWalError]], ...]:
    """Return pairs of exception types and their kind; the first match counts.

    The imports are here because Spark tasks import this module and do not need the storage packages.
    """
    from pyarrow import flight

    from memwal.flush import errors as flush_errors
    from memwal.memtable import errors as memtable_errors
    from memwal.wal import errors as wal_errors
    from memwal.wal.panics import RustPanic

    wrong_request = (
        memtable_errors.InvalidRows,
        wal_errors.StoreRefused,
        flush_errors.NotALanceTable,
        flush_errors.TableExists,
        flush_errors.NotInitialised,
        flush_errors.UnsupportedTable,
        flush_errors.InvalidFileOptions,
        flush_errors.InvalidResize,
        flush_errors.InvalidBackup,
        flight.FlightUnauthenticatedError,
        flight.FlightUnauthorizedError,
    )
    may_pass = (
        wal_errors.Poisoned,
        wal_errors.StoreUnavailable,
        wal_errors.Overtaken,
        wal_errors.Sealed,
        wal_errors.Resized,
        flush_errors.SstInvalid,
        flush_errors.CommitConflict,
        flush_errors.LoadEnded,
        flush_errors.BackupOvertaken,
        flight.FlightUnavailableError,
    )
    # MemTableFailed: the rows are in the WAL already, and the next claim of the region replays them.
    may_be_applied = (
        wal_errors.OutcomeUnknown,
        memtable_errors.MemTableFailed,
        flight.FlightTimedOutError,
    )
    return (
        ((wal_errors.Fenced,), FencedError),
        (may_be_applied, UnknownOutcome),
        ((wal_errors.Corrupt, flush_errors.CountMismatch), Corrupted),
        (wrong_request, Invalid),
        (may_pass, Unavailable),
        ((RustPanic,), Internal),
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


_SOURCE_PLACE = re.compile(r",?\s+(at )?[^\s,]+\.rs:\d+(:\d+)?")
"""The source location in messages of Lance and other Rust libraries, on the machine that built them."""

_NUMBER = re.compile(r"\(os error (\d+)\)")
"""The operating-system error in messages of Lance, which is written in Rust; its exceptions have no errno."""

_ANSWER_TEXT = re.compile(r":? *<\?xml.*", re.DOTALL)
"""The full response of an object store, which Lance appends to its status."""


def without_source_places(text: str) -> str:
    """Return a message without the source locations of Rust libraries."""
    return _SOURCE_PLACE.sub("", text) if ".rs:" in text else text


def _of_os_error(error: BaseException) -> MemWalError:
    """Classify an operating-system error by number: INVALID if another configuration helps, else UNAVAILABLE."""
    name, said, number = (getattr(error, part, None) for part in ("filename", "strerror", "errno"))
    message = f"{name}: {said}" if name else str(said or error)
    message = _ANSWER_TEXT.sub("", without_source_places(message))
    by_lance = _NUMBER.search(message)
    number = int(by_lance[1]) if by_lance and number is None else number
    remedy = _OS_INVALID.get(number or 0)
    if remedy is not None:
        return Invalid(f"{message}; {remedy}")
    if number == errno.ENOSPC:
        return Unavailable(f"{message}; free some space")
    return Unavailable(message)


# ---- public methods ------------------------------------------------------------------------------------------------


_MEANT = {
    "where": "filter",
    "predicate": "filter",
    "condition": "filter",
    "select": "columns",
    "fields": "columns",
    "top_k": "k",
    "top": "k",
    "limit": "k",
    "n": "k",
    "query": "text",
    "primary_key": "key",
    "keys": "key",
    "rows": "data",
    "data": "rows",
    "set": "values",
    "from_": "since",
    "starting_version": "since",
    "path": "uri",
    "index": "indexes",
}
"""Argument names of other libraries, and the corresponding names of memwal."""


def translate_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate `method` so that it raises only `MemWalError`s; the original exception is `__cause__`."""

    @wraps(method)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except MemWalError:
            raise
        except TypeError as error:
            raise wrong_call(method, args, kwargs) or classify(error) from error
        except BaseException as error:
            # Imported here because it imports Lance, and a daemon starts without pandas.
            from memwal.wal.panics import as_exception

            raise classify(as_exception(error)) from error

    return translated


def wrong_call(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Invalid | None:
    """Return the error of a call that raised TypeError for its arguments; None if they fit the method."""
    from inspect import signature as signature_of  # slow to import, and only needed here

    signature, name = signature_of(method), method.__name__.removesuffix("_embedded")  # `memwal.open`
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = [name for name in signature.parameters if name != "self"]
        unknown = next((name for name in kwargs if name not in takes), None)
        if unknown is None:
            text = f"{error}; its arguments are {', '.join(takes)}" if takes else f"{error}; it has no arguments"
            return Invalid(f"{name}(): {text}")
        meant = _MEANT.get(unknown)
        hint = f"; write {meant}" if meant in takes else suggestion(unknown, takes) if takes else "; it has none"
        return Invalid(f"{name}() has no argument {unknown!r:.200}{hint}")
    return None
