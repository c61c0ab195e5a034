"""Memtables to SSTs: their files, indexes and side files, and the publication of each. Imports base."""
