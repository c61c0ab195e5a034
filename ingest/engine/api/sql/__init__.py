"""Run SQL over tables, by DataFusion in the caller's process. Imported by the first query only."""
