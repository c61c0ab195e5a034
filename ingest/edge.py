"""Where package errors become the six kinds: every public method is wrapped once, here."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ingest.errors import MemWalError, classify
from wal.panics import as_exception

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
        except TypeError as error:
            raise _mistake(method, args, kwargs) or classify(error) from error
        except BaseException as error:
            raise classify(as_exception(error)) from error

    return translated


def _mistake(method: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> MemWalError | None:
    from ingest.arguments import wrong_call  # only now: most of this package imports this module

    return wrong_call(method, args, kwargs)
