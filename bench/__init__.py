"""Benchmarks: memwal beside Lance's own writer and readers, in turn, in one run. See README.md."""
