"""The table: its regions, reads, changes and loads, and the types of its public methods."""
