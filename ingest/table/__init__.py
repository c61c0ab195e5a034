"""Regions as one table, and its upkeep."""
