"""Another number of regions. Imports base, sst and commits."""
