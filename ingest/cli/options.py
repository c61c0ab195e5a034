"""Arguments and options that several commands share, and the common start of every command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memwal.ingest.cli.quiet import CommandConsole

if TYPE_CHECKING:
    from memwal.ingest.settings.load import Settings

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
OfCommits = Annotated[bool, typer.Option("--commits", help="the table's automatic commits instead of its ingestion")]
PlaceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="storage option of the backup's place, repeatable; secrets as env:NAME or file:PATH; default: the table's",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with what a killed process left there")]
Stage = Annotated[str | None, typer.Option(help="only dead letters of this stage: parse, map, fit or refused")]


def console() -> CommandConsole:
    """Return the console of the current command."""
    return CommandConsole()


def settings_of(config: Path) -> Settings:
    """Load a configuration. Raises: Invalid with every problem."""
    from memwal.ingest import tracing
    from memwal.ingest.settings.load import load

    settings = load(config, os.environ)
    tracing.begin("memwal", settings.tracing)
    return settings


def names_in(text: str | None) -> list[str] | None:
    """Split names at commas."""
    return None if text is None else [name.strip() for name in text.split(",")]
