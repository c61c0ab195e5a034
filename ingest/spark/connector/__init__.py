"""Spark's data source `memwal`: tables read and written by name, and their changes."""
