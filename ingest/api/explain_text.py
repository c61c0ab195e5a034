"""An explanation as text: one table of levels for each process that answered."""
from __future__ import annotations
def as_text(told): return told.to_json(1)
