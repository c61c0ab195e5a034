"""Define the arguments and results of public methods: rows, keys, tokens, receipts, reads."""
