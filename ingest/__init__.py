"""From a source to a table that is queried while it is written: the daemon, the sink, the client, the commands."""
