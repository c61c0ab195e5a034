"""Sources of rows: files, Kafka, and everything else that Spark reads."""
