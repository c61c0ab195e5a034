"""Load a configuration: a TOML file or dict, then the environment, then overrides. Report all problems at once.

README.md lists the steps.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any

from pydantic import ValidationError

from memwal.ingest.errors import Invalid
from memwal.ingest.secret_refs import redacted
from memwal.ingest.settings.configuration import Settings
from memwal.ingest.settings.fleet import listed
from memwal.ingest.settings.problems import Problem, of_section, section_type, unknown_section
from memwal.ingest.settings.rules import conflicts, relations
from memwal.ingest.settings.sections import TABLES
from memwal.ingest.settings.values import Section, check_table_name
from memwal.ingest.suggest import suggestion

__all__ = ["Settings", "load", "load_every", "load_tables", "pipelines_of"]

PREFIX = "MEMWAL__"
PIPELINES = "pipelines"
"""Name of the table that holds the pipelines of one file; each has sections that override those of the file."""
Raw = dict[str, dict[str, Any]]
Origins = dict[tuple[str, str], str]


def load(
    source: str | Path | Mapping[str, Any] | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Return the settings of one table, the only one of the configuration. Arguments as of `load_tables`.

    Raises: Invalid as `load_tables`, or if the configuration has several tables.
    """
    settings = load_tables(source, environ, overrides)
    if not settings.is_fleet:
        return settings
    if len(settings.names) == 1:
        return settings.of_table(settings.names[0])
    place = settings.fleet.prefix or listed(list(settings.names))
    raise Invalid(f"{_sections(source)[0]}: it has several tables ({place}); write a file with [table] for one of them")


