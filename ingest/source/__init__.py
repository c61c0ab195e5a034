"""Where rows come from: files, Kafka, anything that Spark reads."""
