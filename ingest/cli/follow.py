"""`memwal load --follow`, and `memwal run` with `source.engine = "local"`: put the files of a directory without Spark.

Files are put in the order of their modification times, each once, as it is when it is first seen. All rows of a file
are checked before its first row is put: a wrong row stops the command, and no row of its file is applied.

The checkpoint directory has the id of the table, the producer of all tokens, and a JSON object for each file in
`files/N`: its path and state, the sequence `first` of its first put, and `next`, the first sequence after it. In order,
for each file:

1. Write `files/N` without `next`.
2. Put the rows, 8,192 at a time, with the sequences `first`, `first` + 1, ...
3. Write `files/N` with `next`.

*Crash between 1 and 3: the same file is put again in the same parts, and the regions skip the tokens that they have
applied. If the file has changed, the command stops.* A checkpoint that was set back would use such sequences for other
rows, so it is compared with the newest sequence that the regions have applied.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from memwal.flush import BaseTable
from memwal.ingest.cli.command import Call, CommandConsole
from memwal.ingest.cli.open import open_for_reading, writable
from memwal.ingest.cli.print import count
from memwal.ingest.engine.api.tokens import Token
from memwal.ingest.engine.loads.checked import FileReader
from memwal.ingest.engine.loads.files import InputFile, find_files
from memwal.ingest.engine.loads.formats import columns_of
from memwal.ingest.engine.table.create import find_or_create
from memwal.ingest.engine.table.pauses import PauseWatch, text_of
from memwal.ingest.errors import Invalid
from memwal.ingest.service.ops.logs import configure_logs
from memwal.ingest.settings.load import Settings
from memwal.ingest.settings.sections import is_remote, local_path
from memwal.ingest.spark.checkpoint_files import LocalFiles, numbers
from memwal.ingest.spark.pipeline.checkpoint import FILES, locked, mark_checkpoint, refuse_other_checkpoint
from memwal.ingest.spark.pipeline.pausing import refuse_paused
from memwal.ingest.spark.source.feed import Feed, visible_files
from memwal.ingest.threads import stop_signals
from memwal.wal import SystemClock, SystemIds, open_store

Read = Callable[[InputFile], Iterable[pa.Table]]
_PRODUCER = "producer"


def run_local(pipelines: Mapping[str, Settings], *, once: bool, console: CommandConsole) -> int:
    """Run the pipeline of a configuration whose `source.engine` is "local". Raises: as `follow`."""
    if len(pipelines) > 1:
        raise Invalid(f'source.engine = "local" runs one pipeline; choose one: {", ".join(pipelines)}')
    (settings,) = pipelines.values()
    if not settings.source.path:
        raise Invalid("source.path is not set; write the directory of your files")
    form = None if "format" not in settings.source.model_fields_set else settings.source.format
    return follow(Call(settings, os.environ, console), settings.source.path, form, once=once)


def load_followed(
    call: Call, directories: Sequence[str], form: str | None, missing: str | None, refused: Sequence[str]
) -> int:
    """Run `memwal load --follow`. `refused`: given options that have no meaning with it. Raises: as `follow`."""
    if refused or len(directories) != 1 or missing not in (None, "null"):
        raise Invalid(
            "--follow takes one directory, --format and --missing null; files that appear there are put one by one"
        )
    sink = call.settings.sink.model_copy(
        update={"checkpoint": f"{call.settings.checkpoint}.files", "missing": missing or ""}
    )
    source = call.settings.source.model_copy(update={"feed": ""})
    settings = call.settings.model_copy(update={"sink": sink, "source": source})
    return follow(replace(call, settings=settings), directories[0], form, once=False)


def follow(call: Call, directory: str, form: str | None, *, once: bool) -> int:
    """Put the files that are or appear in `directory` until a signal; with `once` those that are there now.

    `form`: format of the files; None for that of their endings. With `once`, the rows are then flushed and committed.
    Raises: Invalid for a wrong file, row or checkpoint; errors of opening and writing the table.
    """
    settings, source, clock = call.settings, call.settings.source, SystemClock()
    configure_logs(settings.log.level, settings.log.format)
    for place in (settings.checkpoint, directory):
        if is_remote(place):
            raise Invalid(f"{place}: name a local directory for the files, and for sink.checkpoint; Spark reads others")
    if once:
        refuse_paused(settings, call.environ, clock)
    files = rows = 0
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        stack.enter_context(locked([settings.checkpoint]))
        base, _ = find_or_create(settings, call.environ, partial(_columns, settings, source.feed or directory, form))
        refuse_other_checkpoint(settings, base)

        def read(file: InputFile) -> Iterator[pa.Table]:
            return FileReader(base.latest(), [file], missing=settings.sink.missing or None, closed=False).read()

        table = stack.enter_context(writable(call, open_for_reading(call), upkeep=True))
        checkpoint = Checkpoint(settings)
        checkpoint.resume(table, read, _files(directory, form, set()))
        mark_checkpoint(settings, base)
        feed = Feed(local_path(source.feed), local_path(directory), source.feed_every, clock) if source.feed else None
        if feed is not None:
            stack.callback(feed.stop)
            feed.start()
        for file in _arriving(call, base, lambda: _files(directory, form, checkpoint.known), feed, stop, once=once):
            began, put = clock.monotonic(), checkpoint.put(table, read, file)
            files, rows = files + 1, rows + put
            call.console.note(f"{file.name}: {count(put, 'row')} in {clock.monotonic() - began:.2f} s")
        if once and not stop.is_set():
            table.flush()
            table.commit()
    call.console.say(f"{count(rows, 'row')} of {count(files, 'file')} put into {call.uri}, all durable")
    return 0


def _arriving(
    call: Call,
    base: BaseTable,
    new: Callable[[], list[InputFile]],
    feed: Feed | None,
    stop: threading.Event,
    *,
    once: bool,
) -> Iterator[InputFile]:
    """Yield new files until `stop` is set; with `once` until there are none and the feed has landed all of its files.

    Yields none while the ingestion is paused. Raises: the failure of the feed; wal errors of reading the pauses.
    """
    store, settings, told = open_store(base.uri, base.storage_options), call.settings, False
    pauses = PauseWatch(store, SystemClock(), SystemIds(), settings.wal.options())
    while not stop.is_set():
        last = once and (feed is None or feed.finished.is_set())
        paused = None if once else pauses.recent().get("ingestion")
        if paused is not None and not told:
            call.console.note(text_of("ingestion", paused))
        told = paused is not None
        for file in () if told else new():
            yield file
            if stop.is_set():
                return
        if feed is not None and feed.failure is not None:
            raise feed.failure
        if last:
            return
        stop.wait(settings.source.trigger)


class Checkpoint:
    """The files that were put into a table; see the module. Thread safety. One thread."""

    def __init__(self, settings: Settings) -> None:
        self._place = f"sink.checkpoint: {settings.checkpoint}"
        root = LocalFiles(local_path(settings.checkpoint))
        if root.read(_PRODUCER) is None:
            root.write(_PRODUCER, f"files:{SystemIds().uuid().hex}")
        self._producer, self._files = str(root.read(_PRODUCER)), LocalFiles(local_path(settings.checkpoint) / FILES)
        noted = [json.loads(str(self._files.read(str(number)))) for number in sorted(numbers(root, FILES))]
        self.known = {each["file"] for each in noted}
        """Paths of files that were put or begun."""
        self._number, self._last = len(noted) - 1, noted[-1] if noted else {"next": 0}

    def resume(self, table: Any, read: Read, files: Iterable[InputFile]) -> None:
        """Put the file that was begun, if any, again. `files`: those of the directory.

        Raises: Invalid if it has changed, or if the checkpoint was set back.
        """
        if "next" not in self._last:
            begun = next((file for file in files if file.path == self._last["file"]), None)
            if begun is None or list(begun.state) != self._last["state"]:
                raise Invalid(
                    f"{self._last['file']}: the file was changed or removed after a part of its rows was put; restore "
                    "it, or set another sink.checkpoint, which reads all files again"
                )
            self._put(table, read, begun, self._last["first"])
        newest = table.applied(self._producer).newest
        if newest is not None and newest >= self._last["next"]:
            raise Invalid(
                f"{self._place} is older than the table, which has rows of files that it does not name; restore its "
                "newest state, or set another one, which reads all files again"
            )

    def put(self, table: Any, read: Read, file: InputFile) -> int:
        """Put a new file; return the number of its rows. Raises: Invalid for a wrong row; errors of puts."""
        for _ in read(file):
            pass
        self._number += 1
        return self._put(table, read, file, self._last["next"])

    def _put(self, table: Any, read: Read, file: InputFile, first: int) -> int:
        noted: Mapping[str, Any] = {"file": file.path, "state": file.state, "first": first}
        self._files.write(str(self._number), json.dumps(noted))
        rows, sequence = 0, first
        for part in read(file):
            table.put(part, token=Token(self._producer, sequence))
            rows, sequence = rows + part.num_rows, sequence + 1
        self._last = {**noted, "next": sequence}
        self._files.write(str(self._number), json.dumps(self._last))
        self.known.add(file.path)
        return rows


def _columns(settings: Settings, directory: str, form: str | None) -> pa.Schema | None:
    """Return the columns of the first file if [table] names none, and if its format has types."""
    files = [] if settings.table.columns else _files(directory, form, set())
    return columns_of(files[0]) if files else None


def _files(directory: str, form: str | None, known: set[str]) -> list[InputFile]:
    """Return the files in `directory` whose paths are not in `known`, oldest first."""
    path = local_path(directory)
    try:
        names = (
            [str(file) for file in visible_files(path) if str(file.absolute()) not in known] if path.exists() else []
        )
    except OSError as error:
        raise Invalid(f"{directory}: {error.strerror}; name a directory that can be read") from None
    return sorted(find_files(names, form, {}), key=lambda file: (file.state[1], file.path))
