"""Checks that storage satisfies the protocols. Imports base, sst, commits, resizing and history."""
