"""Processes around the table: the wire protocol, the client, the daemon, metrics and the page."""
