"""New fields of a source, and what happens to them."""
