"""Convert pydantic's validation errors to problems: one line each that names the setting and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.sections import TABLES, TableSettings
from memwal.ingest.settings.values import Section
from memwal.ingest.suggest import suggestion

_HIDDEN_FIELDS = (
    "storage_options",
    "options",
    "registry_options",
    "spark",
    "token",
    "write_token",
    "read_token",
    "tokens",
)
_WANTED = {
    "string_type": "must be text in quotes",
    "string_too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "list_type": 'must be a list, such as ["package"]',
    "dict_type": 'must be a table, such as { name = "value" }',
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a configuration: its place (`section`, `key`), and a text with the fix.

    `key` is empty for a problem of the whole section, and `columns.price` for an entry of a table. `needs`: further
    (section, key) pairs that the check used; the problem is dropped if the value of one is wrong.
    """

    section: str
    key: str
    text: str
    needs: tuple[tuple[str, str], ...] = ()

    def of_table(self, section: str) -> Problem:
        """Return the problem with `section`, that of a table, in place of [table]."""
        needs = tuple((section if place == "table" else place, key) for place, key in self.needs)
        return replace(self, section=section if self.section == "table" else self.section, needs=needs)


def unknown_section(name: str, value: object) -> Problem:
    """Return the problem of a top-level name that is not a section. For a setting, it names the right section."""
    sections = Settings.model_fields
    if isinstance(value, Mapping):
        return Problem(name, "", f"unknown section [{name}]{suggestion(name, sections, '[{}]')}")
    homes = [section for section in Settings().sections() if name in section_type(section).model_fields]
    hint = f"; put it under [{homes[0]}]" if homes else suggestion(name, sections, "[{}]")
    return Problem("", name, f"setting {name!r} is outside every section{hint}")


def section_type(section: str) -> type[Section]:
    """Return the model of a section by its name, such as `wal` or `tables.orders`."""
    if section.startswith(TABLES):
        return TableSettings
    annotation = Settings.model_fields[section].annotation
    if not isinstance(annotation, type) or not issubclass(annotation, Section):
        raise TypeError(f"[{section}] is not declared as a Section")
    return annotation


def of_section(section: str, error: ValidationError) -> list[Problem]:
    """Return every violation that pydantic found in one section, one per setting or entry."""
    problems: dict[tuple[int | str, ...], Problem] = {}
    for detail in error.errors(include_url=False):
        problems.setdefault(detail["loc"][:2], _problem(section, detail))  # pydantic reports a union once per branch
    return list(problems.values())


def _problem(section: str, error: ErrorDetails) -> Problem:
    key = str(error["loc"][0]) if error["loc"] else ""
    fields = section_type(section).model_fields
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return Problem(section, key, f"unknown setting {key!r}{suggestion(key, fields)}")
    if not key:
        return Problem(section, "", f"must be a table of settings: write [{section}] and its keys below")
    value = "" if key in _HIDDEN_FIELDS else f" = {error['input']!r}"
    # columns.price in a table, key[0] in a list; further parts are names of union branches
    entry = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"][1:2])
    return Problem(section, key, f"{key}{entry}{value} {_text(error)}")


def _text(error: ErrorDetails) -> str:
    context: dict[str, Any] = error.get("ctx") or {}
    kind = error["type"]
    if kind == "value_error":
        return str(context["error"])
    if kind in _WANTED:
        return _WANTED[kind]
    if kind == "literal_error":
        expected = str(context["expected"])
        choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
        close = get_close_matches(str(error["input"]), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"must be {'one of ' if ' or ' in expected else ''}{expected}{hint}"
    if kind.startswith(("greater_than", "less_than")):
        word, limit = next((word, context[name]) for name, word in _LIMITS.items() if name in context)
        return f"must be {word} {limit}"
    return f"is refused: {error['msg'][:1].lower()}{error['msg'][1:]}"


_LIMITS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