def load_tables(
    source: str | Path | Mapping[str, Any] | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Return the settings of a TOML path, a dict of sections or nothing (defaults), for one or several tables.

    `environ` overrides `source`; `overrides` overrides both. A path may name one of the file's pipelines after a
    colon, as in `kafka.toml:orders`. `Settings.of_table` returns the settings of one table.
    Raises: Invalid with one line per problem, each naming the file or variable, the section, the key and the fix.
    """
    name, content = _sections(source)
    lines = [_line(name, unknown_section(key, value)) for key, value in content.items() if not _is_section(key, value)]
    raw: Raw = {key: dict(value) for key, value in content.items() if _is_section(key, value)}
    tables, misnamed = _tables(raw.pop("tables", {}))
    raw |= tables
    lines += [_line(name, problem) for problem in misnamed]
    origins: Origins = {}
    lines += _fold_environment(raw, origins, environ)
    for section, values in (overrides or {}).items():
        raw.setdefault(section, {}).update(values)
    refused = {("table", "uri")} if misnamed else set[tuple[str, str]]()
    sections: dict[str, Section] = {}
    problems: list[Problem] = []
    for section in [*Settings().sections(), *tables]:
        sections[section], section_problems = _validated(section, raw.get(section, {}), refused)
        problems += section_problems
    named = {section.removeprefix(TABLES): sections.pop(section) for section in tables}
    settings = Settings(**sections, tables=named)  # type: ignore[arg-type]
    for problem in [*problems, *relations(settings, refused)]:
        origin = origins.get((problem.section, problem.key.partition(".")[0]), name)
        lines.append(_line(origin, problem))
    if lines:
        raise Invalid.of(dict.fromkeys(lines))
    return settings


def pipelines_of(path: str | Path) -> tuple[str, ...]:
    """Return the argument of `load` for each pipeline of a file; `path` itself if it names one or the file has none."""
    file, chosen = _split(path)
    names: Iterable[str] = () if chosen else _pipelines(file, _read(file))
    return tuple(f"{file}:{name}" for name in names) or (str(path),)


def load_every(path: str | Path, environ: Mapping[str, str]) -> dict[str, Settings]:
    """Return the settings of every pipeline of a file, by its path for `load`.

    Raises: Invalid with the problems of all pipelines, each once; without any, with the conflicts between the
    pipelines.
    """
    settings: dict[str, Settings] = {}
    lines: list[str] = []
    for pipeline in pipelines_of(path):
        try:
            settings[pipeline] = load_tables(pipeline, environ)
        except Invalid as error:
            lines += error.lines
    lines = lines or list(conflicts(list(settings.values())))
    if lines:
        raise Invalid.of(dict.fromkeys(lines))
    return settings


def _sections(source: str | Path | Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Return the source's name for messages, and its sections: those of the file, overridden by the chosen
    pipeline's.

    A setting of a pipeline replaces that of the file; a table such as `columns` is replaced as a whole.
    """
    if not isinstance(source, str | Path):
        return "settings", dict(source or {})
    file, chosen = _split(source)
    content = _read(file)
    pipelines = _pipelines(file, content)
    if not pipelines and not chosen:
        return str(file), content
    chosen = chosen or (next(iter(pipelines)) if len(pipelines) == 1 else "")
    if chosen not in pipelines:
        if not pipelines:
            text = f"it has no [{PIPELINES}], so no pipeline {chosen!r}; give the path of the file alone"
        elif not chosen:
            text = f"it has several pipelines; choose one: {', '.join(f'{file}:{name}' for name in pipelines)}"
        else:
            text = f"it has no pipeline {chosen!r}{suggestion(chosen, pipelines)}"
        raise Invalid(f"{file}: {text}")
    merged = {key: value for key, value in content.items() if key != PIPELINES}
    for section, values in pipelines[chosen].items():
        both = isinstance(values, Mapping) and isinstance(merged.get(section), Mapping)
        merged[section] = {**merged[section], **values} if both else values
    return f"{file}:{chosen}", merged


def _split(path: str | Path) -> tuple[Path, str]:
    """Split a path into the file and the pipeline named after the colon; "" without a name."""
    file, colon, name = str(path).rpartition(":")
    return (Path(file), name) if colon and not Path(path).exists() else (Path(path), "")


def _pipelines(file: Path, content: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    pipelines = content.get(PIPELINES, {})
    if not isinstance(pipelines, Mapping) or not all(isinstance(pipeline, Mapping) for pipeline in pipelines.values()):
        raise Invalid(f"{file}: [{PIPELINES}] must hold tables by name, such as [{PIPELINES}.orders.table]")
    return pipelines


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except OSError as error:
        remedy = f"; memwal config new FILE --from {path} writes one" if path.is_dir() else ""
        raise Invalid(f"{path}: {error.strerror}; give the path of a TOML file{remedy}") from None
    except UnicodeDecodeError as error:
        raise Invalid(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{path}: {_unquoted(text, str(error)) or f'not TOML: {error}'}") from None


def _unquoted(text: str, problem: str) -> str | None:
    """Return the error for text without quotes, if that is the `problem` of tomllib. The value may be a secret."""
    place = re.match(r"(?:Invalid value|Expected newline).* \(at line (\d+), column (\d+)\)", problem)
    if place is None:
        return None
    line, column = text.split("\n")[int(place[1]) - 1], int(place[2]) - 1
    before, value = line[:column], line[column:]
    if re.search(r"(^|[=\[,])[^=\[,\]{}\"']*$", before) is None or re.match(r"[\w./~$-]", value) is None:
        return None
    rule = "true and false have no capitals" if re.match("(?i:true|false)", value) else "text needs quotes"
    names, form = re.findall(r"([\w.-]+)\s*=", before), '["…"]' if "[" in before else '"…"'
    example = f", such as {names[-1]} = {form}" if names and "quotes" in rule else ""
    return f"line {place[1]}, column {place[2]}: {rule}{example}"


def _tables(content: Mapping[str, Any]) -> tuple[Raw, list[Problem]]:
    """Return the sections [tables.NAME] by their whole names, and the problems of those that are left out."""
    tables: Raw = {}
    problems = []
    for name, values in content.items():
        try:
            if not isinstance(values, Mapping):
                raise ValueError(f"{name!r} is not a section; write [tables.NAME] and the table's settings below it")
            tables[TABLES + check_table_name(name)] = dict(values)
        except ValueError as error:
            problems.append(Problem("tables", name, str(error)))
    return tables, problems


def _is_section(key: str, value: object) -> bool:
    return key in Settings.model_fields and isinstance(value, Mapping)


def _line(origin: str, problem: Problem) -> str:
    where = f"[{problem.section}] " if problem.section and not problem.text.startswith("unknown section") else ""
    return f"{origin}: {where}{redacted(problem.text)}"


# ---- environment ---------------------------------------------------------------------------------------------------


def _fold_environment(raw: Raw, origins: Origins, environ: Mapping[str, str]) -> list[str]:
    """Put the variables' values into `raw` and their names into `origins`; return an error line per unknown name."""
    lines = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        section, _, key = variable.removeprefix(PREFIX).lower().partition("__")
        if section == "tables":
            name, _, key = key.rpartition("__")
            sections = (each for each in raw if each.startswith(TABLES))
            tables = {each: re.sub("[.-]", "_", each.removeprefix(TABLES)).upper() for each in sections}
            meant = [each for each, spelled in tables.items() if spelled == name.upper()]
            if len(meant) != 1:
                hint = suggestion(name.upper(), tables.values(), "{}") if tables else "; the file has no [tables.NAME]"
                lines.append(
                    f"{variable}: {'several tables have' if meant else 'no table has'} the name {name!r}{hint}"
                )
                continue
            (section,) = meant
        if section not in raw and section not in Settings.model_fields:
            hint = suggestion(section, Settings.model_fields, "[{}]")
            lines.append(f"{variable}: unknown section [{section}]{hint}")
        elif key not in section_type(section).model_fields:
            hint = suggestion(key, section_type(section).model_fields)
            lines.append(f"{variable}: [{section}] unknown setting {key!r}{hint}")
        else:
            raw.setdefault(section, {})[key] = _from_text(section, key, environ[variable])
            origins[section, key] = variable
    return lines


def _from_text(section: str, key: str, text: str) -> Any:
    """Parse a variable's value: text stays text; numbers, lists and tables are read as TOML, else as JSON.

    A value that is neither is returned as text; the validation of its section then reports the expected type.
    """
    field = section_type(section).model_fields[key]
    if field.annotation not in (int, bool, float, int | str) and not isinstance(field.annotation, GenericAlias):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- validation ----------------------------------------------------------------------------------------------------


def _validated(name: str, values: dict[str, Any], refused: set[tuple[str, str]]) -> tuple[Section, list[Problem]]:
    """Return a section and its problems. Rejected values are left out of the section and added to `refused`: an entry
    of a table, or else the whole value."""
    model = section_type(name)
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        kept = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
        for detail in error.errors(include_url=False):
            key, *entry = detail["loc"]
            if entry and isinstance(kept.get(str(key)), dict):
                kept[str(key)].pop(entry[0], None)
                refused.add((name, f"{key}.{entry[0]}"))
            else:
                kept.pop(str(key), None)
                refused.add((name, str(key)))
        return model.model_validate(kept), of_section(name, error)
