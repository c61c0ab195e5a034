"""Observability for operators: metrics, health, logs, and a page."""
