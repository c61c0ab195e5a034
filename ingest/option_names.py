"""Names of options of Spark, its sources, Kafka and object storage, used to detect misspelt names and to print
values.

An option that is not listed as printable may hold a secret, so its value is not printed.
"""

from __future__ import annotations

FILE_OPTIONS = (
    *("maxFilesPerTrigger", "maxBytesPerTrigger", "latestFirst", "maxFileAge", "fileNameOnly", "cleanSource"),
    *("sourceArchiveDir", "pathGlobFilter", "recursiveFileLookup", "modifiedBefore", "modifiedAfter", "basePath"),
    *("ignoreCorruptFiles", "ignoreMissingFiles", "maxCachedFiles", "discardCachedInputRatio", "mergeSchema"),
    *("mode", "columnNameOfCorruptRecord", "dateFormat", "timestampFormat", "timestampNTZFormat", "timeZone"),
    *("encoding", "charset", "lineSep", "locale", "multiLine", "samplingRatio", "compression"),
    *("datetimeRebaseMode", "int96RebaseMode", "sep", "delimiter", "header", "quote", "escape", "comment", "nullValue"),
    *("emptyValue", "nanValue", "positiveInf", "negativeInf", "maxColumns", "maxCharsPerColumn", "inferSchema"),
    *("ignoreLeadingWhiteSpace", "ignoreTrailingWhiteSpace", "charToEscapeQuoteEscaping", "unescapedQuoteHandling"),
    *("enforceSchema", "preferDate", "enableDateTimeParsingFallback", "primitivesAsString", "prefersDecimal"),
    *("allowComments", "allowUnquotedFieldNames", "allowSingleQuotes", "allowNumericLeadingZeros", "wholetext"),
    *("allowBackslashEscapingAnyCharacter", "allowUnquotedControlChars", "allowNonNumericNumbers", "avroSchema"),
    *("dropFieldIfAllNull", "rowTag", "attributePrefix", "valueTag", "excludeAttribute", "ignoreSurroundingSpaces"),
    *("rowValidationXSDPath", "ignoreNamespace", "wildcardColName", "ignoreExtension"),
)
SPARK_CONF = (
    *("spark.master", "spark.app.name", "spark.log.level", "spark.jars", "spark.jars.packages", "spark.local.dir"),
    *("spark.jars.repositories", "spark.jars.ivy", "spark.jars.excludes", "spark.submit.deployMode", "spark.cores.max"),
    *("spark.driver.cores", "spark.driver.memory", "spark.driver.host", "spark.driver.port", "spark.ui.enabled"),
    *("spark.driver.bindAddress", "spark.driver.extraJavaOptions", "spark.driver.extraClassPath", "spark.ui.port"),
    *("spark.driver.maxResultSize", "spark.driver.memoryOverhead", "spark.executor.memoryOverhead"),
    *("spark.executor.cores", "spark.executor.memory", "spark.executor.instances", "spark.executor.extraJavaOptions"),
    *("spark.executor.extraClassPath", "spark.executor.pyspark.memory", "spark.default.parallelism", "spark.task.cpus"),
    *("spark.sql.shuffle.partitions", "spark.sql.session.timeZone", "spark.sql.extensions", "spark.serializer"),
    *("spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.files.maxPartitionBytes", "spark.python.worker.reuse"),
    *("spark.sql.warehouse.dir", "spark.sql.ansi.enabled", "spark.sql.adaptive.enabled", "spark.pyspark.python"),
    *("spark.dynamicAllocation.enabled", "spark.dynamicAllocation.minExecutors", "spark.network.timeout"),
    *("spark.dynamicAllocation.maxExecutors", "spark.dynamicAllocation.initialExecutors", "spark.memory.fraction"),
    *("spark.sql.streaming.stateStore.providerClass", "spark.sql.streaming.minBatchesToRetain", "spark.eventLog.dir"),
    *("spark.ui.showConsoleProgress", "spark.eventLog.enabled", "spark.blockManager.port", "spark.speculation"),
)
_OTHER_SPARK_CONF = (
    *("spark.hadoop.fs.s3a.endpoint", "spark.hadoop.fs.s3a.endpoint.region", "spark.hadoop.fs.s3a.path.style.access"),
    *("spark.hadoop.fs.s3a.connection.ssl.enabled", "spark.hadoop.fs.defaultFS", "spark.submit.pyFiles"),
    *("spark.archives", "spark.files", "spark.executorEnv.PYTHONPATH", "spark.kubernetes.namespace"),
    *("spark.kubernetes.container.image", "spark.yarn.queue", "spark.scheduler.mode", "spark.task.maxFailures"),
    *("spark.scheduler.minRegisteredResourcesRatio", "spark.scheduler.maxRegisteredResourcesWaitingTime"),
)
_SOURCE_OPTIONS = (
    *("startingOffsets", "endingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "endingTimestamp"),
    *("startingOffsetsByTimestampStrategy", "minPartitions", "maxRecordsPerPartition", "maxOffsetsPerTrigger"),
    *("minOffsetsPerTrigger", "maxTriggerDelay", "failOnDataLoss", "includeHeaders", "fetchOffset.numRetries"),
    *("fetchOffset.retryIntervalMs", "kafkaConsumer.pollTimeoutMs", "groupIdPrefix", "kafka.group.id"),
    *("kafka.client.id", "kafka.security.protocol", "kafka.sasl.mechanism", "kafka.isolation.level"),
    *("kafka.max.poll.records", "kafka.fetch.max.wait.ms", "kafka.fetch.max.bytes", "kafka.request.timeout.ms"),
    *("kafka.max.partition.fetch.bytes", "kafka.default.api.timeout.ms", "kafka.metadata.max.age.ms"),
    *("kafka.ssl.truststore.type", "kafka.ssl.truststore.location", "kafka.ssl.keystore.type"),
    *("kafka.ssl.keystore.location", "kafka.ssl.endpoint.identification.algorithm", "rowsPerSecond"),
    *("numPartitions", "host", "port", "path", "maxVersionsPerTrigger", "ignoreDeletes", "ignoreChanges"),
)
_STORAGE_OPTIONS = (
    *("region", "default_region", "endpoint", "endpoint_url", "endpoint_url_s3", "bucket", "bucket_name"),
    *("allow_http", "allow_invalid_certificates", "virtual_hosted_style_request", "skip_signature", "request_payer"),
    *("conditional_put", "server_side_encryption", "sse_bucket_key_enabled", "connect_timeout", "timeout"),
    *("request_timeout", "read_timeout", "pool_idle_timeout", "pool_max_idle_per_host", "checksum_algorithm"),
    *("client_max_retries", "client_retry_timeout", "copy_if_not_exists", "default_content_type", "user_agent"),
    *("disable_bulk_delete", "disable_tagging", "download_retry_count", "http1_only", "randomize_addresses"),
    *("unsigned_payload", "username"),
)
_JAVA_OPTIONS = "javaoptions"
PRINTABLE = frozenset(
    name.lower()
    for name in (*FILE_OPTIONS, *SPARK_CONF, *_OTHER_SPARK_CONF, *_SOURCE_OPTIONS, *_STORAGE_OPTIONS)
    if not name.lower().endswith(_JAVA_OPTIONS)
)
"""Options whose values hold no secret, in lower case; of object storage without the prefix `aws_`. Java options are
excluded because they may contain passwords."""
