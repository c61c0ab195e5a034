"""Detect new fields in a source, and ignore them, reject them or add columns."""
