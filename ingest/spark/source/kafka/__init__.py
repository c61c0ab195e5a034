"""Kafka topics as rows."""
