"""The whole of memwal in one thread, with everything that can go wrong, decided by one seed. See README.md."""

from __future__ import annotations

import os

# Each core runs seeds of its own. Read when the libraries are loaded; a third of a run's processor time is saved.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LANCE_CPU_THREADS", "1")
