"""Panics of libraries written in Rust (Lance, DataFusion, tantivy) as errors.

A panic reaches Python as `pyo3_runtime.PanicException`. It is a BaseException and no Exception, so that no `except` of
ours, and none of a caller's, would catch it: a thread would end without a word, a region with a reason that nobody can
handle. Each library has a class of its own by that name, which cannot be imported, so it is known by the name.

Wherever such a library is called at a border of ours, the call stands inside `panics_as_errors`, or what it raised goes
through `as_exception`. Nobody else asks for a panic by its name; a house test holds that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

_NAME = "PanicException"
_SHOWN = 200

P = ParamSpec("P")
R = TypeVar("R")


class RustPanic(RuntimeError):
    """A library written in Rust stopped in a fault of its own, or over a damaged file. What it was asked for may be
    done in part; its own rules for commits hold."""

    @classmethod
    def of(cls, panic: BaseException) -> RustPanic:
        """The error for `panic`, in one line."""
        line = (str(panic).splitlines() or [""])[0]
        return cls(f"{_NAME}: {line[:_SHOWN]}")


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a panic, which no `except Exception` catches."""
    return not isinstance(error, Exception) and type(error).__name__ == _NAME


def as_exception(error: BaseException) -> Exception:
    """`error` itself; of a panic the RustPanic that stands for it, with the panic as its cause.

    Raises: `error` where it is neither: an interrupt, an exit.
    """
    if isinstance(error, Exception):
        return error
    if not is_panic(error):
        raise error
    found = RustPanic.of(error)
    found.__cause__ = error
    return found


class _PanicsAsErrors:
    """Thread safety. Any thread; has no state, so one object is for all."""

    def __call__(self, method: Callable[P, R]) -> Callable[P, R]:
        # No ContextDecorator, which costs every call two microseconds; reads go through here.
        @wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except BaseException as error:
                if is_panic(error):
                    raise RustPanic.of(error) from error
                raise

        return guarded

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and is_panic(error):
            raise RustPanic.of(error) from error


panics_as_errors = _PanicsAsErrors()
"""As a context or a decorator: a panic inside becomes a RustPanic, everything else passes."""
