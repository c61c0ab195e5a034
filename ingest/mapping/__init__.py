"""Values of records to columns of the table. Pure."""
