"""Vectors: their columns, the IVF-PQ index and its model."""
