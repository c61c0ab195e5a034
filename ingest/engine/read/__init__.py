"""Answer merged reads over the base table, SSTs and memtables."""
