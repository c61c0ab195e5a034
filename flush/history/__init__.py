"""What each version of the base table changed. Imports base, commits and sst."""
