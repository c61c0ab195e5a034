"""Entries of the log as bytes: the port, and its two formats. Imports no other room."""
