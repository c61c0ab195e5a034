"""Plan and evaluate filters, one JSON line of standard input each, with a limit on the memory of the process.

Usage: filter_runner.py [types|sizes|nesting]    the argument leaves out one check, as a planted fault.

Prints the number of allowed filters, and the first allowed one that DataFusion cannot parse.
"""

import json
import resource
import sys

import lance
import numpy as np
import pyarrow as pa

from memwal.memtable import InvalidRows
from memwal.memtable.filter import allowed
from memwal.memtable.filter.predicate import evaluate
from memwal.memtable.filter.translation import translate
from memwal.wal.panics import RustPanic, panics_as_errors

MEMORY = 3 << 30
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("l", pa.list_(pa.int64())),
        ("t", pa.timestamp("us")),
    ]
)
ROWS = pa.table([range(1_000), [0.5, None] * 500, ["some text"] * 1_000, [[1, 2]] * 1_000, range(1_000)], schema=SCHEMA)
PLANTED = {
    "types": {"type_problem": lambda *_, **__: ""},
    "sizes": {"size_problem": lambda *_, **__: "", "GROWING": frozenset()},
    "nesting": {"NESTING": 200},
}


def main() -> None:
    for name, value in PLANTED.get("".join(sys.argv[1:]), {}).items():
        setattr(allowed, name, value)
    dataset = lance.write_dataset(ROWS, "memory://")
    dataset.to_table(filter="id = 1")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    taken = 0
    for line in sys.stdin:
        filter = json.loads(line)
        try:
            sql = translate(filter, SCHEMA)
        except InvalidRows:
            continue
        taken += 1
        try:
            with panics_as_errors:
                evaluate(filter, sql, ROWS, np.arange(len(ROWS)), len(ROWS))
        except InvalidRows as error:
            if "SQL error" in str(error):
                sys.exit(f"allowed, but not parsed: {filter[:300]} ({error})")
        except RustPanic:
            pass
        try:
            with panics_as_errors:
                dataset.scanner(filter=filter).to_table()
        except (ValueError, OSError, RuntimeError, RustPanic):
            pass
    print(taken)


main()
