"""Convert DataFusion's errors about a query to one line for its author.

DataFusion raises one type for everything. A query that cannot be planned or run is Invalid; this module only makes the
texts readable, and unrecognised texts stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from memwal.ingest.engine.api.sql.statement import Statement
from memwal.ingest.errors import Invalid, MemWalError, classify
from memwal.ingest.suggest import suggestion

_LEAD = re.compile(
    r"^((DataFusion|External|Schema|Execution|Internal|Arrow|SQL) error: |Error during planning: "
    r"|This feature is not implemented: |Optimizer rule '\w+' failed:? ?|type_coercion$|caused by$)+"
)
_HIDDEN = re.compile(r"\bmemwal_\d+\.")
_PLACE = re.compile(r" at Line: (\d+), Column: (\d+)")
_FIELDS = re.compile(r"Valid fields are (.*?)\.?$", re.MULTILINE)
_FIELD = re.compile(r'(?:"((?:[^"]|"")+)"|(\w+))(?=,|$)')
_SHOWN, _LONGEST = 300, 1000
"""Characters of DataFusion's message, and of the resulting message: both may hold a whole query."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A query, and the names that it may use. `memory`: bytes that it may hold."""

    statement: Statement
    tables: Collection[str]
    columns: Collection[str]
    memory: int

    def problem(self, error: BaseException) -> MemWalError:
        """Return the caller's error for an error of DataFusion."""
        text = _HIDDEN.sub("", str(error))
        if isinstance(error, MemWalError) or "os error" in text:
            return classify(error)
        for pattern, form in _MESSAGES.items():
            if match := re.search(pattern, text):
                message = form.format(*match.groups()) if isinstance(form, str) else form(self, match)
                return Invalid(f"sql: {message:.{_LONGEST}}")
        lines = (_LEAD.sub("", line.strip()) for line in text.splitlines())
        return Invalid(f"sql: {next((line for line in lines if line), type(error).__name__)[:_SHOWN].rstrip('.')}")


# ---- kinds of problems ---------------------------------------------------------------------------------------------


def _syntax(asked: Asked, match: re.Match[str]) -> str:
    said = match[1].replace('\\"', '"').replace("Expected: ", "expected ")
    said = said.replace(", found: EOF", ", found the end").replace(", found: ", ", found ")
    return _PLACE.sub(
        lambda place: f" at line {place[1]}, column {asked.statement.typed(int(place[1]), int(place[2]))}", said
    )


def _no_field(asked: Asked, match: re.Match[str]) -> str:
    qualifier, _, name = (part.strip('"') for part in match[1].rpartition("."))
    listed = _FIELDS.search(match.string)
    known = [a or b for a, b in _FIELD.findall(listed[1])] if listed else list(asked.columns)
    if name in known:
        return f"column '{qualifier:.60}.{name}' does not exist; column '{name}' is not in a table '{qualifier:.60}'"
    other_case = next((each for each in known if each.lower() == name.lower()), None)
    hint = suggestion(name, dict.fromkeys(known)) if other_case is None else f"; did you mean '{other_case}'?"
    return f"column '{name:.200}' does not exist{hint}"


def _memory(asked: Asked, _: re.Match[str]) -> str:
    return (
        f"the query needs more than {asked.memory >> 20} MiB of memory at once; sorts and groups use files, but the "
        "smaller side of a join must fit: select fewer rows or columns"
    )


_READS = "{} is refused: sql only reads; put and delete change a table"
_MESSAGES: Mapping[str, str | Callable[[Asked, re.Match[str]], str]] = {
    r'(?s:ParserError\("(.*?)"\))': _syntax,
    r"No field named (.+?)\.(?=\s|$)": _no_field,
    r"table '(?:datafusion\.public\.)?(.+?)' not found": lambda asked, match: (
        f"table '{match[1]:.200}' does not exist{suggestion(match[1], asked.tables)}"
    ),
    r"(?:(?:DDL|DML|Statement) not supported|Unsupported SQL statement): (\w+)": _READS,
    r"Placeholder '\$?(.+?)' was not provided a value": "${0} has no value; give one in parameters={{{0!r}: …}}",
    r"No function matches the given name and argument types '(.+?)'\.": "no function takes {}; cast the arguments",
    r'column "(.+?)" must appear in the GROUP BY': "column {} must be in GROUP BY or in an aggregate function",
    "only supports a single SQL statement": "the query has several statements; give one",
    "Resources exhausted": _memory,
}
"""Patterns of DataFusion's messages, and their replacements, which use the groups of the match."""
