"""`--quiet`, an option of every command: print results and errors, but no progress, hints or notes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.status import Status

C = TypeVar("C", bound=Callable[..., Any])
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print results and errors, but no progress, hints or notes")]

_QUIET: ContextVar[bool] = ContextVar("memwal_quiet", default=False)


class CommandConsole(Console):
    """Standard output of a command; `notes` receives the output that `--quiet` suppresses.

    Without emoji: a path may contain `FILE:a:`.
    """

    def __init__(self) -> None:
        super().__init__(emoji=False)
        self.is_quiet = _QUIET.get()
        self.notes: Console = Console(emoji=False, quiet=True) if self.is_quiet else self

    def status(self, status: RenderableType, **how: Any) -> Status:
        """Return the line that is shown on a terminal during a step."""
        return self.notes.status(status, **how) if self.is_quiet else super().status(status, **how)

    @property
    def on_replay(self) -> Callable[..., None] | None:
        """Callback for the replay of a log: one that prints nothing, if quiet; None shows a bar on a terminal."""
        return (lambda *_: None) if self.is_quiet else None


class Commands(typer.Typer):
    """A group of commands that all have `--quiet`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[C], C]:
        """Register a function as a command, with `--quiet` after its own options."""
        register = super().command(name, **options)

        def added(function: C) -> C:
            register(_with_quiet(function))
            return function

        return added


def _with_quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the parameter `quiet`, which makes its `CommandConsole`s quiet."""

    @wraps(function)
    def quieted(*, quiet: bool, **arguments: Any) -> Any:
        before = _QUIET.set(quiet)
        try:
            return function(**arguments)
        finally:
            _QUIET.reset(before)

    own = inspect.signature(function, eval_str=True)
    option = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    parameters = [*own.parameters.values(), option]
    vars(quieted)["__signature__"] = own.replace(parameters=parameters)
    quieted.__annotations__ = {each.name: each.annotation for each in parameters}
    return quieted
