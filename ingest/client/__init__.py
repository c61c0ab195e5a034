"""The methods of a table through its daemons."""
