"""SSTs into the base table: the plan, the passes, other programs' writes. Imports base and sst."""
