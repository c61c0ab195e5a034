"""What callers hand over and get back: rows, keys, tokens, receipts, arguments, reads."""
