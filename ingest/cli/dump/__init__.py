"""`memwal inspect`: a file of the table in words."""
