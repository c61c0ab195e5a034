"""Power cuts: record the file-system calls of a run, cut them off anywhere, and check the files that are left."""
