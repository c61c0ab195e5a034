"""Is everything on storage as the protocols promise? Imports base, sst, commits and history."""
