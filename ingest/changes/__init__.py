"""The change feed: inserts, updates and deletes in order, read from the log. README.md has the protocol."""
