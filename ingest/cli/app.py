"""The `memwal` command. Thin: every command reads its arguments, calls one function, prints.

Errors leave here as one line per problem on standard error, with exit code 2 where the user can mend them and 1 where
not; a traceback never does, unless MEMWAL_TRACEBACK is set.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from memwal.ingest.errors import Internal, Invalid, MemWalError, classify
from memwal.ingest.ops.logs import silence_grpc

if TYPE_CHECKING:
    from memwal.ingest.settings.load import Settings

app = typer.Typer(
    name="memwal",
    help="Streaming ingestion into Lance tables: durable, queryable at once, exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check or show a configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

dlq_app = typer.Typer(help="Look at dead letters, put them into the table again, delete them.", no_args_is_help=True)
app.add_typer(dlq_app, name="dlq")

regions_app = typer.Typer(help="Change how many regions a table has.", no_args_is_help=True)
app.add_typer(regions_app, name="regions")


@app.callback(invoke_without_command=True)
def versions(
    version: Annotated[bool, typer.Option("--version", help="print the versions that matter, and exit")] = False,
) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        others = ", ".join(f"{name} {installed(name)}" for name in ("pylance", "pyarrow"))
        with suppress(PackageNotFoundError):  # an extra
            others += f", pyspark {installed('pyspark')}"
        _console().out(f"memwal {installed('memwal')} ({others}, Python {sys.version.split()[0]})", highlight=False)
        raise typer.Exit


Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="TOML file, see configs/; FILE:NAME of one with several pipelines", show_default=False
    ),
]
Format = Literal["table", "json", "csv"]
Stage = Annotated[str | None, typer.Option(help="only letters of this stage: parse, map, fit or refused")]


@app.command()
def run(config: Config, once: Annotated[bool, typer.Option(help="process what is there, commit, exit")] = False) -> int:
    """Run the pipeline: source -> regions -> base table; every one of a file with several."""
    from memwal.ingest.pipeline.run import run as run_pipelines
    from memwal.ingest.settings.load import load_every

    return run_pipelines(load_every(config, os.environ), once=once, console=_console())


@app.command()
def serve(
    config: Config,
    on_spark: Annotated[
        int | None, typer.Option(min=1, help="so many daemons, on the executors of source.spark", show_default=False)
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="fence who serves the table now; without it that is refused")
    ] = False,
) -> int:
    """Serve the table: claim its regions and answer over Arrow Flight until stopped."""
    from memwal.ingest.daemon.without_pandas import leave_pandas_out

    leave_pandas_out()
    from memwal.ingest.settings.load import load

    chosen = {} if on_spark is None else {"MEMWAL__DAEMON__ON_SPARK": str(on_spark)}
    settings, console = load(config, os.environ | chosen), _console()

    def say(*endpoints: str) -> None:
        console.out(f"serving {settings.table.uri} at {', '.join(endpoints)}", highlight=False)

    if settings.daemon.on_spark:
        from memwal.ingest.fleet.driver import serve_on_spark

        code = serve_on_spark(settings, os.environ, lambda endpoints: say(*endpoints), take_over=take_over)
    else:
        from memwal.ingest.daemon.serve import serve as serve_table

        code = serve_table(
            settings,
            os.environ,
            lifeline=None,
            ready=say,
            http_ready=lambda url: console.out(f"metrics, health and status at {url}", highlight=False),
            take_over=take_over,
        )
    if not code:
        console.out("stopped; every acknowledged row is kept, whoever serves next goes on from there", highlight=False)
    return code


@app.command()
def init(config: Config) -> int:
    """Create the table, or check that the one that is there fits; print what was done."""
    from memwal.ingest.table.create import initialise

    settings = _load(config)
    base, done = initialise(settings, os.environ)
    indexes = ", ".join(f"{spec.column} ({spec.kind})" for spec in base.indexes) or "none"
    rules = "".join(f", {rule} {chosen}" for rule, chosen in base.rules.chosen().items())
    _console().out(
        f"{done} {base.uri}, version {base.version}: {len(base.schema.names)} columns, "
        f"key {', '.join(base.key) or 'none (append only)'}, {base.buckets} regions "
        f"(routing version {base.routing_version}), indexes: {indexes}{rules}",
        highlight=False,
    )
    return 0


@app.command()
def status(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    watch: Annotated[bool, typer.Option(help="refresh every second until interrupted")] = False,
) -> int:
    """Show regions, epochs, owners, the WAL, SSTs and what is pending."""
    from memwal.ingest.cli.status import show

    return show(_load(config), os.environ, _console(), as_json=as_json, watch=watch)


@app.command()
def query(
    config: Config,
    key: Annotated[list[str] | None, typer.Option(help="key to look up; several columns: comma-separated")] = None,
    filter: Annotated[str | None, typer.Option(help="SQL predicate, such as \"section = 'net'\"")] = None,
    near: Annotated[
        str | None,
        typer.Option(help="COLUMN=[0.1,…] | COLUMN=@file.json | COLUMN=key:VALUE (the vector of that row)"),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(help='COLUMN=words; +word must be there, -word must not, "a phrase", begin*'),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="comma-separated columns")] = None,
    limit: Annotated[int, typer.Option(min=1, help="rows at most")] = 10,
    level: Annotated[str, typer.Option(help="committed, flushed, durable or latest")] = "latest",
    format: Annotated[Format, typer.Option(help="how to print")] = "table",
) -> int:
    """Look rows up by key, filter, vector or words."""
    from memwal.ingest.cli.query import Query, answer

    asked = Query(tuple(key or ()), filter, near, match, _columns(columns), limit, level)
    return answer(_load(config), os.environ, asked, format, _console())


@app.command()
def flush(config: Config) -> int:
    """Flush memtables to SSTs: by the daemon that owns the regions, else by claiming them for a moment."""
    from memwal.ingest.cli.steps import flush_table

    return flush_table(_load(config), os.environ, _console())


@app.command()
def commit(config: Config, as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> int:
    """Commit flushed rows into the base table and maintain it; safe while writers run."""
    from memwal.ingest.cli.steps import commit as commit_table

    return commit_table(_load(config), os.environ, _console(), as_json=as_json)


@app.command()
def gc(
    config: Config,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be deleted, delete nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Delete what nobody can need again: WAL entries, SSTs, orphan files; safe while writers run."""
    from memwal.ingest.cli.collect import show

    return show(_load(config), os.environ, _console(), dry_run=dry_run, as_json=as_json)


