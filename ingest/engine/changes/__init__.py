"""Read the change feed: inserts, updates and deletes in order, from the log. README.md has the protocol."""
