"""The single writer of one region."""
