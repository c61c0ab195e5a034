"""Settings with absolute paths, for processes with another working directory, such as Spark executors.

Paths in a configuration are relative to the directory where the command was started. Settings sent to an executor
must have absolute paths: otherwise it would look for `table.uri`, or create the dead-letter table, in its own
directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from memwal.ingest.secret_refs import FROM_FILE
from memwal.ingest.settings.model import Settings

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
