"""The six kinds of errors: the kind of each package error, and that kinds survive pickling and the wire."""

from __future__ import annotations

import errno
import pickle
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyarrow import flight

import memwal.flush.errors
import memwal.memtable.errors
import memwal.wal.errors
from memwal.ingest.errors import (
    KINDS,
    Corrupted,
    FencedError,
    Internal,
    Invalid,
    MemWalError,
    Unavailable,
    UnknownOutcome,
    classify,
    from_wire,
    to_wire,
)

REGION = UUID(int=7)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (memwal.wal.errors.Fenced(REGION, 6, 7), FencedError),
        (memwal.wal.errors.OutcomeUnknown("no answer"), UnknownOutcome),
        (memwal.wal.errors.FencedAfterWrite(REGION, 6, 7), UnknownOutcome),
        (memwal.wal.errors.Poisoned("stopped"), Unavailable),
        (memwal.wal.errors.StoreUnavailable("full"), Unavailable),
        (memwal.wal.errors.Overtaken(memwal.wal.bucket_region(0), 3, 8, 2), Unavailable),
        (memwal.wal.errors.StoreRefused("read-only"), Invalid),
        (memwal.wal.errors.Sealed("sealed"), Unavailable),
        (memwal.wal.errors.Resized(REGION, 1, 2), Unavailable),
        (memwal.wal.errors.Corrupt("a hole"), Corrupted),
        (memwal.wal.errors.ConcurrentUse("two threads"), Internal),
        (memwal.memtable.errors.InvalidRows("null key", column="id", row=3), Invalid),
        (memwal.memtable.errors.MemTableFailed(3), UnknownOutcome),
        (memwal.flush.errors.NotALanceTable("no table"), Invalid),
        (memwal.flush.errors.NotInitialised("memwal init"), Invalid),
        (memwal.flush.errors.CommitConflict("again"), Unavailable),
        (memwal.flush.errors.CountMismatch("one key twice"), Corrupted),
        (memwal.flush.errors.FlushOutOfOrder("2 before 1"), Internal),
        (flight.FlightUnavailableError("down"), Unavailable),
        (flight.FlightTimedOutError("late"), UnknownOutcome),
        (OSError(errno.EADDRINUSE, "Address already in use"), Invalid),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.parquet"), Invalid),
        (OSError(errno.ENOSPC, "No space left on device", "data"), Unavailable),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Unavailable),
        (ZeroDivisionError("division by zero"), Internal),
    ],
)
def test_every_package_error_has_a_kind(error: Exception, kind: type[MemWalError]) -> None:
    found = classify(error)
    assert type(found) is kind
    assert found.__cause__ is error
    assert found.exit_code == (2 if kind is Invalid else 1)
    assert len(found.lines) == 1


@pytest.mark.parametrize(
    ("error", "text", "details"),
    [
        (memwal.wal.errors.Fenced(REGION, 6, 7), "writer epoch 6 was fenced by epoch 7", {"ours": 6, "theirs": 7}),
        (
            memwal.memtable.errors.InvalidRows("null key", column="id", row=3),
            "null key",
            {"column": "id", "row": 3},
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x.parquet"),
            "x.parquet: No such file or directory; create it or correct the path",
            {},
        ),
    ],
)
def test_an_error_keeps_what_it_names(error: Exception, text: str, details: dict[str, Any]) -> None:
    found = classify(error)
    assert text in str(found)
    assert details.items() <= found.details.items()


@pytest.mark.parametrize("kind", [OSError, pa.ArrowInvalid])
def test_an_error_of_the_operating_system_is_known_in_what_lance_says_of_it(kind: type[Exception]) -> None:
    found = classify(kind("t: LanceError(IO): Permission denied (os error 13), /lance/local.rs:274:24"))
    assert type(found) is Invalid
    assert found.lines == (
        "t: LanceError(IO): Permission denied (os error 13); give this user the permission or choose another path",
    )
    assert type(classify(kind("LanceError(IO): Input/output error (os error 5)"))) is Unavailable
    assert type(classify(memwal.wal.errors.StoreUnavailable("Permission denied (os error 13)"))) is Unavailable


def test_a_kind_is_not_classified_twice() -> None:
    error = Unavailable("later")
    assert classify(error) is error


@pytest.mark.parametrize("kind", list(KINDS.values()))
def test_errors_survive_pickle_and_wire(kind: type[MemWalError]) -> None:
    error = kind("one\ntwo", {"ours": 6, "theirs": 7})
    for copy in (pickle.loads(pickle.dumps(error)), from_wire(to_wire(error))):
        assert type(copy) is kind
        assert copy.lines == ("one", "two")
        assert copy.details == {"ours": 6, "theirs": 7}


def test_an_unknown_kind_on_the_wire_is_internal() -> None:
    assert type(from_wire({"kind": "FROM_THE_FUTURE", "message": "?"})) is Internal


def test_several_problems_are_several_lines() -> None:
    assert Invalid.of(["a", "b"]).lines == ("a", "b")


def test_every_error_of_the_packages_is_classified_on_purpose() -> None:
    """A new exception type needs a kind, or an entry here as an error in memwal itself."""
    internal = {
        memwal.wal.errors.ConcurrentUse,
        memwal.flush.errors.FlushOutOfOrder,
        memwal.memtable.errors.MemTableFrozen,
    }
    bases = {memwal.wal.errors.WalError, memwal.flush.errors.FlushError}
    for package in (memwal.wal.errors, memwal.memtable.errors, memwal.flush.errors):
        for kind in vars(package).values():
            if (
                not (isinstance(kind, type) and issubclass(kind, Exception))
                or kind in bases
                or kind.__name__.startswith("_")
            ):
                continue
            blank = kind.__new__(kind)
            for name in ("region_id", "ours", "theirs", "position", "replay_after", "generation"):
                vars(blank).setdefault(name, 0)
            assert (type(classify(blank)) is Internal) == (kind in internal), kind


def test_an_object_stores_whole_answer_is_left_out() -> None:
    answer = '<?xml version="1.0"?>\n<Error>…</Error>, /a.rs:1:2'
    error = classify(OSError(f"LanceError(IO): Server returned status code: 403 Forbidden: {answer}"))
    assert error.lines == ("LanceError(IO): Server returned status code: 403 Forbidden",)
