"""A whole configuration: its sections, the schema and indexes that they describe, and absolute paths.

Settings are declared only in the sections. `configs/default.toml` is rendered from them
(`ingest.settings.reference`); a test compares it.

Paths in a configuration are relative to the directory where the command was started. Settings sent to an executor
must have absolute paths: otherwise it would look for `table.uri`, or create the dead-letter table, in its own
directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field, SecretStr

from memwal.ingest.secret_refs import FROM_FILE, resolve
from memwal.ingest.settings.sections import (
    CommitSettings,
    CostSettings,
    DaemonSettings,
    DlqSettings,
    FlushSettings,
    GcSettings,
    LogSettings,
    MemtableSettings,
    RegionsSettings,
    SinkSettings,
    SourceSettings,
    TableSettings,
    TracingSettings,
    WalSettings,
)
from memwal.ingest.settings.values import Index, Section
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
    dlq: DlqSettings = Field(default_factory=DlqSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    cost: CostSettings = Field(default_factory=CostSettings)

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
    def checkpoint(self) -> str:
        """Spark's checkpoint directory: `sink.checkpoint`, or its default beside the table."""
        return self.sink.checkpoint or f"{self.table.uri.rstrip('/')}.checkpoint"

    @property
    def dead_letters(self) -> str:
        """Location of the dead-letter table: `dlq.uri`, or its default beside the table."""
        return self.dlq.uri or f"{self.table.uri.rstrip('/')}.dlq"


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
    daemon, table, source = settings.daemon, settings.table, settings.source
    files: dict[str, Any] = {name: _absolute(getattr(daemon, name)) for name in _TLS_FILES}
    tokens = {name: _reference(getattr(daemon, name)) for name in ("token", "write_token", "read_token")}
    return settings.model_copy(
        update={
            "table": table.model_copy(
                update={"uri": _absolute(table.uri), "storage_options": _references(table.storage_options)}
            ),
            "source": source.model_copy(update={"registry_options": _references(source.registry_options)}),
            "daemon": daemon.model_copy(update=files | tokens),
            "dlq": settings.dlq.model_copy(update={"uri": _absolute(settings.dlq.uri)}),
        }
    )


def _absolute(path: str) -> str:
    return path if not path or is_remote(path) else str(local_path(path).absolute())


def _references(options: Mapping[str, SecretStr]) -> dict[str, SecretStr]:
    return {name: _reference(value) for name, value in options.items()}


def _reference(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    return SecretStr(FROM_FILE + _absolute(text.removeprefix(FROM_FILE))) if text.startswith(FROM_FILE) else value


def is_remote(path: str) -> bool:
    """Return whether only Spark can read a path (`s3a://…`, `hdfs://…`)."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> Path:
    """Return a local path or `file:` URL as a Path."""
    return Path(path.removeprefix("file://") if path.startswith("file://") else path)
