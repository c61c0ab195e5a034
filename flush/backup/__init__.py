"""Copies a table at one moment, and restores such a copy. Imports base and commits, and verification."""
