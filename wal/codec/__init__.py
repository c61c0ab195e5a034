"""Encode entries of the log: the port, and its two formats. Imports no other room."""
