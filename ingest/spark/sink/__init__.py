"""The foreachBatch sink: writes micro-batches into regions, each exactly once."""
