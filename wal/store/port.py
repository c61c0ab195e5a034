"""The object-store port: what the log needs from storage, and nothing more.

There is no default body anywhere: a store that cannot create an object conditionally cannot pretend that it
can, and `probe` catches the one that lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class PutOutcome(Enum):
    """What a store says of one conditional create."""

    CREATED = "created"
    """This attempt created the object, durably."""
    ALREADY_EXISTS = "already exists"
    """The key holds an object; maybe from an earlier attempt of our own. Read it back to find out."""
    UNAVAILABLE = "unavailable"
    """Nothing of this attempt landed, nor will it. Same key, same bytes, again."""
    OUTCOME_UNKNOWN = "outcome unknown"
    """No answer: it may have landed, or may land later. Same key, same bytes, again."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing says of one object."""

    key: str
    size: int
    """Bytes."""
    modified: float
    """Unix seconds by the storage's own clock: it may delay a deletion, and decides nothing."""


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
        """The object's bytes, or None where there is no such object."""
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
        """Files below `prefix`, which ends in "/", that are no objects: of puts under way, and of processes that were
        killed in one. `delete` removes them. None where the storage creates objects whole, as S3 does.
        """
        ...

    def list_some(self, prefix: str, most: int) -> list[str]:
        """Any `most` keys that begin with `prefix`; fewer only where there are no more. Costs no more than these."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Every key that begins with `prefix`, in any order."""
        ...

    def delete(self, key: str) -> None:
        """Remove `key`; a key that is not there is no error."""
        ...

    def remove_leftovers(self, prefix: str) -> None:
        """Remove what deleting its objects leaves below `prefix`, which ends in "/": leftovers and empty directories.

        Objects stay, with the directories that hold them. Does nothing on storage without directories.
        """
        ...

    def url(self, key: str) -> str:
        """What pylance opens for `key`, which may name a directory: a local path or a URL."""
        ...
