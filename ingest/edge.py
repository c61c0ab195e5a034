"""Where package errors become the six kinds: every public method is wrapped once, here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ingest.errors import MemWalError, classify

P = ParamSpec("P")
R = TypeVar("R")


def at_the_edge(method: Callable[P, R]) -> Callable[P, R]:
    """Let `method` raise only `MemWalError`s; the original stays as `__cause__`."""

    @wraps(method)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except MemWalError:
            raise
        except Exception as error:
            raise classify(error) from error

    return translated
