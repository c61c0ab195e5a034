"""An explanation as text: for each process that answered one table, a line for each search of each level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memwal.ingest.api.explain import ExplainedLevel, ExplainedPart, ExplainedSearch, Explanation

_NAMES = ("region", "level", "rows", "by", "looked at", "found", "hidden", "deleted", "returned", "ms", "how")
_NUMBERS = ("rows", "looked at", "found", "hidden", "deleted", "returned", "ms")
_REGION = 8
"""Characters of a region's id: its first group of digits."""


def as_text(told: Explanation) -> str:
    """Return `told` as lines of text, the last without a line break."""
    return "\n".join(_lines(told))


def _lines(told: Explanation) -> Iterator[str]:
    left_out = told.found - told.rows
    notes = [f"{told.read} at {told.level}: {_counted(told.rows, 'row')} in {_ms(told.ms)} ms"]
    if told.complete and left_out > 0:
        notes.append(f"{left_out:,} more were found and left out (offset, fusion or merging)")
    if not told.complete:
        notes.append("closed before its last row")
    if told.attempts > 1:
        notes.append(f"{told.attempts} attempts")
    if any(part.endpoint for part in told.parts):
        notes.append(f"{_ms(told.network_ms)} ms of it beyond the slowest daemon's own")
    yield "; ".join(notes)
    for part in told.parts:
        yield ""
        yield _moment(part)
        yield from _table([_cells(part, level, search) for level in part.levels for search in _searches(level)])


def _moment(part: ExplainedPart) -> str:
    regions = _counted(len(part.regions), "region") if part.regions else "no region, the base only"
    where = f"{part.endpoint} in {_ms(part.ms)} ms: " if part.endpoint else ""
    steps = f"capture {_ms(part.capture_ms)} ms, base opened {_ms(part.open_ms)} ms, merge {_ms(part.merge_ms)} ms"
    again = f", {part.attempts} attempts" if part.attempts > 1 else ""
    return f"{where}version {part.base_version} of {part.table}, {regions}; {steps}{again}"


def _searches(level: ExplainedLevel) -> Sequence[ExplainedSearch]:
    return level.searches or (ExplainedSearch("", "not asked: newer levels have all that was asked for"),)


def _cells(part: ExplainedPart, level: ExplainedLevel, search: ExplainedSearch) -> dict[str, str]:
    counts = {
        "looked at": search.looked_at,
        "found": search.found,
        "hidden": search.hidden,
        "deleted": search.deleted,
        "returned": search.returned,
    }
    asked = bool(search.by)
    return {
        "region": (level.region or "")[:_REGION],
        "level": _level(part, level),
        "rows": f"{level.rows:,}",
        "by": search.by,
        **{name: f"{count:,}" if count is not None and asked else "" for name, count in counts.items()},
        "ms": _ms(search.ms) if asked else "",
        "how": "; ".join(_how(level, search)),
    }


def _level(part: ExplainedPart, level: ExplainedLevel) -> str:
    if level.kind == "base":
        return f"base {part.base_version}"
    if level.kind == "wal":
        first, last = level.positions or (0, 0)
        return f"wal {first}" if first == last else f"wal {first}–{last}"
    return f"{level.kind} {level.generation} {level.state}"


def _how(level: ExplainedLevel, search: ExplainedSearch) -> Iterator[str]:
    if search.how:
        yield search.how
    if search.fetches > 1:
        yield f"fetched {search.fetches} times"
    if level.load_ms and search is _searches(level)[0]:
        yield f"loaded in {_ms(level.load_ms)} ms"
    if search.requests:
        yield f"{_counted(search.requests, 'request')}, {search.bytes_read:,} bytes"


def _table(rows: list[dict[str, str]]) -> Iterator[str]:
    """Align the cells; columns without any value, and "deleted" without any other than 0, are left out."""
    names = [name for name in _NAMES if any(row[name] not in ("", "0" if name == "deleted" else "") for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in ({name: name for name in names}, *rows):
        cells = (row[name].rjust(widths[name]) if name in _NUMBERS else row[name].ljust(widths[name]) for name in names)
        yield "  ".join(cells).rstrip()


def _ms(ms: float) -> str:
    return f"{ms:,.1f}" if ms >= 0.1 or not ms else f"{ms:.2f}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
