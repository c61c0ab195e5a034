"""One version of the base table: opened, created, adopted, its set-up and its routing."""
