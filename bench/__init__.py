"""Benchmarks that compare memwal with Lance's own writer and readers, in turn, in one run. See README.md."""
