"""Present regions as one table, and maintain it."""
