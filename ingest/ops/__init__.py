"""What operators see: metrics, health, logs."""
