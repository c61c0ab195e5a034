"""Detect misspelt names of formats, options and Spark settings.

Spark ignores an unknown option without a message, since it may belong to a plugin. Therefore a name counts as misspelt
only if it is not one of Spark's and differs from one of them by one or two characters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from memwal.ingest.errors import Invalid
from memwal.ingest.option_names import FILE_OPTIONS, SPARK_CONF
from memwal.ingest.settings.sections import SourceSettings

FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")
FORMATS = (*FILE_FORMATS, "kafka", "delta", "iceberg", "hudi", "rate", "socket")


def check_spark_names(source: SourceSettings) -> None:
    """Raise Invalid with every misspelt name in `source`, one line each."""
    found = list(misspelt(source))
    if found:
        raise Invalid.of(found)


def misspelt(source: SourceSettings) -> Iterator[str]:
    """Yield a message for each misspelt name in the format, options and Spark configuration of a source."""
    if meant := _meant(source.format, FORMATS):
        yield f"source.format: Spark has no source {source.format!r}; did you mean {meant!r}?"
    for name in source.options if source.format in FILE_FORMATS else ():
        if meant := _meant(name, FILE_OPTIONS):
            yield f"[source] options.{name}: Spark would ignore it; did you mean {meant!r}?"
    for name in source.spark:
        if not name.startswith("spark."):
            yield f"[source.spark] {name}: names of Spark's configuration begin with 'spark.', and need quotes"
        elif meant := _meant(name, SPARK_CONF):
            yield f"[source.spark] {name}: Spark would ignore it; did you mean {meant!r}?"


def _meant(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` misspells.

    None if `name` is a known name in upper or lower case, or similar to none of them.
    """
    given = name.lower()
    if given in (each.lower() for each in known):
        return None
    most = 1 if len(name) < 8 else 2 if "." not in name else 1
    return next((each for each in known if _distance(given, each.lower(), most) <= most), None)


def _distance(one: str, other: str, most: int) -> int:
    """Return the number of characters to insert, delete, replace or swap with their neighbour.

    This is the Damerau distance as "optimal string alignment". Any number above `most` means that there are more.
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    before, row = list[int](), list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        older, before, row = before, row, [at]
        for to, wanted in enumerate(other, 1):
            row.append(min(row[-1] + 1, before[to] + 1, before[to - 1] + (letter != wanted)))
            if at > 1 and to > 1 and letter == other[to - 2] and one[at - 2] == wanted:
                row[to] = min(row[to], older[to - 2] + 1)
    return row[-1]
