"""Dead letters: rows that cannot be used, stored with the reason, and replayed."""
