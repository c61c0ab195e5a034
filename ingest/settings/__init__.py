"""The configuration: model, loading, checks and reference."""
