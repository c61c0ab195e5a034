"""Simulate the whole of memwal in one thread, with every kind of fault, decided by one seed. See README.md."""

from __future__ import annotations

import os

# Each core runs its own seeds. The libraries read these variables when they are loaded; this saves a third of a run's
# processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LANCE_CPU_THREADS", "1")
