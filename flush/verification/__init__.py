"""Checks that storage is as the protocols promise. Imports base, sst, commits and history."""
