"""Calls between memwal processes: discovery, authentication and messages."""
