"""Types of settings' values (durations, sizes, secrets, column types), and the base class of the sections.

Durations are float seconds, sizes are int bytes; neither is ever negative. A file gives them a unit ("100ms", "1.5h",
"256MiB"). A bare 0 needs no unit; every other number does, because `linger_max = 50` is more often a mistake than an
intended fifty seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr

from memwal.ingest.secret_refs import check_only_reference, check_reference
from memwal.ingest.values.type_names import parse_type
from memwal.wal import BUCKETS_MAX

OFF = "off"
SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES: Mapping[str, int] = {
    "B": 1,
    **{f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
    **{f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate(("k", "M", "G", "T"))},
}
_LONGEST = 36500 * 86_400.0
"""Seconds. Threads cannot wait for three times this long."""
_LARGEST = 1 << 50
"""Bytes: 1 PiB. Sums of larger numbers do not fit the 64 bits that Lance and Arrow use for some of them."""
AUTO = "auto"
"""The number of regions that grows with the table."""
NAME_MAX = 100
"""Characters of a table name. File systems take 255 bytes, and some names beside the table's are longer."""
_TABLE_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{NAME_MAX - 1}}}")
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_duration(value: object) -> float:
    """Return the seconds of a duration such as "100ms". Raises: ValueError that names the remedy."""
    number, factor = _split(value, SECONDS, 'a duration such as "100ms", "30s" or "5min"')
    if (seconds := number * factor) > _LONGEST:
        raise ValueError("is too long; give at most 36500d")
    return seconds


def parse_size(value: object) -> int:
    """Return the bytes of a size such as "256MiB". Raises: ValueError that names the remedy."""
    number, factor = _split(value, BYTES, 'a size such as "64KiB", "256MiB" or "1GiB"')
    if (size := round(number * factor)) > _LARGEST:
        raise ValueError("is too large; give at most 1024TiB")
    return size


def format_duration(seconds: float) -> str:
    """Return the shortest text that `parse_duration` reads back as the same number of seconds, to a millionth."""
    microseconds = round(seconds * 1e6)
    return _format(microseconds, {unit: round(factor * 1e6) for unit, factor in SECONDS.items()}) if seconds else "0s"


def format_size(size: int) -> str:
    """Return the shortest text that `parse_size` reads back as the same number of bytes."""
    binary = {unit: factor for unit, factor in BYTES.items() if unit == "B" or "i" in unit}
    return _format(size, binary) if size else "0B"


def check_lifetime(value: object) -> str:
    """Return a lifetime as written: a duration, "off" (also for 0), or "" if not set. Raises: ValueError."""
    text = str(value).strip()
    if text.lower() in ("", OFF):
        return text.lower()
    try:
        return text if parse_duration(value) else OFF
    except ValueError as error:
        raise ValueError(f'{error}; or "{OFF}"') from None


def check_count(value: object) -> int | str:
    """Return a number of regions, or "auto". Raises: ValueError."""
    if value == AUTO:
        return AUTO
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f'must be a whole number, or "{AUTO}"')
    if not 1 <= value <= BUCKETS_MAX:
        raise ValueError("must be at least 1" if value < 1 else f"must be at most {BUCKETS_MAX}")
    return value


def check_table_name(name: str) -> str:
    """Return `name`, if it follows LanceDB's rule (letters, digits, "_", "-" and "."), has at most NAME_MAX characters,
    and does not begin with a dot. Raises: ValueError."""
    if _TABLE_NAME.fullmatch(name) is None:
        rule = f"at most {NAME_MAX} letters, digits, '_', '-' and '.', and no dot first"
        raise ValueError(f"{name!r:.60} is not a table name; write {rule}")
    return name


def _split(value: object, units: Mapping[str, float], wanted: str) -> tuple[float, float]:
    match = None if isinstance(value, bool) else _NUMBER_AND_UNIT.fullmatch(str(value))
    if match is None:
        raise ValueError(f"is not {wanted}")
    number, unit = float(match[1]), match[2]
    if not unit:
        if number:
            raise ValueError(f"has no unit; write {wanted}")
        return 0.0, 1.0
    factors = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() not in factors:
        raise ValueError(f"has the unknown unit {unit!r}; write {wanted}, units are {', '.join(units)}")
    return number, factors[unit.lower()]


def _format(value: int, units: Mapping[str, int]) -> str:
    """Format `value` in the largest unit that divides it; the smallest unit divides everything."""
    unit = max((unit for unit, factor in units.items() if value % factor == 0), key=lambda unit: units[unit])
    return f"{value // units[unit]}{unit}"


# ---- types of settings ---------------------------------------------------------------------------------------------


def _checked_type(name: str) -> str:
    parse_type(name)
    return name


def _a_day_at_least(seconds: float) -> float:
    if seconds < 86_400.0:
        raise ValueError('must be at least "1d": files of a commit in progress look like orphans too')
    return seconds


Duration = Annotated[float, BeforeValidator(parse_duration)]
Lifetime = Annotated[str, BeforeValidator(check_lifetime)]
OrphanAge = Annotated[Duration, AfterValidator(_a_day_at_least)]
Size = Annotated[int, BeforeValidator(parse_size)]
RegionCount = Annotated[int | str, BeforeValidator(check_count)]
ColumnType = Annotated[str, AfterValidator(_checked_type)]
Option = Annotated[SecretStr, AfterValidator(check_reference)]
Secret = Annotated[SecretStr, AfterValidator(check_only_reference)]
Index = str | dict[str, Any]


class Section(BaseModel):
    """One section of the TOML file. Immutable; rejects unknown keys and values of a wrong type.

    The docstring of a field is its description.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
