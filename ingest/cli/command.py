"""What all commands share: the configuration, the console with `--quiet`, and the exit code.

Exit code 2: the user can correct the request or the configuration. 1: anything else. `MEMWAL_TRACEBACK` in the
environment adds the traceback.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
import typer.core
from rich.console import Console, RenderableType
from rich.status import Status

from memwal.ingest.errors import Internal, Invalid, MemWalError, classify
from memwal.ingest.suggest import near

if TYPE_CHECKING:
    from memwal.ingest.settings.load import Settings

C = TypeVar("C", bound=Callable[..., Any])
TableName = Annotated[
    str, typer.Option("--table", metavar="NAME", help="table of a configuration with several", show_default=False)
]
Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="TOML file (examples: configs/); FILE:NAME selects one of several pipelines",
        show_default=False,
    ),
]
Format = Annotated[Literal["table", "json", "ndjson", "csv"], typer.Option(help="output format")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would be deleted, but delete nothing")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print results and errors, but no progress, hints or notes")]

_COMMANDS = {
    **dict.fromkeys(("put", "insert", "upsert", "import", "write", "copy"), "write memwal load CONFIG FILES"),
    **dict.fromkeys(("select", "get", "find", "search", "scan", "read", "head", "show"), "write memwal query CONFIG"),
    **dict.fromkeys(("watch", "follow", "subscribe", "consume", "changes", "cdc"), "write memwal tail CONFIG"),
    **dict.fromkeys(("create", "new"), "write memwal config new CONFIG --from FILE, then memwal init CONFIG"),
    **dict.fromkeys(("ls", "list", "info", "describe"), "write memwal status CONFIG, or memwal inspect PATH"),
    **dict.fromkeys(("history", "versions"), "write memwal log CONFIG"),
    **dict.fromkeys(("start", "stream", "ingest"), "write memwal run CONFIG, or memwal serve CONFIG"),
    **dict.fromkeys(("vacuum", "cleanup"), "write memwal gc CONFIG"),
    **dict.fromkeys(("compact", "optimize", "merge"), "write memwal commit CONFIG"),
    "version": "write memwal --version",
    "help": "write memwal --help",
}
"""Commands of other programs, and what to write instead."""
_OPTIONS = {
    "--where": "--filter",
    **dict.fromkeys(("--sort", "--sort-by", "--order"), "--order-by"),
    **dict.fromkeys(("--select", "--fields"), "--columns"),
    **dict.fromkeys(("--output", "--out", "-o"), "--format"),
    **dict.fromkeys(("-n", "-k", "--top", "--head", "--max"), "--limit"),
}
"""Options of other programs, and those of memwal."""
_QUIET: ContextVar[bool] = ContextVar("memwal_quiet", default=False)
_TABLE: ContextVar[str] = ContextVar("memwal_table", default="")


class CommandConsole(Console):
    """Standard output of a command; `notes` receives the output that `--quiet` suppresses.

    Without emoji: a path may contain `FILE:a:`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)
        self.is_quiet = _QUIET.get()
        self.notes: Console = Console(emoji=False, quiet=True) if self.is_quiet else self

    def say(self, text: str) -> None:
        """Print a line of the result, wrapped on a terminal."""
        self.out(self.wrapped(text) if self.file.isatty() else text, highlight=False)

    def note(self, text: str) -> None:
        """Print a line that `--quiet` suppresses."""
        self.notes.out(self.wrapped(text) if self.file.isatty() else text, highlight=False)

    def wrapped(self, text: str) -> str:
        """Return `text` with line breaks between words, which a terminal would put into them."""
        how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
        return "\n".join(fill(line, self.width, **how) for line in text.split("\n"))

    def status(self, status: RenderableType, **how: Any) -> Status:
        """Return the line that is shown on a terminal during a step."""
        return self.notes.status(status, **how) if self.is_quiet else super().status(status, **how)

    @property
    def on_replay(self) -> Callable[..., None] | None:
        """Callback for the replay of a log: one that prints nothing, if quiet; None shows a bar on a terminal."""
        return (lambda *_: None) if self.is_quiet else None


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a command on the table of a configuration."""

    settings: Settings
    environ: Mapping[str, str]
    console: CommandConsole = field(default_factory=CommandConsole)
    fleet: Settings | None = None
    """The whole configuration."""

    @classmethod
    def of(cls, config: Path, *, routed: bool = False) -> Call:
        """Load the settings of the table that `--table` names, or of the only one, and begin tracing. `routed`: see
        `one_table`.

        Raises: Invalid with every problem; errors of `one_table`.
        """
        settings = configuration(config)
        return cls(one_table(settings, config, routed=routed), os.environ, fleet=settings)

    @property
    def uri(self) -> str:
        """The URI of the table."""
        return self.settings.table.uri

    @property
    def storage_options(self) -> dict[str, str]:
        """Lance's storage options of the table, with resolved secrets."""
        return self.settings.storage_options(self.environ)

    @property
    def commit_limits(self) -> dict[str, Any]:
        """The arguments of a commit that the settings decide."""
        commit = self.settings.commit
        return {"retries": commit.retries, "memory_max": commit.memory_max, "options": self.settings.wal.options()}


