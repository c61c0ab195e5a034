"""Misspelt names of formats, options and Spark settings.

Spark ignores an option that it does not know, without a message, since it may belong to a plugin. So a name counts as
misspelt if it is not one of Spark's and differs from one of them by one or two characters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from memwal.ingest.errors import Invalid
from memwal.ingest.settings.load import SourceSettings

FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")
FORMATS = (*FILE_FORMATS, "kafka", "delta", "iceberg", "hudi", "rate", "socket")
_FILES = (
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
_CONF = (
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


def check_spark_names(source: SourceSettings) -> None:
    """Raise Invalid with every misspelt name in `source`, one line each."""
    found = list(misspelt(source))
    if found:
        raise Invalid.of(found)


def misspelt(source: SourceSettings) -> Iterator[str]:
    """Yield a message for each misspelt name in a source's format, options and Spark configuration."""
    if meant := _meant(source.format, FORMATS):
        yield f"source.format: Spark has no source {source.format!r}; did you mean {meant!r}?"
    for name in source.options if source.format in FILE_FORMATS else ():
        if meant := _meant(name, _FILES):
            yield f"[source] options.{name}: Spark would ignore it; did you mean {meant!r}?"
    for name in source.spark:
        if not name.startswith("spark."):
            yield f"[source.spark] {name}: names of Spark's configuration begin with 'spark.', and need quotes"
        elif meant := _meant(name, _CONF):
            yield f"[source.spark] {name}: Spark would ignore it; did you mean {meant!r}?"


def _meant(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` misspells; None if it is a known name, in any case, or not similar to one."""
    given = name.lower()
    if given in (each.lower() for each in known):
        return None
    most = 1 if len(name) < 8 else 2 if "." not in name else 1
    return next((each for each in known if _distance(given, each.lower(), most) <= most), None)


def _distance(one: str, other: str, most: int) -> int:
    """Return the number of characters left out, added, changed or swapped with their neighbour (Damerau, "optimal
    string alignment"); any number above `most` if there are more.
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    before, row = list[int](), list(range(len(other) + 1))
    for at, letter in enumerate(one, 1):
        older, before, row = before, row, [at]
        for to, wanted in enumerate(other, 1):
            row.append(min(row[-1] + 1, before[to] + 1, before[to - 1] + (letter != wanted)))
            if at > 1 and to > 1 and letter == other[to - 2] and one[at - 2] == wanted:
                row[to] = min(row[to], older[to - 2] + 1)
    return row[-1]
