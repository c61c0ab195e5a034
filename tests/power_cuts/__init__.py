"""Power cuts: the calls to the file system of a run are recorded, cut short anywhere, and what is left is checked."""
