"""One version of the base table: opened, created or adopted, with its set-up and its routing."""
