"""Convert panics of Rust libraries (Lance, DataFusion, tantivy) into errors.

A panic reaches Python as `pyo3_runtime.PanicException`. It is a BaseException but not an Exception, so `except
Exception` does not catch it: a thread would end silently, or a region would fail with an error that no caller can
handle. Each library has its own class of that name, which cannot be imported, so it is recognised by name.

Every call of a Rust library at the edge of a module is inside `panics_as_errors`, or its error passes through
`as_exception`. No other code checks for a panic by its name; a house test enforces that.
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
    """A Rust library panicked because of its own defect or a damaged file.

    The operation may be partly done; the library's rules for commits hold.
    """

    @classmethod
    def of(cls, panic: BaseException) -> RustPanic:
        """Return the error for `panic`, in one line."""
        line = (str(panic).splitlines() or [""])[0]
        return cls(f"{_NAME}: {line[:_SHOWN]}")


def is_panic(error: BaseException) -> bool:
    """Return whether `error` is a panic, which `except Exception` does not catch."""
    return not isinstance(error, Exception) and type(error).__name__ == _NAME


def as_exception(error: BaseException) -> Exception:
    """Return `error`, or for a panic a RustPanic with the panic as its cause.

    Raises `error` if it is neither, such as an interrupt or an exit.
    """
    if isinstance(error, Exception):
        return error
    if not is_panic(error):
        raise error
    found = RustPanic.of(error)
    found.__cause__ = error
    return found


class _PanicsAsErrors:
    """Thread safety. Any thread; it has no state, so one object is shared."""

    def __call__(self, method: Callable[P, R]) -> Callable[P, R]:
        # Not a ContextDecorator, which adds two microseconds to every call, and reads pass through here.
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
"""Context or decorator: a panic inside becomes a RustPanic; other errors pass unchanged."""
