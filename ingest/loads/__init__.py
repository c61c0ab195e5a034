"""Rows of files, checked for a load past the log. README.md has the modules and decisions."""
