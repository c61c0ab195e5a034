"""SQL predicates: parsing, planning and evaluation over the rows of a memtable."""
