"""The options of tables in Spark, checked as a whole. Spark passes them as text, names in lower case."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast, get_args

from pydantic import SecretStr

from memwal import flush
from memwal.ingest.engine.api.changes import Images, Position, checked_end, checked_images
from memwal.ingest.engine.api.missing import Missing
from memwal.ingest.engine.api.reads import Level, check_level
from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import resolve
from memwal.ingest.service.rpc.credentials import Access
from memwal.ingest.settings.configuration import with_absolute_paths
from memwal.ingest.settings.endpoints import configured_endpoint
from memwal.ingest.settings.load import load
from memwal.ingest.settings.sections import SinkSettings
from memwal.ingest.suggest import suggestion

STORAGE = "storage_options."
SINCE = "since"
"""The option that distinguishes a stream of changes from a read of rows."""
_ACCESS = ("token", "tls_ca", "tls_cert", "tls_key")
ROWS_PER_PARTITION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """Options that every use of a table has.

    Thread safety. Immutable; can be pickled. Contains references to secrets, or literal secrets; `repr` omits both.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
        *("path", "endpoint", "token", "tls_ca", "tls_cert", "tls_key"),
        f"{STORAGE}NAME",
    )
    USE: ClassVar[str] = ""
    """How a user names the table, for the error message if it is missing."""

    uri: str
    columns: tuple[str, ...] | None = None
    """None: all columns."""
    endpoints: tuple[str, ...] = ()
    """Daemons to use in addition to those of the table's notes."""
    access: Access = field(default_factory=Access, repr=False)
    storage: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Storage options; secrets as given: env:NAME, file:PATH, or literal."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Return the checked options. Raises: Invalid with one line for each option that is unknown or wrong."""
        return cls._checked(options)

    @classmethod
    def _checked(cls, options: Mapping[str, str]) -> Self:
        problems = [
            f"option {name!r} is unknown{suggestion(name, cls.NAMES)}"
            for name in options
            if name not in cls.NAMES[:-1] and not (name.startswith(STORAGE) and len(name) > len(STORAGE))
        ]
        read: dict[str, Any] = {}
        for name, parse in _PARSERS.items():
            try:
                if name in options and name in cls.NAMES:
                    read[name] = parse(options[name])
            except ValueError as problem:
                problems.append(f"option {name} = {options[name]!r}: {problem}")
            except Invalid as problem:
                problems.append(f"option {problem}")
        for given, missing in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if options.get(given) and not options.get(missing):
                problems.append(f"option {missing} is missing; give both the certificate and its key")
        if not options.get("path", "").strip():
            problems.append(f"option path is missing: write {cls.USE}")
        if problems:
            raise Invalid.of(problems)
        return cls(
            uri=options["path"].strip(),
            endpoints=tuple(filter(None, options.get("endpoint", "").split(","))),
            access=Access(*(options.get(name, "") for name in _ACCESS)),
            storage=tuple((name[len(STORAGE) :], text) for name, text in options.items() if name.startswith(STORAGE)),
            **read,
        )

    def storage_options(self) -> dict[str, str]:
        """Return Lance's storage options with every secret resolved in this process. Raises: Invalid."""
        return resolved(self.storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(TableOptions):
    """The options of one `spark.read…load()`."""

    NAMES = ("level", "columns", "filter", "rows_per_partition", *TableOptions.NAMES)
    USE = 'spark.read.format("memwal").load("s3://bucket/table.lance")'

    level: Level = "latest"
    filter: str | None = None
    """A predicate in Lance's SQL."""
    rows_per_partition: int = ROWS_PER_PARTITION


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOptions(TableOptions):
    """The options of one `spark.readStream…load()`."""

    NAMES = (SINCE, "images", "columns", "max_rows_per_batch", "path", f"{STORAGE}NAME")
    USE = 'spark.readStream.format("memwal").option("since", "earliest").load("s3://bucket/table.lance")'

    since: str | Position = "earliest"
    """"earliest", "latest" or a position."""
    images: Images = "after"
    max_rows_per_batch: int | None = None
    """Maximum rows of the log in a micro-batch, unless one entry has more; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(TableOptions):
    """The options of one `df.writeStream…start()` or `df.write…save()`."""

    NAMES = ("config", "checkpointlocation", "missing", *TableOptions.NAMES)
    USE = '.option("path", "s3://bucket/table.lance"), or .option("config", "config.toml")'

    stream_timeout: float = SinkSettings().stream_timeout
    """Seconds for sending the rows of one region in a micro-batch."""
    in_flight_max: int = SinkSettings().in_flight_max
    """Bytes that may be sent before they are acknowledged."""
    missing: Missing | None = None
    """How columns of the table that the frame lacks are handled; None: see `missing_rule`."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """As `TableOptions.of`.

        With `config`, the configuration provides the address of the table and all other options.
        """
        if "config" not in options:
            return cls._checked(options)
        others = sorted({*options} - {"config", "checkpointlocation"})
        if others:
            raise Invalid(f"option {others[0]!r} beside config: set it in the configuration, or leave config out")
        settings = with_absolute_paths(load(options["config"], os.environ))
        for setting, used in (("dlq.mode", settings.dlq.mode != "fail"), ("source.order_by", settings.source.order_by)):
            if used:
                raise Invalid(
                    f'{setting}: writeStream.format("memwal") does not know it: remove it from {options["config"]}, or '
                    "use writeStream.foreachBatch(memwal.MemWalSink(config))"
                )
        table, sink = settings.table, settings.sink
        return cls(
            uri=table.uri,
            endpoints=tuple(filter(None, (configured_endpoint(settings) or "").split(","))),
            access=Access.of(settings),
            storage=tuple((name, value.get_secret_value()) for name, value in table.storage_options.items()),
            stream_timeout=sink.stream_timeout,
            in_flight_max=sink.in_flight_max,
            missing=sink.missing or None,
        )


def resolved(storage: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return storage options with every secret resolved in this process. Raises: Invalid."""
    return resolve({name: SecretStr(value) for name, value in storage}, os.environ, "option storage_options")


def opened_table(uri: str, storage: Mapping[str, str]) -> flush.BaseTable:
    """Open the newest version of a table. Raises: Invalid for an unknown table."""
    try:
        return flush.BaseTable.open(uri, storage)
    except flush.NotALanceTable:
        raise Invalid(f"table not found: {uri}; correct the option path, or create it with memwal init") from None


def _names(text: str) -> tuple[str, ...]:
    """Parse a JSON list of names, or names separated by commas. Raises: ValueError."""
    if text.lstrip().startswith("["):
        names = json.loads(text)
        if not all(isinstance(name, str) for name in names):
            raise ValueError("write a list of names")
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("name at least one column, or omit the option for all")
    return tuple(dict.fromkeys(names))


def _rows(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError("write a whole number of rows, at least 1")
    return int(text)


def _sql(text: str) -> str:
    if not text.strip():
        raise ValueError('write a SQL predicate such as "price < 20", or omit the option')
    return text


def _missing(text: str) -> Missing:
    if text not in get_args(Missing):
        raise ValueError("write null or keep")
    return cast("Missing", text)


def _since(text: str) -> str | Position:
    text = text.strip()
    if not text.startswith("{"):
        return checked_end(text, SINCE)
    try:
        return Position.of_json(json.loads(text), SINCE)
    except json.JSONDecodeError:
        raise ValueError("this is no JSON; write a position that changes gave") from None


_PARSERS: Mapping[str, Callable[[str], object]] = {
    "level": check_level,
    "columns": _names,
    "filter": _sql,
    "rows_per_partition": _rows,
    SINCE: _since,
    "images": checked_images,
    "max_rows_per_batch": _rows,
    "missing": _missing,
}
