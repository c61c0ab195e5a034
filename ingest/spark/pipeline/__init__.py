"""`memwal run`: pipelines from a source to a table."""
