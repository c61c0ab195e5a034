"""Full-text search: analysis, index, queries."""
