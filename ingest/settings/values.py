"""Types of settings: durations are float seconds, sizes int bytes; and what every section of the file is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr

from memwal.ingest.mapping.type_names import parse_type
from memwal.ingest.secret_refs import check_only_reference, check_reference
from memwal.ingest.settings.units import parse_duration, parse_size


def _checked_type(name: str) -> str:
    parse_type(name)
    return name


def _a_day_at_least(seconds: float) -> float:
    if seconds < 86_400.0:
        raise ValueError('must be at least "1d": what a commit under way has written looks just the same')
    return seconds


Duration = Annotated[float, BeforeValidator(parse_duration)]
OrphanAge = Annotated[Duration, AfterValidator(_a_day_at_least)]
Size = Annotated[int, BeforeValidator(parse_size)]
ColumnType = Annotated[str, AfterValidator(_checked_type)]
Option = Annotated[SecretStr, AfterValidator(check_reference)]
Secret = Annotated[SecretStr, AfterValidator(check_only_reference)]
Index = str | dict[str, Any]


class Section(BaseModel):
    """One table of the TOML file. Immutable; refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
