"""The program around the storage engine: the daemon, the sink, the client, the commands."""
