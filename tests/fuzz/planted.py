"""Faults that the fuzzer must find; each patches real code in the fuzzer's daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import memwal.ingest.engine.api.keys
import memwal.ingest.engine.read.base
import memwal.ingest.engine.read.merged
import memwal.ingest.service.rpc.wire
from memwal.ingest.service.daemon.limits import Limits
from memwal.memtable.converted_size import ConvertedSize


@contextmanager
def counts_not_bounded() -> Iterator[None]:
    """A search accepts any number of rows to return."""
    base, merged = memwal.ingest.engine.read.base, memwal.ingest.engine.read.merged
    with (
        patch.object(base, "at_most", lambda wanted, _: wanted),
        patch.object(merged, "at_most", lambda wanted, _: wanted),
        patch.object(base, "expect_room", lambda _: None),
    ):
        yield


@contextmanager
def rows_not_validated() -> Iterator[None]:
    """Arrow data is read without validation."""
    wire, keys = memwal.ingest.service.rpc.wire, memwal.ingest.engine.api.keys
    with patch.object(wire, "check_encoding", lambda _: None), patch.object(keys, "check_encoding", lambda _: None):
        yield


@contextmanager
def only_bytes_counted() -> Iterator[None]:
    """Limits count the bytes that arrive, not the size of the rows built from them."""
    with (
        patch.object(Limits, "take_keys", lambda *_: None),
        patch.object(ConvertedSize, "of", lambda _, batch: batch.nbytes),
    ):
        yield


PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__.replace("_", "-"): fault for fault in (counts_not_bounded, rows_not_validated, only_bytes_counted)
}
