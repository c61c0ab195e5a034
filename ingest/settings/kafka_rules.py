"""Rules of `[source]` for `format = "kafka"`. Each is a pure function of settings that yields problems."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pyarrow as pa

from memwal.ingest.settings.model import Settings
from memwal.ingest.settings.problems import Problem
from memwal.ingest.settings.process_sections import KAFKA, SourceSettings
from memwal.ingest.suggest import suggestion
from memwal.ingest.values.avro import check_schema
from memwal.ingest.values.spec import build
from memwal.ingest.values.type_names import parse_type

_ONLY = (
    *("brokers", "topics", "topic_pattern", "starting_offsets", "max_offsets_per_trigger", "fail_on_data_loss"),
    *("value_format", "avro_schema", "registry", "registry_options", "envelope", "delete_when", "columns", "fields"),
)
_FILES = ("path", "feed", "feed_every", "files_per_trigger")
_TAKEN: Mapping[str, str] = {
    "kafka.bootstrap.servers": "brokers",
    "kafka.auto.offset.reset": "starting_offsets",
    "assign": "topics",
    "subscribe": "topics",
    "subscribepattern": "topic_pattern",
    "startingoffsets": "starting_offsets",
    "maxoffsetspertrigger": "max_offsets_per_trigger",
    "failondataloss": "fail_on_data_loss",
}
_SPARKS = ("enable.auto.commit", "key.deserializer", "value.deserializer", "interceptor.classes")
_REGISTRY = ("username", "password", "token")
_BROKER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s,]+):[0-9]{1,5}")


def of_kafka(settings: Settings) -> Iterator[Problem]:
    """Check all Kafka settings that need no broker."""
    source = settings.source
    if source.format != KAFKA:
        yield from _misplaced(source, _ONLY, f'is for format = "kafka", not for {source.format!r}; remove it')
        return
    yield from _misplaced(source, _FILES, "is for file sources; remove it")
    yield from _of_place(source)
    yield from _of_options(source)
    yield from _of_offsets(source)
    yield from _of_values(source)
    if source.delete_when and settings.table.append_only:
        yield Problem(
            "source",
            "delete_when",
            "delete_when needs a key, and append_only = true means no key; remove one of the two",
        )
    if settings.table.columns:
        schema = settings.arrow_schema()
        needs = (("table", "columns"), *(("table", f"columns.{name}") for name in settings.table.columns))
        for problem in build(source, schema, settings.table.key)[1]:
            yield Problem("source", problem.key, problem.text, needs=needs)


def _misplaced(source: SourceSettings, names: tuple[str, ...], why: str) -> Iterator[Problem]:
    for name in names:
        if _is_set(source, name):
            yield Problem("source", name, f"{name} {why}")


def _is_set(source: SourceSettings, name: str) -> bool:
    """Return whether a setting differs from its default."""
    return bool(getattr(source, name) != SourceSettings.model_fields[name].default)


def _of_place(source: SourceSettings) -> Iterator[Problem]:
    brokers = [each.strip() for each in source.brokers.split(",")]
    if not source.brokers:
        yield Problem("source", "brokers", 'brokers is not set; list at least one, such as "localhost:9092"')
    for broker in brokers if source.brokers else ():
        if not _BROKER.fullmatch(broker):
            yield Problem("source", "brokers", f"brokers: {broker!r} is not of the form 'host:port'")
    if bool(source.topics) == bool(source.topic_pattern):
        text = "topics and topic_pattern are both set" if source.topics else "topics is not set"
        yield Problem("source", "topics", f'{text}; set one of them, such as topics = ["flights"]')
    for topic in source.topics:
        if not re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", topic):
            yield Problem("source", "topics", f"topics: {topic!r} is not a topic name; patterns: topic_pattern")
    try:
        re.compile(source.topic_pattern)
    except re.error as error:
        text = f"topic_pattern = {source.topic_pattern!r} is not a regular expression: {error}; correct it"
        yield Problem("source", "topic_pattern", text)


def _of_options(source: SourceSettings) -> Iterator[Problem]:
    for name in source.options:
        if name.lower() in _TAKEN:
            yield Problem("source", f"options.{name}", f"options.{name}: set {_TAKEN[name.lower()]} instead")
        if name.lower().removeprefix("kafka.") in _SPARKS:
            yield Problem("source", f"options.{name}", f"options.{name}: Spark's source sets it itself; remove it")


def _of_offsets(source: SourceSettings) -> Iterator[Problem]:
    text = source.starting_offsets
    if text in ("earliest", "latest"):
        return
    try:
        offsets = json.loads(text)
        for partitions in offsets.values():
            for number, offset in partitions.items():
                if int(number) < 0 or isinstance(offset, bool) or not isinstance(offset, int) or offset < -2:
                    raise ValueError
    except (ValueError, AttributeError):
        hint = 'write "earliest", "latest" or JSON such as {"flights": {"0": 17}}'
        yield Problem("source", "starting_offsets", f"starting_offsets = {text!r} is not valid; {hint}")


def _of_values(source: SourceSettings) -> Iterator[Problem]:
    avro = source.value_format == "avro"
    if avro and bool(source.avro_schema) == bool(source.registry):
        yield Problem("source", "value_format", 'value_format = "avro" needs one of avro_schema and registry; set it')
    for name in ("avro_schema", "registry", "registry_options"):
        if not avro and _is_set(source, name):
            text = f'{name} is for value_format = "avro", not for {source.value_format!r}; remove it'
            yield Problem("source", name, text)
    yield from _of_schemas(source)
    if source.value_format == "raw" and source.envelope != "none":
        yield Problem("source", "envelope", "envelope needs values with fields; set value_format to json or avro")
    for name, kind in source.fields.items():
        if pa.types.is_fixed_size_list(parse_type(kind)):
            yield Problem("source", f"fields.{name}", f"fields.{name}: SQL has no vector type; choose another type")


def _of_schemas(source: SourceSettings) -> Iterator[Problem]:
    if source.avro_schema:
        try:
            check_schema(source.avro_schema)
        except ValueError as error:
            yield Problem("source", "avro_schema", f"avro_schema {error}; correct it")
    if "@" in source.registry:  # not repeated: it may contain a password
        text = "registry has a user name or password in its URL; put them into registry_options"
        yield Problem("source", "registry", text)
    elif source.registry and not source.registry.startswith(("http://", "https://")):
        yield Problem("source", "registry", f"registry = {source.registry!r} must be an http:// or https:// URL")
    for name in source.registry_options:
        if name not in _REGISTRY:
            text = f"registry_options.{name} is not known{suggestion(name, _REGISTRY)}"
            yield Problem("source", f"registry_options.{name}", text)
