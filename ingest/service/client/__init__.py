"""The methods of a table, executed by its daemons."""
