"""`memwal sql CONFIG` without a query: read queries from the terminal, with history and completion.

A query ends with `;` or an empty line. The table stays open between two queries, so the second is answered without the
start of the first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from memwal.ingest.cli.command import Call, lines_of
from memwal.ingest.cli.open import Readable, open_for_reading
from memwal.ingest.cli.print import count
from memwal.ingest.errors import MemWalError, classify
from memwal.ingest.suggest import suggestion
from memwal.wal import SystemClock

_HELP = """SELECT …;   print rows of the table, which is called table in it
\\d          the columns
\\x          print each row as a block, or again as tables
\\q, Ctrl-D  leave; Ctrl-C discards what was typed"""
_COMMANDS = ("\\d", "\\x", "\\q", "\\?")
_WORDS = (
    *("select", "distinct", "from", "table", "where", "group by", "having", "order by", "limit", "offset", "with"),
    *("as", "join", "left join", "on", "union all", "and", "or", "not", "in", "is null", "like", "between"),
    *("asc", "desc", "case", "when", "then", "else", "end", "cast", "count", "sum", "avg", "min", "max"),
)
HISTORY = 1_000
"""Lines that the history file keeps."""
_Print = Callable[[Readable, str, bool], tuple[int, Sequence[str]]]


def shell(call: Call, print_query: _Print, *, vertical: bool) -> int:
    """Answer queries until the end of the input. `print_query`: prints the rows of a query, as `rows.print_query`."""
    table, console = open_for_reading(call), call.console
    console.note(f"{call.uri}: {count(len(table.schema.names), 'column')}; \\? for help")
    with _editing([*_WORDS, *table.schema.names, *_COMMANDS]):
        for text in _statements():
            if text == "\\q":
                break
            if text == "\\x":
                vertical = not vertical
                console.note(f"rows are printed {'vertically' if vertical else 'as tables'}")
            elif text == "\\d":
                wide = max(map(len, table.schema.names))
                for field in table.schema:
                    console.say(f"{field.name:{wide}}  {field.type}")
            elif text == "\\?":
                console.say(_HELP)
            elif text.startswith("\\"):
                print(f"memwal: the command {text} is unknown{suggestion(text, _COMMANDS, '{}')}", file=sys.stderr)
            else:
                _answer(call, table, text, print_query, vertical=vertical)
    return 0


def _answer(call: Call, table: Readable, query: str, print_query: _Print, *, vertical: bool) -> None:
    clock = SystemClock()
    began = clock.monotonic()
    try:
        rows, left_out = print_query(table, query, vertical)
    except KeyboardInterrupt:
        call.console.note("interrupted")
    except Exception as error:  # noqa: BLE001 - an error does not end the shell
        found = error if isinstance(error, MemWalError) else classify(error)
        for line in lines_of(found):
            print(f"memwal: {line}", file=sys.stderr)
    else:
        others = f"; not shown: {', '.join(left_out)} (\\x prints them)" if left_out else ""
        call.console.note(f"{count(rows, 'row')} in {1000 * (clock.monotonic() - began):,.0f} ms{others}")


def _statements() -> Iterator[str]:
    """Yield queries without their `;`, and commands, as they are typed."""
    typed: list[str] = []
    first, more = ("memwal> ", "  ...> ") if sys.stdin.isatty() else ("", "")
    while True:
        try:
            line = input(more if typed else first)
        except KeyboardInterrupt:
            print()
            typed = []
            continue
        except EOFError:
            if first:
                print()
            if typed:
                yield " ".join(typed)
            return
        if not typed and line.strip().startswith("\\"):
            yield line.strip()
            continue
        typed += [line] if line.strip() else []
        if typed and (not line.strip() or line.rstrip().endswith(";")):
            yield "\n".join(typed).rstrip().removesuffix(";")
            typed = []


@contextmanager
def _editing(words: Sequence[str]) -> Iterator[None]:
    """Complete `words` and keep a history, if this Python has readline and the input is a terminal."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    history = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "memwal" / "sql_history"
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(HISTORY)

    def complete(text: str, state: int) -> str | None:
        fitting = [word for word in words if word.lower().startswith(text.lower())]
        return fitting[state] if state < len(fitting) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n,()=<>'\"")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
