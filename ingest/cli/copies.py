"""The commands `memwal backup` and `memwal restore`: their arguments and options."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from memwal.ingest.cli.options import AsJson, Config, PlaceOption, Resume, console, settings_of


def backup(
    config: Config,
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="empty directory or s3:// URL for the copy", show_default=False)
    ],
    option: PlaceOption = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> int:
    """Copy the table as of now, with every acknowledged row and token; safe while writers run."""
    from memwal.ingest.cli.backup import backup as back_up

    return back_up(settings_of(config), os.environ, console(), dest, option or [], resume=resume, as_json=as_json)


def restore(
    config: Config,
    backup: Annotated[
        str,
        typer.Argument(metavar="BACKUP", help="DEST of a `memwal backup`; checked as it is read", show_default=False),
    ],
    option: PlaceOption = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> int:
    """Make the table of CONFIG, which must not exist, of a backup, and verify it."""
    from memwal.ingest.cli.backup import restore as restore_table

    return restore_table(
        settings_of(config), os.environ, console(), backup, option or [], resume=resume, as_json=as_json
    )
