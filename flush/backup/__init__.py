"""Copy a table at one moment, and restore a copy. Imports base, commits, resizing and verification."""
