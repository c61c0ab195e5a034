"""Durability faults that a run must find; each patches real code while a workload runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import memwal.flush.commits.committer
import memwal.flush.sst.data
import memwal.flush.sst.files
from memwal.wal.layout import parse_entry_key
from memwal.wal.store import local
from memwal.wal.store.local import LocalStore
from memwal.wal.store.port import PutOutcome


@contextmanager
def entry_not_synced() -> Iterator[None]:
    """An entry's file is linked to its name without an fsync."""
    with _puts_without("file", lambda key: parse_entry_key(key) is not None):
        yield


@contextmanager
def directory_not_synced() -> Iterator[None]:
    """The directory of the log is not synced after the link."""
    with _puts_without("directory", lambda key: parse_entry_key(key) is not None):
        yield


@contextmanager
def manifest_not_synced() -> Iterator[None]:
    """A region manifest's file is not synced before the link."""
    with _puts_without("file", lambda key: "/manifest/" in key):
        yield


@contextmanager
def base_not_synced() -> Iterator[None]:
    """SSTs are pruned although the base version with their rows was not synced."""
    with patch.object(memwal.flush.commits.committer, "sync_table", lambda dataset: None):
        yield


@contextmanager
def sst_not_synced() -> Iterator[None]:
    """An SST is published without an fsync of its files."""
    with (
        patch.object(memwal.flush.sst.files, "sync_tree", lambda path: None),
        patch.object(memwal.flush.sst.data, "sync_files", lambda path: None),
    ):
        yield


@contextmanager
def _puts_without(sync: str, concerned: Callable[[str], bool]) -> Iterator[None]:
    """Skip the fsync of the file, or of the directory, in `LocalStore.put_if_absent` for some keys."""
    put, fsync = LocalStore.put_if_absent, os.fsync
    skipping: set[int] = set()

    def leaving_out(descriptor: int) -> None:
        is_file = ".memwal-put-" in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        if threading.get_ident() in skipping and is_file == (sync == "file"):
            return
        fsync(descriptor)

    def putting(self: LocalStore, key: str, data: bytes) -> PutOutcome:
        if not concerned(key):
            return put(self, key, data)
        self._directory(key.rpartition("/")[0])  # created and synced as usual
        skipping.add(threading.get_ident())
        try:
            return put(self, key, data)
        finally:
            skipping.discard(threading.get_ident())

    with patch.object(LocalStore, "put_if_absent", putting), patch.object(local.os, "fsync", leaving_out):
        yield


PLANTED: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    each.__name__: each
    for each in (entry_not_synced, directory_not_synced, manifest_not_synced, base_not_synced, sst_not_synced)
}