# ---- the table -------------------------------------------------------------------------------------------------------


def configuration(config: Path) -> Settings:
    """Load a configuration with all its tables, and begin tracing. Raises: Invalid with every problem."""
    from memwal.ingest import tracing
    from memwal.ingest.settings.load import load_tables

    settings = load_tables(config, os.environ)
    tracing.begin("memwal", settings.tracing)
    return settings


def table_option() -> str:
    """Return the name in `--table`; "" without this option."""
    return _TABLE.get()


def one_table(settings: Settings, config: Path | str, *, routed: bool = False) -> Settings:
    """Return the settings of the table that `--table` names, or of the only one of the configuration. `routed`: of all
    tables, if the configuration routes rows to many.

    Raises: Invalid for an unknown name, and without a name if there are several tables; errors of `table_names`.
    """
    from memwal.ingest.settings.fleet import check_prefix, listed, table_names

    if routed and settings.route.table:
        if table_option():
            raise Invalid(f"{config}: [route] chooses the table of each row; leave out --table")
        return settings
    try:
        if name := table_option():
            check_prefix(settings)
            return settings.of_table(name)
        if len(settings.names) == 1:
            return settings.of_table(settings.names[0])
        names = listed(table_names(settings, os.environ)) or "none yet; init --table NAME creates one"
    except Invalid as error:
        raise Invalid.of(f"{config}: {line}" for line in error.lines) from None
    raise Invalid(f"{config}: it has several tables; choose one with --table NAME: {names}")


# ---- --quiet and --table ---------------------------------------------------------------------------------------------


class _Group(typer.core.TyperGroup):
    """A group that answers an unknown command with the command that is meant."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and not (ctx.resilient_parsing or cmd_name.startswith("-")):
            elsewhere = {} if ctx.parent else _COMMANDS
            ctx.fail(f"No such command {cmd_name!r}{near(cmd_name, self.commands, elsewhere=elsewhere)}")
        return found


class Commands(typer.Typer):
    """A group of commands that all have `--quiet`, and with a configuration `--table`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, suggest_commands=False, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[C], C]:
        """Register a function as a command, with `--table` and `--quiet` after its own options."""
        register = super().command(name, **options)

        def added(function: C) -> C:
            register(_with_common_options(function))
            return function

        return added


def _with_common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the parameter `quiet`, which makes its `CommandConsole`s quiet.

    If it has a parameter `config`, also with `table`, which `one_table` reads.
    """

    @wraps(function)
    def wrapped(*, quiet: bool, table: str = "", **arguments: Any) -> Any:
        before, table_before = _QUIET.set(quiet), _TABLE.set(table)
        try:
            return function(**arguments)
        finally:
            _QUIET.reset(before)
            _TABLE.reset(table_before)

    own, keyword = inspect.signature(function, eval_str=True), inspect.Parameter.KEYWORD_ONLY
    parameters = [*own.parameters.values()]
    if "config" in own.parameters:
        parameters.append(inspect.Parameter("table", keyword, default="", annotation=TableName))
    parameters.append(inspect.Parameter("quiet", keyword, default=False, annotation=Quiet))
    vars(wrapped)["__signature__"] = own.replace(parameters=parameters)
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


# ---- the exit code ---------------------------------------------------------------------------------------------------


def exit_code(command: Callable[[], int | None]) -> int:
    """Run `command`, report its error if it fails, and return its exit code."""
    try:
        code = command() or 0
        sys.stdout.flush()  # a failed write is an error of the command
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BaseException as error:  # noqa: BLE001 - the edge of the program
        from memwal.wal.panics import as_exception  # not above: most commands start faster without the storage packages

        return _report(as_exception(error))
    return code


def _report(error: BaseException) -> int:
    """Print an error, one line per problem; return the exit code."""
    usage = getattr(error, "format_message", None)
    if usage is not None and not usage():
        return Invalid.exit_code  # no command was given: Typer has printed the help already
    found: MemWalError = classify(error) if usage is None else _wrong_usage(error)
    for line in lines_of(found):
        print(f"memwal: {line}", file=sys.stderr)
    if os.environ.get("MEMWAL_TRACEBACK"):
        raise error
    return found.exit_code


def _wrong_usage(error: Any) -> Invalid:
    """Return the error of a wrong command line: what is wrong, and what is meant."""
    said: str = error.format_message()
    if hasattr(error, "possibilities"):  # an unknown option
        options = [option for each in error.ctx.command.params for option in each.opts]
        elsewhere = {name: f"write {meant}" for name, meant in _OPTIONS.items() if meant in options}
        said = f"No such option {error.option_name!r}{near(error.option_name, options, '{}', elsewhere)}"
    elif hasattr(error, "param_type"):  # a missing argument
        said = f"{said.rstrip('.')}: {error.param.help}"
    return Invalid(f"{said} (see {error.ctx.command_path} --help)")


def lines_of(error: MemWalError) -> tuple[str, ...]:
    """Return one line per problem; for an internal error one line in total, since its text is arbitrary."""
    if not isinstance(error, Internal):
        return error.lines
    return (f"{error.lines[0]}; this is a bug in memwal: please report it with the output of MEMWAL_TRACEBACK=1",)
