"""Write the references of settings (configs/default.toml), metrics and the Python API: `make docs`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memwal.ingest.errors import KINDS
from memwal.ingest.service.ops.metrics import BUILD, COMMITTED, COUNTED, FLEET, HELD, LIMITED, PAUSED, REFUSED, TABLE
from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.reference import render_settings

PYTHON = Path("ingest", "engine", "api", "reference.md")
"""The reference of the Python API; the whole file is generated."""
LINE = 100
"""Maximum characters of a call on one line."""
METRICS_PAGE = Path("ingest", "service", "ops", "README.md")
METRICS = ("<!-- metrics -->", "<!-- /metrics -->")


def render_metrics() -> str:
    """Return the tables of metrics, which METRICS_PAGE has between the markers METRICS."""
    from memwal.ingest.service.ops.storage import BUDGET, REQUESTED
    from memwal.ingest.spark.pipeline.metrics import RAN, RAN_BY_REGION

    parts = []
    for title, label, declared in (
        ("Of each region, by `memwal serve`", "region", COUNTED + HELD),
        ("Of the table, by `memwal serve`", "", COMMITTED + LIMITED + TABLE + FLEET),
        ("Of the process, by `memwal serve` and `memwal run`", "", BUILD),
        ("Of what an operator has paused, by `memwal serve` and `memwal run`", "", PAUSED),
        ("Of the pipeline, by `memwal run`", "", RAN),
        ("Of each region, by `memwal run`", "region", RAN_BY_REGION),
        ("Of refused requests, by `memwal serve` and `memwal run`", "over", REFUSED),
        ("Of requests to storage, by `memwal serve` and `memwal run`", "kind", REQUESTED),
        ("Of the budget for them, by `memwal serve` and `memwal run`", "", BUDGET),
    ):
        parts += [f"{title}:", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for each in declared:
            labels = ", ".join(f"`{name}`" for name in (label, *each.labels) if name)
            suffix = "_total" if each.kind == "counter" else ""
            parts.append(f"| `{each.name}{suffix}` | {each.kind} | {labels} | {each.meaning} |")
        parts.append("")
    return "\n".join(parts)


def render_python() -> str:
    """Return the reference of the public names of `memwal`, from their signatures and docstrings."""
    return "\n".join(_python_reference()) + "\n"


def _python_reference() -> Iterator[str]:
    import memwal
    from memwal.ingest.engine.api.changes import Changes
    from memwal.ingest.engine.api.explanation import ExplainedLevel, ExplainedPart, ExplainedSearch, Explanation
    from memwal.ingest.engine.api.tokens import Receipt, RegionCounts
    from memwal.ingest.service.client.async_streams import AsyncChanges, AsyncRowStream
    from memwal.ingest.service.client.async_table import AsyncTable

    yield "# The Python API\n\nWritten by `make docs` from the signatures and docstrings of the public names.\n"
    for name, function in (("memwal.open", memwal.open), ("memwal.connect", memwal.connect)):
        yield from _described(f"## {name}", name, function)
    yield from _table_reference()
    yield from _described("## memwal.connect_async", "await memwal.connect_async", memwal.connect_async)
    for awaited in (AsyncTable, AsyncRowStream, AsyncChanges):
        yield f"### {awaited.__name__}\n\n{inspect.getdoc(awaited)}\n"
    yield from _described("## memwal.register_spark", "memwal.register_spark", memwal.register_spark)
    yield f"## Changes\n\nWhat `table.changes` returns.\n\n{inspect.getdoc(Changes)}\n"
    for member in (Changes.position.fget, Changes.schema.fget, Changes.read_all):  # type: ignore[attr-defined]
        yield f"- `{member.__name__}`: {' '.join((inspect.getdoc(member) or '').split())}"
    yield ""
    yield "## Explanations\n\nWhat `explain` of a read is given.\n"
    for told in (Explanation, ExplainedPart, ExplainedLevel, ExplainedSearch):
        yield from _described(f"### {told.__name__}", told.__name__, told)
    for name in ("levels", "found", "indexes", "as_dict", "to_json"):
        yield f"- `{name}`: {' '.join((inspect.getdoc(getattr(Explanation, name)) or '').split())}"
    yield ""
    yield from _described("## memwal.lancedb_reranker", "memwal.lancedb_reranker", memwal.lancedb_reranker)
    for kind in (Receipt, RegionCounts, memwal.Token):
        yield from _described(f"## {kind.__name__}", kind.__name__, kind)
    yield from _described("## memwal.MemWalSink", "memwal.MemWalSink", memwal.MemWalSink)
    yield "## Errors\n\nEvery method raises one of these kinds, all of them `memwal.MemWalError`.\n"
    yield "| error | exit code of the command | what it means |\n|---|---|---|"
    for error in KINDS.values():
        yield f"| `memwal.{error.__name__}` | {error.exit_code} | {' '.join((error.__doc__ or '').split())} |"


def _table_reference() -> Iterator[str]:
    from memwal.ingest.engine.api.lancedb_forms import LanceDBForms
    from memwal.ingest.engine.table.public import Table, operations

    yield "## A table\n\nWhat `memwal.open` and `memwal.connect` return has these methods, and is a context manager."
    yield "Every read of rows names a level: `committed`, `flushed`, `durable` or `latest`.\n"
    short = [name for name in vars(LanceDBForms) if name in operations() and name != "search"]
    for name, method in operations().items():
        if name not in short:
            yield from _described(f"### {name}", f"table.{name}", method)
    yield "- `schema`: Base schema, as last seen.\n- `key`: Key columns; () for a table without a key."
    for member in (Table.version.fget, Table.tags.fget):  # type: ignore[attr-defined]
        yield f"- `{member.__name__}`: {' '.join((inspect.getdoc(member) or '').split())}"
    yield "\n### Versions\n"
    for named in ("checkout", "checkout_latest", "restore"):
        yield from _listed(named, getattr(Table, named))
    yield "\n### Names of LanceDB\n"
    for name in short:
        yield from _listed(name, operations()[name])
    yield ""


def _listed(name: str, what: Callable[..., Any]) -> Iterator[str]:
    """Yield the call and the docstring of a method as an item of a list."""
    given = [str(each).partition(":")[0] for each in inspect.signature(what).parameters.values() if each.name != "self"]
    yield f"- `{name}({', '.join(given)})`: {' '.join((inspect.getdoc(what) or '').split())}"


def _described(title: str, name: str, what: Callable[..., Any]) -> Iterator[str]:
    """Yield a heading, the call, and the docstring of a function or class."""
    signature = inspect.signature(what)
    given: list[str] = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in given:
            given.append("*")
        if each.name != "self":
            default = "" if each.default is each.empty else f" = {each.default!r}".replace("<factory>", "{}")
            name_given = f"**{each.name}" if each.kind is each.VAR_KEYWORD else each.name
            given.append(f"{name_given}: {each.annotation}{default}")
    answer = "" if inspect.isclass(what) else f" -> {signature.return_annotation}"
    call = f"{name}({', '.join(given)}){answer}"
    if len(call) > LINE:
        call = "\n".join([f"{name}(", *(f"    {each}," for each in given), f"){answer}"])
    yield f"{title}\n\n```python\n{call}\n```\n\n{inspect.getdoc(what)}\n"


def _write(root: Path) -> None:
    (root / "configs" / "default.toml").write_text(render_settings(Settings(), comments=True), encoding="utf-8")
    (root / PYTHON).write_text(render_python(), encoding="utf-8")
    page, (begins, ends) = root / METRICS_PAGE, METRICS
    head, _, rest = page.read_text(encoding="utf-8").partition(begins)
    page.write_text(f"{head}{begins}\n\n{render_metrics()}\n{ends}{rest.partition(ends)[2]}", encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
