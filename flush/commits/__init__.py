"""Commits: move SSTs into the base table and check other programs' writes. Imports base and sst."""
