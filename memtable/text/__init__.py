"""Full text: the analysis, the index, the queries."""
