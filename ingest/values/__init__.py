"""Convert the values of records to columns of the table. Pure."""
