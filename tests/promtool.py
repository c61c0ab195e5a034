"""Build and run promtool, Prometheus' own checker of alert rules, which also runs their unit tests.

`python -m tests.promtool` (`make promtool`) builds it once per machine; see `tests.go_program`. It is built without
service discovery, which rules do not need and which includes the clients of every cloud.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.go_program import GoProgram

PROMTOOL = GoProgram(
    title="promtool",
    target="promtool",
    module="github.com/prometheus/prometheus",
    package="github.com/prometheus/prometheus/cmd/promtool",
    version="v0.315.1",
    checksum="h1:ZXaNKyUO5szJhhw7gKiP6b2jpx1QkS0S3CI1R1bPqIA=",
    minutes=2,
    tags="remove_all_sd",
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool. Raises: RuntimeError if it is not built."""
    if not PROMTOOL.path.exists():
        raise RuntimeError(f"{PROMTOOL.path} is not built; run `make promtool`")
    return subprocess.run([PROMTOOL.path, *arguments], capture_output=True, text=True, timeout=300)


if __name__ == "__main__":
    PROMTOOL.build()
