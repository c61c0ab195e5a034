"""Dead letters: rows that cannot be used, kept with the reason, replayed."""
