"""Code that runs once at a function of the product: a step of another process, or the end of this one; and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

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
def killed_at(owner: Any, name: str, *, after: bool = False) -> Iterator[None]:
    """Expect that the process ends before, or after, its first call of the function `name` of `owner`."""
    with patch.object(owner, name, killed(getattr(owner, name), after=after)), pytest.raises(Killed):
        yield


@pytest.fixture
def only_process() -> Iterator[None]:
    """Leave out waits for other processes until the end of the test; see `as_only_process`."""
    with as_only_process():
        yield
