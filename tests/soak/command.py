"""Run memwal for clocks that are at most `APART` seconds apart: `python -m tests.soak.command serve CONFIG`.

memwal allows for clocks that are an hour apart, so it keeps versions of the base table, and the objects that they need,
two hours longer than `gc.changes_age_min`: nothing would be collected during a run. The processes of a run share one
clock.
"""

from __future__ import annotations

from unittest.mock import patch

from memwal.ingest.cli.app import main
from memwal.ingest.engine.changes import start
from memwal.ingest.engine.table import maintenance

APART = 15.0

if __name__ == "__main__":
    with (
        patch.object(start, "_APART", APART),
        patch.object(maintenance, "_CHANGES_MARGIN", 2 * APART),
    ):
        main()
