"""Code that runs once at a function of the product: a step of another process, or the end of this one; and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from tests.failure_matrix import Killed, killed

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


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run each of `works` in a thread of its own, all at the same time, and return their answers.

    Raises: the first error of a thread.
    """
    start = threading.Barrier(len(works))
    answers: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        start.wait(60)
        try:
            answers[number] = works[number]()
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers
