"""Spark's data source `memwal`: tables read by name."""
