"""Implement the single writer of one region."""
