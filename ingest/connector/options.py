"""The options of `spark.read.format("memwal")`, checked as a whole. Spark passes them as text, names in lower case."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from memwal.ingest.api.reads import Level, check_level
from memwal.ingest.errors import Invalid
from memwal.ingest.rpc.credentials import Access
from memwal.ingest.secret_refs import resolve
from memwal.ingest.suggest import suggestion

STORAGE = "storage_options."
_NAMES = (
    *("path", "level", "columns", "filter", "rows_per_partition", "endpoint", "token", "tls_ca"),
    f"{STORAGE}NAME",
)
ROWS_PER_PARTITION = 1_000_000


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one `load()`.

    Thread safety. Immutable; pickles. Holds references to secrets, or secrets that were given literally, which `repr`
    leaves out.
    """

    uri: str
    level: Level = "latest"
    columns: tuple[str, ...] | None = None
    """None: all."""
    filter: str | None = None
    """SQL of Lance."""
    rows_per_partition: int = ROWS_PER_PARTITION
    endpoints: tuple[str, ...] = ()
    """Daemons to ask besides those of the table's notes."""
    access: Access = field(default_factory=Access, repr=False)
    storage: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Storage options, secrets as they were given: env:NAME, file:PATH, or literally."""

    @staticmethod
    def of(options: Mapping[str, str]) -> ReadOptions:
        """Return the options checked. Raises: Invalid with one line for each option that is unknown or wrong."""
        problems = [
            f"option {name!r} is unknown{suggestion(name, _NAMES)}"
            for name in options
            if name not in _NAMES[:-1] and not (name.startswith(STORAGE) and len(name) > len(STORAGE))
        ]
        read: dict[str, Any] = {}
        for name, parse in _PARSERS.items():
            try:
                if name in options:
                    read[name] = parse(options[name])
            except ValueError as problem:
                problems.append(f"option {name} = {options[name]!r}: {problem}")
            except Invalid as problem:
                problems.append(f"option {problem}")
        if not options.get("path", "").strip():
            problems.append('no address of a table; write spark.read.format("memwal").load("s3://bucket/table.lance")')
        if problems:
            raise Invalid.of(problems)
        return ReadOptions(
            uri=options["path"].strip(),
            endpoints=tuple(filter(None, options.get("endpoint", "").split(","))),
            access=Access(options.get("token", ""), options.get("tls_ca", "")),
            storage=tuple((name[len(STORAGE) :], text) for name, text in options.items() if name.startswith(STORAGE)),
            **read,
        )

    def storage_options(self) -> dict[str, str]:
        """Return Lance's storage options with every secret resolved in this process. Raises: Invalid."""
        secrets = {name: SecretStr(value) for name, value in self.storage}
        return resolve(secrets, os.environ, "option storage_options")


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


_PARSERS: Mapping[str, Callable[[str], object]] = {
    "level": check_level,
    "columns": _names,
    "filter": _sql,
    "rows_per_partition": _rows,
}
