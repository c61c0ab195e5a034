"""Daemons on the executors of Spark."""
