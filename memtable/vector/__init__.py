"""Vector search: columns, the IVF-PQ index and its model."""
