"""Run `memwal` with shorter pauses between its looks at storage: `watchful.py serve CONFIG`.

A daemon without callers otherwise detects a fence after up to 10 s, a resize after up to 5 s, and acts a second later.
"""

from __future__ import annotations

from memwal.ingest.cli.app import main
from memwal.ingest.engine.table import resize
from memwal.ingest.service.daemon import claim_again, serve

claim_again.LOOK_EVERY = resize.LOOK_EVERY = 0.2
serve.LOOK_EVERY = 0.1
main()
