"""Spark's data source `memwal`: tables and their changes, read by name."""
