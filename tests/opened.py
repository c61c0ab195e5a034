"""The engine's `open_table`, which asks the daemons that owner notes name, as every caller in the product does; and
tables that a daemon in this process serves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from memwal.ingest.engine.table import open as engine
from memwal.ingest.engine.table.embedded import Table
from memwal.ingest.service.open import asking
from memwal.ingest.settings.load import Settings
from tests.ways import served


def open_table(settings: Settings, environ: Mapping[str, str], schema: pa.Schema | None = None, **how: Any) -> Table:
    """Open the table of `settings` in this process."""
    return engine.open_table(settings, environ, schema, ask=asking(settings, environ), **how)


def announced(settings: Settings, ends: ExitStack) -> str:
    """Serve the table of `settings` in this process until `ends` is closed; return the endpoint, which owner notes
    name."""
    table = ends.enter_context(open_table(settings, {}))
    endpoint = served(table, ends)
    table.announce(endpoint)
    return endpoint
