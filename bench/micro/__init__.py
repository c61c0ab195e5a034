"""Small measurements behind one decision each; run by hand, not part of `python -m bench`."""
