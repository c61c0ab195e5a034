"""Code that runs once at a function of the product: a step of another process, or the end of this one; and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from memwal.wal import LocalStore, PutOutcome
from tests.failure_matrix import Killed, killed
from tests.support.waits import as_only_process

Once = Callable[..., None]
"""The type of the fixture `once`."""


def run_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], Any], *, after: bool = False
) -> None:
    """Run `act` before, or after, the next call of the function `name` of `owner`."""
    real, left = getattr(owner, name), [act]

    def interposed(*args: Any, **more: Any) -> Any:
        if not after and left:
            left.pop()()
        answer = real(*args, **more)
        if after and left:
            left.pop()()
        return answer

    monkeypatch.setattr(owner, name, interposed)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> Once:
    """Return `run_once` until the end of the test."""
    return partial(run_once, monkeypatch)


@contextmanager
def no_pruning() -> Iterator[None]:
    """Let commits leave their SSTs in the manifests, as if the process ended before step 9."""
    with patch("memwal.flush.commits.committer.prune_all", lambda *_: None):
        yield


@contextmanager
def puts_answered(outcome: PutOutcome, of: str = "") -> Iterator[None]:
    """Let the puts of local stores whose keys contain `of` write nothing and return `outcome`."""
    real = LocalStore.put_if_absent

    def put(store: LocalStore, key: str, data: bytes) -> PutOutcome:
        return outcome if of in key else real(store, key, data)

    with patch.object(LocalStore, "put_if_absent", put):
        yield


@contextmanager
def killed_at(owner: Any, name: str, *, after: bool = False) -> Iterator[None]:
    """Expect that the process ends before, or after, its first call of the function `name` of `owner`."""
    with patch.object(owner, name, killed(getattr(owner, name), after=after)), pytest.raises(Killed):
        yield


@pytest.fixture
def only_process() -> Iterator[None]:
    """Leave out waits for other processes until the end of the test; see `as_only_process`."""
    with as_only_process():
        yield
