"""`memwal run`: from a source to the table until it is ended."""
