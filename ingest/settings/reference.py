"""Render settings as text: TOML with comments, and the tables of the reference.

`python -m memwal.ingest.cli.docs`, run in the checkout, writes `configs/default.toml`, the reference between `<!--
settings -->` and `<!-- /settings -->` in `configs/README.md`, and the table of metrics (`ops.metrics`) in
`ingest/service/ops/README.md`. House tests fail if these files differ from the rendered text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from memwal.ingest.secret_refs import redacted, shown
from memwal.ingest.settings.problems import section_type
from memwal.ingest.settings.sections import Settings
from memwal.ingest.settings.values import (
    Section,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

BEGIN, END = "<!-- settings -->", "<!-- /settings -->"
_HEADER = """\
# Every setting of memwal at its default, as `python -m memwal.ingest.cli.docs` writes it. Copy what you change.
# Any key can be set from the environment too: MEMWAL__SECTION__KEY, for example MEMWAL__WAL__RETRY_BUDGET=1min.
"""


def to_dict(settings: Settings, *, hide: bool = False) -> dict[str, dict[str, Any]]:
    """Return plain values that `ingest.settings.load.load` reads back as the same settings; durations have units.

    References to secrets stay references. With `hide`, literal values of secret options are replaced, and the result
    cannot be loaded.
    """
    return {
        section: {key: _plain(field, getattr(part, key), hide) for key, field in type(part).model_fields.items()}
        for section, part in settings
    }


def render_settings(settings: Settings, *, comments: bool = False) -> str:
    """Render the settings as TOML with hidden secrets. With `comments`, each section and key is preceded by its
    meaning."""
    parts = [_HEADER] if comments else []
    for section, values in to_dict(settings, hide=True).items():
        model = section_type(section)
        lines = [f"# {_title(model)}"] if comments else []
        lines.append(f"[{section}]")
        for key, value in values.items():
            if comments:
                lines.append(f"# {_meaning(model.model_fields[key])}")
            lines.append(f"{key} = {toml_value(value)}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def render_reference() -> str:
    """Render one Markdown table per section: key, type, default, meaning."""
    parts = []
    for section, values in to_dict(Settings()).items():
        model = section_type(section)
        parts += [f"**`[{section}]`** {_title(model)}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, value in values.items():
            field = model.model_fields[key]
            parts.append(f"| `{key}` | {_type_words(field)} | `{toml_value(value)}` | {_meaning(field)} |")
        parts.append("")
    return "\n".join(parts)


def _title(model: type[Section]) -> str:
    return (model.__doc__ or "").splitlines()[0]


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _plain(field: FieldInfo, value: Any, hide: bool) -> Any:
    if _reader(field) is parse_duration:
        return format_duration(value)
    if _reader(field) is parse_size:
        return format_size(value)
    if isinstance(value, SecretStr):  # always a reference, see `Secret`
        return value.get_secret_value()
    return _printable("", value, hide)


def _printable(name: str, value: Any, hide: bool) -> Any:
    """Return the value of the option `name`; with `hide`, without secrets."""
    if isinstance(value, SecretStr):
        return shown(name, value) if hide else value.get_secret_value()
    if isinstance(value, Mapping):
        return {key: _printable(key, each, hide) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_printable("", each, hide) for each in value]
    return redacted(value) if hide and isinstance(value, str) else value


def _reader(field: FieldInfo) -> object:
    """Return the function that parses a field's duration or size; None for other fields."""
    functions = (getattr(annotation, "func", None) for annotation in field.metadata)
    return next((function for function in functions if function is not None), None)


def _type_words(field: FieldInfo) -> str:
    if _reader(field) is parse_duration:
        return "duration"
    if _reader(field) is parse_size:
        return "size"
    annotation = field.annotation
    if annotation is bool:
        return "`true` or `false`"
    if annotation in (int, float, str, SecretStr):
        return "number" if annotation in (int, float) else "text"
    if get_origin(annotation) in (list, dict):
        return "list of text" if get_origin(annotation) is list else "table"
    return " or ".join(f"`{choice}`" for choice in get_args(annotation))


def toml_value(value: Any) -> str:
    """Render a TOML value. Strings, numbers, booleans and lists have the form of JSON; tables are written inline."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_quoted(name)} = {toml_value(each)}" for name, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return _quoted(value)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
