"""Change the number of regions of a table. Imports base, sst and commits."""