@app.command()
def log(
    config: Config,
    limit: Annotated[int, typer.Option(min=1, help="versions at most, the newest first")] = 50,
    diff: Annotated[
        tuple[int, int] | None,
        typer.Option(metavar="A B", help="what changed between two versions, by key; reads rows"),
    ] = None,
    keys: Annotated[int, typer.Option(min=0, help="with --diff: keys to show of each sort at most")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Show every version of the base table as a list of what it did: rows, commits, indexes, compaction, columns."""
    from memwal.ingest.cli.log import show_diff, show_log

    if diff is None:
        return show_log(_load(config), os.environ, _console(), limit=limit, as_json=as_json)
    return show_diff(_load(config), os.environ, _console(), between=diff, keys=keys, as_json=as_json)


@app.command()
def verify(
    config: Config,
    deep: Annotated[bool, typer.Option(help="read every row too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Check everything on storage; exit 1 and say what is wrong and how to mend it. Safe while writers run."""
    from memwal.ingest.cli.verify import show

    return show(_load(config), os.environ, _console(), deep=deep, as_json=as_json)


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="a manifest, WAL entry, SST, region or table", show_default=False)
    ],
    config: Annotated[Path | None, typer.Option(help="TOML file with the storage options of a URL")] = None,
) -> int:
    """Print what is stored at a path or URL; reads only, safe while writers run."""
    from memwal.ingest.cli.dump.describe import describe

    options = _load(config).storage_options(os.environ) if config is not None else None
    _console().print(describe(path, options))
    return 0


