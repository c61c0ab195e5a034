"""What DataFusion says is wrong with a query, as one line for the one who wrote it.

DataFusion raises one type for everything. A query that cannot be planned or run is Invalid; the texts are only made
readable here, and what is not recognised stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from memwal.ingest.api.sql.statement import Statement
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
"""Characters of what DataFusion says, and of what is made of it: both may hold a whole query."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A query, and what it may name. `memory`: bytes that it may hold."""

    statement: Statement
    tables: Collection[str]
    columns: Collection[str]
    memory: int

    def problem(self, error: BaseException) -> MemWalError:
        """Return what an error of DataFusion means."""
        text = _HIDDEN.sub("", str(error))
        if isinstance(error, MemWalError) or "os error" in text:
            return classify(error)
        for pattern, told in _TOLD:
            found = pattern.search(text)
            if found is not None:
                return Invalid(f"sql: {told(self, found, text):.{_LONGEST}}")
        lines = (_LEAD.sub("", line.strip()) for line in text.splitlines())
        return Invalid(f"sql: {next((line for line in lines if line), type(error).__name__)[:_SHOWN].rstrip('.')}")


# ---- kinds of problems ---------------------------------------------------------------------------------------------


def _syntax(asked: Asked, found: re.Match[str], _: str) -> str:
    said, place = found[1].replace('\\"', '"'), _PLACE.search(found[1])
    said = _PLACE.sub("", said).replace("Expected: ", "expected ").replace(", found: EOF", ", found the end")
    said = said.replace(", found: ", ", found ")
    if place is None:
        return said
    line = int(place[1])
    return f"{said} at line {line}, column {asked.statement.typed(line, int(place[2]))}"


def _no_field(asked: Asked, found: re.Match[str], text: str) -> str:
    qualifier, _, name = (part.strip('"') for part in found[1].rpartition("."))
    listed = _FIELDS.search(text)
    known = [a or b for a, b in _FIELD.findall(listed[1])] if listed else list(asked.columns)
    if name in known:
        return f"column '{qualifier:.60}.{name}' does not exist; column '{name}' is not in a table '{qualifier:.60}'"
    other_case = next((each for each in known if each.lower() == name.lower()), None)
    hint = suggestion(name, dict.fromkeys(known)) if other_case is None else f"; did you mean '{other_case}'?"
    return f"column '{name:.200}' does not exist{hint}"


def _no_table(asked: Asked, found: re.Match[str], _: str) -> str:
    return f"table '{found[1]:.200}' does not exist{suggestion(found[1], asked.tables)}"


def _not_reading(_: Asked, found: re.Match[str], __: str) -> str:
    return f"{found[1]} is refused: sql only reads; put and delete change a table"


def _no_value(_: Asked, found: re.Match[str], __: str) -> str:
    return f"${found[1]} has no value; give one in parameters={{{found[1]!r}: …}}"


def _no_function(_: Asked, found: re.Match[str], __: str) -> str:
    return f"no function takes these types: {found[1]}; cast the arguments"


def _ungrouped(_: Asked, found: re.Match[str], __: str) -> str:
    return f"column {found[1]} must be in GROUP BY or in an aggregate function"


def _several(*_: object) -> str:
    return "the query has several statements; give one"


def _memory(asked: Asked, *_: object) -> str:
    return (
        f"the query needs more than {asked.memory >> 20} MiB of memory at once; sorts and groups use files, but the "
        "smaller side of a join must fit: select fewer rows or columns"
    )


_TOLD: Sequence[tuple[re.Pattern[str], Callable[[Asked, re.Match[str], str], str]]] = (
    (re.compile(r'ParserError\("(.*?)"\)', re.DOTALL), _syntax),
    (re.compile(r"No field named (.+?)\.(?=\s|$)"), _no_field),
    (re.compile(r"table '(?:datafusion\.public\.)?(.+?)' not found"), _no_table),
    (re.compile(r"(?:(?:DDL|DML|Statement) not supported|Unsupported SQL statement): (\w+)"), _not_reading),
    (re.compile(r"Placeholder '\$?(.+?)' was not provided a value"), _no_value),
    (re.compile(r"No function matches the given name and argument types '(.+?)'\."), _no_function),
    (re.compile(r'column "(.+?)" must appear in the GROUP BY'), _ungrouped),
    (re.compile("only supports a single SQL statement"), _several),
    (re.compile("Resources exhausted"), _memory),
)
