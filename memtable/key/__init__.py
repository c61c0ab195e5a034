"""The newest row of each key."""
