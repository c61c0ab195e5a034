"""Writes configs/default.toml and the references of settings and metrics: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from memwal.ingest.ops.metrics import COMMITTED, COUNTED, HELD, TABLE
from memwal.ingest.settings.model import Settings
from memwal.ingest.settings.reference import BEGIN, END, render_reference, render_settings

METRICS = ("<!-- metrics -->", "<!-- /metrics -->")


def render_metrics() -> str:
    """The tables of metrics in ingest/ops/README.md."""
    from memwal.ingest.pipeline.metrics import RAN, RAN_BY_REGION

    parts = []
    for title, label, declared in (
        ("Of each region, by `memwal serve`", "region", COUNTED + HELD),
        ("Of the table, by `memwal serve`", "", COMMITTED + TABLE),
        ("Of the pipeline, by `memwal run`", "", RAN),
        ("Of each region, by `memwal run`", "region", RAN_BY_REGION),
    ):
        parts += [f"{title}:", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for each in declared:
            labels = ", ".join(f"`{name}`" for name in (label, each.by) if name)
            suffix = "_total" if each.kind == "counter" else ""
            parts.append(f"| `{each.name}{suffix}` | {each.kind} | {labels} | {each.meaning} |")
        parts.append("")
    return "\n".join(parts)


def between_markers(text: str, begins: str = BEGIN, ends: str = END) -> str:
    """What stands between the markers of a document. Raises: ValueError when they are missing."""
    _, begin, rest = text.partition(begins)
    body, end, _ = rest.partition(ends)
    if not begin or not end:
        raise ValueError(f"no {begins} … {ends} in the text; put both markers where the reference belongs")
    return body.strip("\n") + "\n"


def _put_between(text: str, begins: str, ends: str, reference: str) -> str:
    between_markers(text, begins, ends)
    head, _, rest = text.partition(begins)
    return f"{head}{begins}\n\n{reference}\n{ends}{rest.partition(ends)[2]}"


def _write(root: Path) -> None:
    (root / "configs" / "default.toml").write_text(render_settings(Settings(), comments=True), encoding="utf-8")
    for readme, marks, reference in (
        (root / "configs" / "README.md", (BEGIN, END), render_reference()),
        (root / "ingest" / "ops" / "README.md", METRICS, render_metrics()),
    ):
        text = _put_between(readme.read_text(encoding="utf-8"), *marks, reference)
        readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
