"""The object-store port: the operations that the log needs from storage.

No method has a default body: a store must implement conditional creation itself, and `probe` finds a store whose
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
    """The key holds an object, perhaps from an earlier attempt of our own. Read it back to find out."""
    UNAVAILABLE = "unavailable"
    """Nothing of this attempt landed, nor will land. Retry with the same key and bytes."""
    OUTCOME_UNKNOWN = "outcome unknown"
    """No answer: it may have landed, or may land later. Retry with the same key and bytes."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Unix seconds by the storage's own clock: it may delay a deletion, never decide one."""


class ObjectStore(Protocol):
    """Flat keys to immutable bytes, below one root (the table's directory).

    Thread safety. Any thread.
    Durability. CREATED and ALREADY_EXISTS are answered only when the object survives a crash of the machine.
    Invariants. (1) Of any number of `put_if_absent` of one key at most one is answered CREATED, until the key
    is deleted. (2) `get` returns a whole object or None, never a part of one.
    Errors. Every method raises `StoreUnavailable` (nothing of this call landed; try again) or `StoreRefused`
    (configuration), naming the path; `put_if_absent` may raise `StoreUnavailable` where it knows a reason,
    with the meaning of UNAVAILABLE.
    """

    storage_options: dict[str, str]
    """Lance's own keys for the same storage; pass them to pylance together with `url`."""
    remote: bool
    """Whether each call is a request over a network, so that several calls at once take little longer than one."""

    def put_if_absent(self, key: str, data: bytes) -> PutOutcome:
        """Create `key` with `data` unless it exists."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Create or overwrite `key`. Only for hints, which may be lost or old; never for the truth."""
        ...

    def get(self, key: str) -> bytes | None:
        """The object's bytes, or None where it does not exist."""
        ...

    def exists(self, key: str) -> bool:
        """Whether `key` holds an object."""
        ...

    def children(self, prefix: str) -> list[str]:
        """Names of the first path segment after `prefix` (which ends in "/") that have keys below them."""
        ...

    def describe(self, prefix: str) -> list[ObjectInfo]:
        """Every object whose key begins with `prefix`, in any order."""
        ...

    def leftovers(self, prefix: str) -> list[ObjectInfo]:
        """Files below `prefix`, which ends in "/", that are no objects: of puts under way, and of puts of killed
        processes. `delete` removes them. Always empty on storage that creates objects whole, as S3 does.
        """
        ...

    def list_some(self, prefix: str, most: int) -> list[str]:
        """Any `most` keys that begin with `prefix`, or all if there are fewer. Costs no more than listing these."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Every key that begins with `prefix`, in any order."""
        ...

    def delete(self, key: str) -> None:
        """Remove `key`; a missing key is no error."""
        ...

    def remove_leftovers(self, prefix: str) -> None:
        """Remove what deleting its objects leaves below `prefix`, which ends in "/": leftovers and empty directories.

        Objects stay, with the directories that hold them. Does nothing on storage without directories.
        """
        ...

    def url(self, key: str) -> str:
        """What pylance opens for `key`, which may name a directory: a local path or a URL."""
        ...
