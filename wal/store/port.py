"""The object-store port: the operations that the log needs from storage.

No method has a default body: a store must implement conditional creation itself, and `probe` detects a store whose
conditional creation is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PutOutcome(Enum):
    """The outcome of one conditional create."""

    CREATED = "created"
    """This attempt created the object, durably."""
    ALREADY_EXISTS = "already exists"
    """The key holds an object, possibly from an earlier attempt of the same writer. Read it back to find out."""
    UNAVAILABLE = "unavailable"
    """Nothing of this attempt landed or will land. Retry with the same key and bytes."""
    OUTCOME_UNKNOWN = "outcome unknown"
    """No answer: it may have landed, or may land later. Retry with the same key and bytes."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Unix seconds by the storage's own clock. It may delay a deletion but never decide one."""


class ObjectStore(Protocol):
    """Flat keys to immutable bytes, below one root (the table's directory).

    Thread safety. Any thread.
    Durability. CREATED and ALREADY_EXISTS are returned only when the object survives a crash of the machine.
    Invariants. (1) Of any number of `put_if_absent` calls for one key, at most one returns CREATED until the key is
    deleted. (2) `get` returns a whole object or None, never a part of one.
    Errors. Every method raises `StoreUnavailable` (nothing of this call landed; retry) or `StoreRefused`
    (configuration), naming the path. `put_if_absent` may raise `StoreUnavailable` if it knows a reason, with the
    meaning of UNAVAILABLE.
    """

    storage_options: dict[str, str]
    """Lance's own options for the same storage; pass them to pylance together with `url`."""
    remote: bool
    """Whether each call is a network request, so that several concurrent calls take little longer than one."""

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        """Create `key` with `data` unless it exists."""

    def put(self, key: str, data: bytes) -> None:
        """Create or overwrite `key`. Only for hints, which may be lost or outdated; never for authoritative data."""

    def get(self, key: str) -> bytes | None:
        """Return the object's bytes, or None if it does not exist."""

    def exists(self, key: str) -> bool:
        """Return whether `key` holds an object."""

    def children(self, prefix: str) -> list[str]:
        """Return the names of the first path segment after `prefix` (which ends in "/") that have keys below them."""

    def describe(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key begins with `prefix`, in any order."""

    def leftovers(self, prefix: str) -> list[ObjectInfo]:
        """Return the files below `prefix`, which ends in "/", that are not objects: files of running puts and of killed
        processes.

        `delete` removes them. Always empty on storage that creates objects whole, such as S3.
        """

    def list_some(self, prefix: str, most: int) -> list[str]:
        """Return any `most` keys that begin with `prefix`, or all if fewer exist. Costs no more than listing these."""

    def list(self, prefix: str) -> list[str]:
        """Return every key that begins with `prefix`, in any order."""

    def delete(self, key: str) -> None:
        """Delete `key`; a missing key is not an error."""

    def remove_leftovers(self, prefix: str) -> None:
        """Delete what remains below `prefix`, which ends in "/", after its objects: leftovers and empty directories.

        Objects are kept, with the directories that hold them. Does nothing on storage without directories.
        """

    def url(self, key: str) -> str:
        """Return the local path or URL that pylance opens for `key`, which may name a directory."""
