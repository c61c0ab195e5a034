"""The foreachBatch sink: micro-batches into regions, each exactly once."""
