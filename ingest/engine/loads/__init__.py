"""Check rows of files for a load past the log. README.md has the modules and decisions."""
