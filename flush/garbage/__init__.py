"""Deletes what nothing needs any more: SSTs, plans, files of the base. Imports base, sst and commits."""
