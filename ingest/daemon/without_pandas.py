"""Start a daemon without importing pandas, which it does not need.

pyarrow imports pandas (a quarter of a second, a fifth of a daemon's start) when it makes its first array, to recognise
pandas' values, and remembers if the import fails. A daemon gets its rows over Flight.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class _Absent(MetaPathFinder):
    """An import finder that reports pandas as not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a daemon has no pandas", name=fullname)


def leave_pandas_out() -> None:
    """Make pyarrow work without pandas in this process; does nothing if pandas is imported already.

    Call it before any other import of memwal. `import pandas` still works afterwards, conversions between Arrow and
    pandas do not.
    """
    if "pandas" in sys.modules:
        return
    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        import pyarrow as pa

        pa.array([])
    finally:
        sys.meta_path.remove(absent)
