"""The Spark session, its errors and its types."""
