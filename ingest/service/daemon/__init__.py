"""`memwal serve`: the process that owns regions."""
