"""Small measurements, each behind one decision; run by hand, not by `python -m bench`."""
