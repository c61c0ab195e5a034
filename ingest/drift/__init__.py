"""New fields of a source, and what becomes of them."""