@regions_app.command()
def resize(
    config: Config,
    to: Annotated[int, typer.Option(help="number of regions, from 1 to 4096", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Give the table another number of regions; writers start again after a pause. Finishes one that broke off."""
    from memwal.ingest.cli.resize import resize as resize_table

    return resize_table(_load(config), os.environ, _console(), to=to, as_json=as_json)


@config_app.command()
def check(config: Config) -> int:
    """Check a configuration, every pipeline of a file with several, as `run` does; say all that is wrong with it."""
    from memwal.ingest.pipeline.checks import examined
    from memwal.ingest.settings.load import load_every

    lines, pipelines = [], load_every(config, os.environ)
    for name, settings in pipelines.items():
        _, problems = examined(settings, os.environ, starts=False)
        lines += [f"{name}: {line}" for problem in problems for line in _said(problem)]
    if lines:
        raise Invalid.of(dict.fromkeys(lines))
    for name in pipelines:
        _console().out(f"{name}: ok", highlight=False)
    return 0


@config_app.command()
def show(config: Config) -> int:
    """Print the configuration with all defaults, secrets hidden."""
    from memwal.ingest.settings.reference import render_settings

    sys.stdout.write(render_settings(_load(config)))
    return 0


@dlq_app.command("list")
def dlq_list(
    config: Config,
    stage: Stage = None,
    limit: Annotated[int, typer.Option(min=1, help="letters at most, the newest first")] = 10,
    format: Annotated[Format, typer.Option(help="how to print")] = "table",
) -> int:
    """Count dead letters by stage and reason, and show the newest."""
    from memwal.ingest.cli.dlq import list_letters

    return list_letters(_load(config), os.environ, _console(), stage=stage, limit=limit, form=format)


@dlq_app.command("show")
def dlq_show(
    config: Config,
    id: Annotated[str, typer.Argument(metavar="ID", help="id of a letter, or its beginning", show_default=False)],
    hex: Annotated[bool, typer.Option("--hex", help="raw bytes as hexadecimal digits, text too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Show everything about one dead letter, with its raw bytes."""
    from memwal.ingest.cli.dlq import show_letter

    return show_letter(_load(config), os.environ, _console(), id=id, in_hex=hex, as_json=as_json)


@dlq_app.command("replay")
def dlq_replay(
    config: Config,
    id: Annotated[list[str] | None, typer.Option(help="only this letter; may be given again")] = None,
    stage: Stage = None,
    limit: Annotated[int | None, typer.Option(min=1, help="letters at most, the oldest first")] = None,
) -> int:
    """Put dead letters that fit now into the table, each once, and remove them."""
    from memwal.ingest.cli.dlq import replay

    return replay(_load(config), os.environ, _console(), ids=id or [], stage=stage, limit=limit)


@dlq_app.command("purge")
def dlq_purge(
    config: Config,
    older_than: Annotated[str | None, typer.Option(help='such as "7d"; none: dlq.age_max')] = None,
    stage: Stage = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be deleted, delete nothing")] = False,
) -> int:
    """Delete old dead letters."""
    from memwal.ingest.cli.dlq import purge

    return purge(_load(config), os.environ, _console(), older_than=older_than, stage=stage, dry_run=dry_run)


def main() -> None:
    """Entry point of the `memwal` command."""
    silence_grpc()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # half a result is worse than an escaped letter
    try:
        code = app(standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BaseException as error:  # noqa: BLE001 - the edge of the program
        from memwal.wal.panics import as_exception  # not above: most commands begin sooner without the storage packages

        code = _report(as_exception(error))
    sys.exit(code or 0)


def _report(error: BaseException) -> int:
    """Print an error as its lines; returns the exit code."""
    usage = getattr(error, "format_message", None)
    if usage is not None and not usage():
        return Invalid.exit_code  # no command was given: its help is on the screen already
    found: MemWalError = Invalid(f"{usage()} (see memwal --help)") if usage is not None else classify(error)
    for line in _said(found):
        print(f"memwal: {line}", file=sys.stderr)
    if os.environ.get("MEMWAL_TRACEBACK"):
        raise error
    return found.exit_code


def _said(error: MemWalError) -> tuple[str, ...]:
    """Every problem of an error; of a fault of ours, whose text may be anything, one line."""
    if not isinstance(error, Internal):
        return error.lines
    return (f"{error.lines[0]}; a fault of memwal: please report it, with what MEMWAL_TRACEBACK=1 shows",)


def _console() -> Console:
    """Standard output. A path such as FILE:a: is no emoji."""
    return Console(emoji=False)


def _load(config: Path) -> Settings:
    from memwal.ingest.settings.load import load

    return load(config, os.environ)


def _columns(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    main()
