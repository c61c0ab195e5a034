"""The configuration: its model, its loading, its checks and its reference."""
