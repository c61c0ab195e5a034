"""`python -m tests.soak.command serve CONFIG`: memwal, for clocks that are at most `APART` seconds apart.

memwal keeps versions of the base table two hours longer than `gc.changes_age_min`, for clocks that are an hour apart,
and with them what they need: nothing of a run would be collected. The processes of a run have one clock.
"""

from __future__ import annotations

from unittest.mock import patch

from memwal.ingest.changes import base_versions
from memwal.ingest.cli.app import main
from memwal.ingest.table import maintenance

APART = 15.0

if __name__ == "__main__":
    with (
        patch.object(base_versions, "_APART", APART),
        patch.object(maintenance, "_CHANGES_MARGIN", 2 * APART),
    ):
        main()
