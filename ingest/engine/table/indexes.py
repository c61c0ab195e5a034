"""Check the arguments of `create_index` and `drop_index`.

The protocol is in `flush.commits.index_changes`. The memtables of this process's regions adopt an index change as they
adopt a change of columns (`region.admission`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from memwal import flush
from memwal.ingest.engine.api import arguments
from memwal.ingest.engine.api.versions import no_tag
from memwal.ingest.errors import FencedError, Invalid, Unavailable
from memwal.ingest.suggest import suggestion
from memwal.memtable import IndexSpec
from memwal.memtable.index_spec import INDEX_KINDS
from memwal.wal import Clock


def followed(follow: Callable[[], None]) -> None:
    """Let a table adopt an added or dropped index. Errors are ignored, because they would suggest that nothing was
    done.

    If the table cannot adopt the index now, during a resize, its next read does.
    """
    with suppress(Unavailable, FencedError):
        follow()


def added(base: flush.BaseTable, column: Any, kind: Any, parameters: Mapping[str, Any], clock: Clock) -> str:
    """Add an index and return its name, as `Table.create_index`. Raises: as that method."""
    column, kind = arguments.text("column", column, "embedding"), arguments.text("kind", kind, "ivf_pq")
    for known in INDEX_KINDS:
        if kind == known:
            return flush.add_index(base, IndexSpec(column, known, dict(parameters)), clock).name
    raise Invalid(f"kind '{kind:.60}' is unknown{suggestion(kind, INDEX_KINDS)}")


def dropped(base: flush.BaseTable, name: Any, clock: Clock) -> None:
    """Drop an index, as `Table.drop_index`. Raises: as that method."""
    flush.drop_index(base, arguments.text("name", name, "embedding_idx"), clock)


def tagged(base: flush.BaseTable, name: Any, version: Any, *, replace: bool = False) -> None:
    """Create a tag, move it, or drop it (version None). Raises: as `Operations.create_tag`, `drop_tag`."""
    name, tags = arguments.text("name", name, "release"), base.dataset.tags
    known = flush.tags_of(base.dataset)
    if version is None:
        if name not in known:
            raise no_tag(name, known)
        tags.delete(name)
        return
    number = arguments.whole("version", version, 1, arguments.ROWS_MAX)
    if name in known and not replace:
        raise Invalid(f"the tag {name!r} exists, at version {known[name]['version']}; give replace=True to move it")
    if number not in {each["version"] for each in base.dataset.version_refs()}:
        raise Invalid(f"version {number} is not kept; list_versions() has those that are")
    (tags.update if name in known else tags.create)(name, number)
