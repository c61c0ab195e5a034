"""A whole configuration (`Settings`), and its paths.

Paths in a configuration are relative to the directory where the command was started. Settings sent to an executor
must have absolute paths: otherwise it would look for `table.uri`, or create the dead-letter table, in its own
directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pydantic import Field, PrivateAttr, SecretStr

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import FROM_FILE, resolve
from memwal.ingest.settings.sections import (
    SUFFIX,
    TABLES,
    CommitSettings,
    CostSettings,
    DaemonSettings,
    DlqSettings,
    FleetSettings,
    FlushSettings,
    GcSettings,
    LogSettings,
    MemtableSettings,
    RegionsSettings,
    RouteSettings,
    SinkSettings,
    SourceSettings,
    SqlSettings,
    TableSettings,
    TracingSettings,
    WalSettings,
    is_remote,
    local_path,
    location,
)
from memwal.ingest.settings.values import Index, Section, check_table_name
from memwal.ingest.suggest import suggestion
from memwal.ingest.values.type_names import parse_type
from memwal.memtable.index_spec import IndexSpec


class Settings(Section):
    """A whole configuration. Build it with `ingest.settings.load.load`, which also checks rules over several
    settings.

    Thread safety. Immutable. Secrets are held as references and never printed.
    """

    table: TableSettings = Field(default_factory=TableSettings)
    regions: RegionsSettings = Field(default_factory=RegionsSettings)
    wal: WalSettings = Field(default_factory=WalSettings)
    memtable: MemtableSettings = Field(default_factory=MemtableSettings)
    flush: FlushSettings = Field(default_factory=FlushSettings)
    commit: CommitSettings = Field(default_factory=CommitSettings)
    gc: GcSettings = Field(default_factory=GcSettings)
    source: SourceSettings = Field(default_factory=SourceSettings)
    sink: SinkSettings = Field(default_factory=SinkSettings)
    daemon: DaemonSettings = Field(default_factory=DaemonSettings)
    sql: SqlSettings = Field(default_factory=SqlSettings)
    dlq: DlqSettings = Field(default_factory=DlqSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    cost: CostSettings = Field(default_factory=CostSettings)
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    route: RouteSettings = Field(default_factory=RouteSettings)
    tables: dict[str, TableSettings] = Field({})
    """The sections [tables.NAME], by name."""
    _name: str | None = PrivateAttr(None)

    @property
    def is_fleet(self) -> bool:
        """Whether the configuration names its tables: by sections or a prefix. Otherwise `table` is the only one."""
        return bool(self.tables or self.fleet.prefix)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tables: of the sections, or of the only table by its location; () for those of a prefix."""
        if self.is_fleet:
            return tuple(self.tables)
        return (location(self.table.uri).rpartition("/")[2].removesuffix(SUFFIX),) if self.table.uri else ()

    def of_table(self, name: str) -> Settings:
        """Return the settings of one of the tables, which need not exist yet: `table` is its section; under a prefix,
        the template with the location PREFIX/NAME.lance.

        Raises: Invalid for an unknown name, and under a prefix for an invalid one.
        """
        if not self.is_fleet and name in self.names:
            return self
        if self.fleet.prefix:
            try:
                uri = f"{self.fleet.prefix.rstrip('/')}/{check_table_name(name)}{SUFFIX}"
            except ValueError as error:
                raise Invalid(str(error)) from None
            table = self.table.model_copy(update={"uri": uri})
        elif name in self.tables:
            table = self.tables[name]
        else:
            raise Invalid(f"no table {name!r}{suggestion(name, self.names)}")
        fleet = self.fleet.model_copy(update={"prefix": ""})
        chosen = self.model_copy(update={"table": table, "fleet": fleet, "tables": {}, "route": RouteSettings()})
        chosen._name = name  # noqa: SLF001
        return chosen

    @property
    def name(self) -> str | None:
        """The name of the table in its fleet, if `of_table` has chosen it; None for a single [table]."""
        return self._name

    def sections(self) -> dict[str, Section]:
        """Return the sections by name; `tables.NAME` for each table of several, then without the unused `table`."""
        unused = {"tables", "table"} if self.tables else {"tables"}
        sections: dict[str, Section] = {name: part for name, part in self if name not in unused}
        return sections | {TABLES + name: table for name, table in self.tables.items()}

    def arrow_schema(self) -> pa.Schema:
        """Return the table's schema from `table.columns`: key columns are not nullable, all others are.

        Empty if no columns are configured: an existing table has its own.
        """
        return pa.schema(
            [
                pa.field(name, parse_type(kind), nullable=name not in self.table.key)
                for name, kind in self.table.columns.items()
            ]
        )

    def index_specs(self) -> tuple[IndexSpec, ...]:
        """Return the configured indexes, in order. An IVF-PQ index without train_rows gets
        `memtable.vector_train_rows`."""
        return tuple(
            index_spec(column, index, self.memtable.vector_train_rows) for column, index in self.table.indexes.items()
        )

    def storage_options(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `table.storage_options` with resolved secrets, for the store only. Raises: Invalid for a broken
        reference."""
        return resolve(self.table.storage_options, environ)

    @property
    def place(self) -> str:
        """Location of the table, or the prefix of a fleet."""
        return (self.table.uri or self.fleet.prefix).rstrip("/")

    @property
    def checkpoint(self) -> str:
        """Spark's checkpoint directory: `sink.checkpoint`, or its default beside the table or the prefix."""
        return self.sink.checkpoint or f"{self.place}.checkpoint"

    @property
    def dead_letters(self) -> str:
        """Location of the dead-letter table: `dlq.uri`, or its default beside the table or the prefix."""
        return self.dlq.uri or f"{self.place}.dlq"


def index_spec(column: str, index: Index, train_rows: int) -> IndexSpec:
    """Return the spec of one entry of `table.indexes`: a kind, or a table with `type` and parameters."""
    parameters: dict[str, Any] = {"type": index} if isinstance(index, str) else dict(index)
    kind = parameters.pop("type", None)
    if kind == "ivf_pq":
        parameters.setdefault("train_rows", train_rows)
    return IndexSpec(column, kind, parameters)


# ---- paths ----------------------------------------------------------------------------------------------------------


_TLS_FILES = ("tls_cert", "tls_key", "tls_ca", "tls_client_ca", "tls_client_cert", "tls_client_key")


def with_absolute_paths(settings: Settings) -> Settings:
    """Return the same settings, usable in any directory of this host, and of other hosts with the same paths."""
    daemon, source = settings.daemon, settings.source
    files: dict[str, Any] = {name: _absolute(getattr(daemon, name)) for name in _TLS_FILES}
    tokens: dict[str, Any] = {
        name: _reference(getattr(daemon, name)) for name in ("token", "write_token", "read_token")
    }
    tokens["tokens"] = [each.model_copy(update={"token": _reference(each.token)}) for each in daemon.tokens]
    return settings.model_copy(
        update={
            "table": _with_absolute_paths(settings.table),
            "tables": {name: _with_absolute_paths(table) for name, table in settings.tables.items()},
            "fleet": settings.fleet.model_copy(update={"prefix": _absolute(settings.fleet.prefix)}),
            "source": source.model_copy(update={"registry_options": _references(source.registry_options)}),
            "daemon": daemon.model_copy(update=files | tokens),
            "dlq": settings.dlq.model_copy(update={"uri": _absolute(settings.dlq.uri)}),
        }
    )


def _with_absolute_paths(table: TableSettings) -> TableSettings:
    options = _references(table.storage_options)
    return table.model_copy(update={"uri": _absolute(table.uri), "storage_options": options})


def _absolute(path: str) -> str:
    return path if not path or is_remote(path) else str(local_path(path).absolute())


def _references(options: Mapping[str, SecretStr]) -> dict[str, SecretStr]:
    return {name: _reference(value) for name, value in options.items()}


def _reference(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    return SecretStr(FROM_FILE + _absolute(text.removeprefix(FROM_FILE))) if text.startswith(FROM_FILE) else value
