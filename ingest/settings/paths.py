"""A configuration for processes with another working directory, as Spark's executors have.

Paths in a configuration begin where the command was typed. Whoever sends settings to an executor sends them with paths
from the root on: an executor would look for `table.uri`, or make the dead letters' table, in a directory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from memwal.ingest.secret_refs import FROM_FILE
from memwal.ingest.settings.model import Settings


def anywhere(settings: Settings) -> Settings:
    """The same settings, to be used in any directory of this host, or of others that have the same paths."""
    daemon, table, source = settings.daemon, settings.table, settings.source
    files: dict[str, Any] = {name: _absolute(getattr(daemon, name)) for name in ("tls_cert", "tls_key", "tls_ca")}
    return settings.model_copy(
        update={
            "table": table.model_copy(
                update={"uri": _absolute(table.uri), "storage_options": _references(table.storage_options)}
            ),
            "source": source.model_copy(update={"registry_options": _references(source.registry_options)}),
            "daemon": daemon.model_copy(update=files | {"token": _reference(daemon.token)}),
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
    """Whether a path is one that only Spark can read (`s3a://…`, `hdfs://…`)."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> Path:
    """A local path or `file:` URL as a Path."""
    return Path(path.removeprefix("file://") if path.startswith("file://") else path)
