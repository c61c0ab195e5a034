"""Predicates: read, planned, and evaluated over the rows of a memtable."""
