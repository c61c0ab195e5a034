"""Render settings as TOML, and the reference of all settings, `configs/default.toml`, as TOML with comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from memwal.ingest.secret_refs import redacted, shown
from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.problems import section_type
from memwal.ingest.settings.sections import TABLES
from memwal.ingest.settings.values import Section, format_duration, format_size, parse_duration, parse_size

_WIDTH = 118
"""Maximum characters of a comment line."""
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = """\
# Every setting of memwal at its default: the reference of the configuration. Copy the keys that you change.
# Any key can be set from the environment too: MEMWAL__SECTION__KEY, for example MEMWAL__WAL__RETRY_BUDGET=1min.
# `make docs` writes this file from the code.
"""


def to_dict(settings: Settings, *, hide: bool = False) -> dict[str, dict[str, Any]]:
    """Return plain values that `ingest.settings.load.load` reads back as the same settings; durations have units.

    References to secrets stay references. With `hide`, literal values of secret options are replaced, and the result
    cannot be loaded.
    """
    values: dict[str, dict[str, Any]] = {}
    for section, part in settings.sections().items():
        plain = {key: _plain(field, getattr(part, key), hide) for key, field in type(part).model_fields.items()}
        if section.startswith(TABLES):
            values.setdefault("tables", {})[section.removeprefix(TABLES)] = plain
        else:
            values[section] = plain
    return values


def render_settings(settings: Settings, *, comments: bool = False) -> str:
    """Render the settings as TOML with hidden secrets. With `comments`, each section and key is preceded by its
    meaning."""
    parts = [_HEADER] if comments else []
    every: dict[str, Any] = to_dict(settings, hide=True)
    tables = every.pop("tables", {})
    for section, values in (every | {f"{TABLES}{key_name(name)}": table for name, table in tables.items()}).items():
        model = section_type(section)
        lines = [f"# {(model.__doc__ or '').splitlines()[0]}"] if comments else []
        lines.append(f"[{section}]")
        for key, value in values.items():
            field, line = model.model_fields[key], f"{key} = {toml_value(value)}"
            if comments:
                lines += textwrap.wrap(field.description or "", _WIDTH, initial_indent="# ", subsequent_indent="#   ")
            lines.append(line + (_choices(field) if comments else ""))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


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
    if isinstance(value, Mapping | Section):
        return {key: _printable(key, each, hide) for key, each in dict(value).items()}
    if isinstance(value, list | tuple):
        return [_printable("", each, hide) for each in value]
    return redacted(value) if hide and isinstance(value, str) else value


def _reader(field: FieldInfo) -> object:
    """Return the function that parses a field's duration or size; None for other fields."""
    functions = (getattr(annotation, "func", None) for annotation in field.metadata)
    return next((function for function in functions if function is not None), None)


def _choices(field: FieldInfo) -> str:
    """Return the values that a field takes beside its default, as a comment behind it; "" if it takes any text."""
    if get_origin(field.annotation) is not Literal:
        return ""
    others = [_quoted(choice) for choice in get_args(field.annotation) if choice not in ("", field.default)]
    return f"  # or {', '.join(others)}"


def key_name(name: str) -> str:
    """Render a TOML key: quoted, unless it has only letters, digits, `_` and `-`."""
    return name if _BARE.fullmatch(name) else _quoted(name)


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
