"""A daemon without pandas, which it has no use for.

pyarrow imports pandas (a quarter of a second, a fifth of a daemon's start) when it makes its first array, to be able to
tell pandas' values from others, and remembers where there is none. A daemon gets its rows over Flight.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class _Absent(MetaPathFinder):
    """Says that pandas is not installed."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a daemon has no pandas", name=fullname)


def leave_pandas_out() -> None:
    """Let pyarrow find no pandas in this process; does nothing once somebody has imported it.

    To be called before anything else of ours is imported. `import pandas` works all the same after it; what does not
    work is the way between Arrow and pandas.
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
