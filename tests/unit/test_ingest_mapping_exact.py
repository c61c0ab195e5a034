"""A record becomes exactly its values or a reason, alone and beside any other record."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from memwal.ingest.engine.api.keys import normalise_keys
from memwal.ingest.engine.loads.files import find_files
from memwal.ingest.engine.loads.formats import tables
from memwal.ingest.errors import Invalid
from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.dlq.sources import rows_of_json
from memwal.ingest.spark.source.columns import PROBLEM
from memwal.ingest.spark.source.kafka.rows import column_name, mapped, record_mapping
from memwal.ingest.values import json_columns
from memwal.ingest.values.documents import of_json
from memwal.ingest.values.json_parts import Written
from memwal.ingest.values.values import ANY_TEXT, MARK_ANY, column, rounds, typed
from tests.kafka_records import batch_of
from tests.kafka_server import Record
from tests.messages import raises

NEIGHBOURS = {
    "alone": [],
    "beside a value that does not fit": [Record(b'{"id": "x"}', key=b'{"id": "x"}')],
    "beside no JSON": [Record(b"{", key=b"{")],
}


def found_of(kind: pa.DataType, record: Record | str, neighbours: list[Record], **source: Any) -> tuple[pa.Array, str]:
    """Map a record with the columns id and v of type `kind`; return an array with v, and the problem or ''."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", kind)])
    settings = SourceSettings(format="kafka", brokers="127.0.0.1:9092", topics=["t"], **source)
    first = Record(record.encode()) if isinstance(record, str) else record
    rows = mapped(batch_of([first, *neighbours]), record_mapping(settings, schema, ("id",))).slice(0, 1)
    return rows[column_name(1)], rows[PROBLEM][0].as_py() or ""


def said(literal: str) -> str:
    return f'{{"id": 1, "v": {literal}}}'


FAR: dict[str, tuple[pa.DataType, str, Any]] = {
    "a day before year 1": (pa.date32(), "-800000", -800_000),
    "year 0": (pa.date32(), '"0000-01-01"', -719_528),
    "a time in year 0": (pa.timestamp("us"), '"0000-12-31T00:00:00"', -62_135_683_200_000_000),
    "before year 1 in UTC": (pa.timestamp("us", "UTC"), '"0001-01-01T00:00:00+14:00"', -62_135_647_200_000_000),
    "after year 9999 in UTC": (pa.timestamp("us", "UTC"), '"9999-12-31T23:59:59-14:00"', 253_402_351_199_000_000),
    "infinite": (pa.decimal128(10, 2), '"inf"', "'inf' is not a valid decimal128(10, 2)"),
    "not a number": (pa.decimal128(10, 2), '"NaN"', "'NaN' is not a valid decimal128(10, 2)"),
    "beyond any float": (pa.decimal128(10, 2), "1e400", "is not a valid decimal128(10, 2)"),
    "in groups": (pa.decimal128(10, 2), '"1_000"', "'1_000' is not a valid decimal128(10, 2)"),
    "with a huge exponent": (pa.decimal128(10, 2), '"1e999999999"', "is not a valid decimal128(10, 2)"),
}


def test_an_error_of_a_library_is_a_reason_too() -> None:
    def broken(*_: Any) -> Any:
        raise TypeError("'str' object cannot be interpreted as an integer")

    _, problems = column([1], pa.int64(), "", broken)
    assert problems == {0: "'str' object cannot be interpreted as an integer"}


# ---- decimals ------------------------------------------------------------------------------------------------------

DIGITS = ("12345678901234567.89", "1.123456789012345678", "-0.000000000000000001", "1.5E+3", "7")


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("literal", DIGITS)
def test_a_json_number_in_a_decimal_column_keeps_its_digits(literal: str, neighbours: list[Record]) -> None:
    kind = pa.decimal128(38, 18)
    values, problem = found_of(kind, said(literal), neighbours)
    assert (problem, values.to_pylist()) == ("", [Decimal(literal)])
    values, problem = found_of(pa.list_(kind), said(f"[{literal}]"), neighbours)
    assert (problem, values.to_pylist()) == ("", [[Decimal(literal)]])
    _, problem = found_of(pa.decimal128(38, 2), said("1.005"), neighbours)
    assert "not a number with that precision and scale" in problem


def test_a_replayed_line_and_a_load_keep_the_digits_too(tmp_path: Path) -> None:
    schema = pa.schema([("v", pa.decimal128(38, 18))])
    raw = b'{"v": 1.123456789012345678}'
    wanted = [{"v": Decimal("1.123456789012345678")}]
    assert rows_of_json(pa.table({"raw_value": pa.array([raw])}), schema).rows.to_pylist() == wanted
    file = tmp_path / "rows.ndjson"
    file.write_bytes(raw)
    (found,) = tables(*find_files([str(file)], None, {}), schema)
    assert found.to_pylist() == wanted


# ---- nested --------------------------------------------------------------------------------------------------------

STRUCT, LIST = pa.struct, pa.list_
NESTED: dict[str, tuple[pa.DataType, str, Any]] = {
    "bytes in a list": (LIST(pa.binary()), '["aGVsbG8="]', [b"hello"]),
    "no base64 in a list": (LIST(pa.binary()), '["!!"]', "'!!' is not a valid binary"),
    "bytes in a struct": (STRUCT([("a", pa.binary())]), '{"a": "aGVsbG8="}', {"a": b"hello"}),
    "a float32 in a struct": (STRUCT([("a", pa.float32())]), '{"a": 1e39}', "a: 1e+39 is not a valid float32"),
    "an unknown field": (STRUCT([("a", pa.int64())]), '{"a": 1, "b": 2}', "has a field 'b' that the column lacks"),
    "an offset": (STRUCT([("a", pa.timestamp("us"))]), '{"a": "2020-01-02T03:04:05+02:00"}', "without an offset"),
    "an offset in a list": (LIST(pa.timestamp("us")), '["2020-01-02T03:04:05+02:00"]', "without an offset"),
    "a number in a list in a struct": (STRUCT([("a", LIST(pa.float32()))]), '{"a": [1e39]}', "is not a valid float32"),
    "a struct in a list": (LIST(STRUCT([("a", pa.int64())])), '[{"a": 1, "b": 2}]', "has a field 'b'"),
    "lists in a list": (LIST(LIST(pa.float32(), 2)), "[[1, 2], [1]]", "has 1 numbers, vectors of the column have 2"),
    "beyond float16": (LIST(pa.float16()), "[70000.5]", "70000.5 is not a valid float16"),
    "beyond float16 in a vector": (LIST(pa.float16(), 1), "[70000.5]", "70000.5 is not a valid float16"),
}


# ---- what is not read ----------------------------------------------------------------------------------------------

VECTORS = {
    "whole numbers": (pa.int32(), "[1, 2]", [1, 2]),
    "a fraction": (pa.int32(), "[1, 2.7]", "2.7 is not a valid int32"),
    "out of range": (pa.int8(), "[1, 300]", "300 is not a valid int8 (out of range)"),
    "beyond doubles": (pa.int64(), "[1, 9007199254740993]", [1, 9007199254740993]),
    "truths": (pa.bool_(), "[true, false]", [True, False]),
    "no truth": (pa.bool_(), "[true, 1]", "1 is not a valid bool"),
    "decimals": (pa.decimal128(10, 2), "[1.25, 2]", [Decimal("1.25"), Decimal("2.00")]),
    "texts": (pa.string(), '["a", "b"]', ["a", "b"]),
    "a number among texts": (pa.string(), '["a", 1]', "1 is not a valid string"),
    "times": (pa.timestamp("us"), '["2026-01-02T03:04:05", 2]', "2 is not a valid timestamp[us]"),
    "a null": (pa.int32(), "[1, null]", "None is not a valid int32"),
    "too many": (pa.int32(), "[1, 2, 3]", "has 3 numbers, vectors of the column have 2"),
}


CASES: dict[str, tuple[pa.DataType, str, Any]] = FAR | NESTED
CASES |= {f"{name} in a vector": (pa.list_(kind, 2), *others) for name, (kind, *others) in VECTORS.items()}


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("case", CASES)
def test_a_value_is_taken_exactly_or_refused_with_the_reason(case: str, neighbours: list[Record]) -> None:
    kind, literal, wanted = CASES[case]
    columns = {"v": {"from": "value.v", "unit": "d"}} if literal == "-800000" else {}
    values, problem = found_of(kind, said(literal), neighbours, columns=columns)
    if isinstance(wanted, str):
        assert wanted in problem
        assert values.null_count == 1
        return
    if pa.types.is_temporal(kind):  # beyond what Python holds
        values = values.cast(pa.int32() if pa.types.is_date(kind) else pa.int64())
    assert (problem, values.to_pylist()) == ("", [wanted])


UNREADABLE = [pa.time32("ms"), pa.time64("us"), pa.duration("s"), pa.binary(4), pa.uuid(), pa.bool8(), pa.date64()]


@pytest.mark.parametrize("kind", UNREADABLE, ids=str)
def test_a_column_that_no_json_fills_is_null_where_it_is_missing(tmp_path: Path, kind: pa.DataType) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", kind)])
    (tmp_path / "a.ndjson").write_text('{"id": 1}\n{"id": 2, "v": null}\n')
    (rows,) = tables(find_files([str(tmp_path / "a.ndjson")], None, {})[0], schema)
    assert (rows["id"].to_pylist(), rows["v"].null_count) == ([1, 2], 2)
    (tmp_path / "b.ndjson").write_text('{"id": 1}\n{"id": 2, "v": "12:00:00"}\n')
    with raises(Invalid):
        list(tables(find_files([str(tmp_path / "b.ndjson")], None, {})[0], schema))


@pytest.mark.parametrize(
    ("literal", "wanted"),
    [
        ("0.12345678901234567890", "0.12345678901234567890"),
        ('{"a": [1.50, 1e400], "b": "x"}', '{"a":[1.50,1e400],"b":"x"}'),
        ('{"\\ud800": 1.0}', '{"\\ud800":1.0}'),
        ('["\u00e4", true, null, 12345678901234567890]', '["\u00e4",true,null,12345678901234567890]'),
    ],
)
def test_a_text_that_takes_every_value_keeps_the_digits(literal: str, wanted: str) -> None:
    """Test both a column that schema drift has added and a text column of JSON files."""
    value = of_json(literal.encode(), Written)
    assert typed(value, pa.string(), ANY_TEXT) == wanted
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
    letters = pa.table({"raw_value": pa.array([said(literal).encode()], pa.binary())})
    assert rows_of_json(letters, schema).rows["v"].to_pylist() == [wanted]
    drifted = schema.set(1, schema.field(1).with_metadata(dict([MARK_ANY])))
    settings = SourceSettings(format="kafka", brokers="127.0.0.1:9092", topics=["t"])
    rows = mapped(batch_of([Record(said(literal).encode())]), record_mapping(settings, drifted, ("id",)))
    assert rows[column_name(1)].to_pylist() == [wanted]


@pytest.mark.parametrize("levels", [150, 168, 300, 425])
@pytest.mark.parametrize(
    ("opening", "closing"), [('{"a":{"b":', "}}"), ("[[", "]]"), ('[1e400,{"a":[],"b":', ',"c":{}}]')]
)
def test_a_text_that_takes_every_value_takes_json_of_every_depth_that_is_parsed(
    opening: str, closing: str, levels: int
) -> None:
    """Up to 850 nested containers: the parser accepts 995, minus the depth of the calls around it."""
    literal = opening * levels + "1.50" + closing * levels
    letters = pa.table({"raw_value": pa.array([said(literal).encode()], pa.binary())})
    assert rows_of_json(letters, pa.schema([("v", pa.string())])).rows["v"].to_pylist() == [literal]
    drifted = pa.field("v", pa.string(), metadata=dict([MARK_ANY]))
    settings = SourceSettings(format="kafka", brokers="127.0.0.1:9092", topics=["t"])
    mapping = record_mapping(settings, pa.schema([pa.field("id", pa.int64(), nullable=False), drifted]), ("id",))
    rows = mapped(batch_of([Record(said(literal).encode())]), mapping)
    assert (rows[PROBLEM].to_pylist(), rows[column_name(1)].to_pylist()) == ([None], [literal])


@pytest.mark.parametrize("literal", ["1e400", "-1e999", "NaN", "Infinity", "-Infinity"])
def test_a_line_of_json_has_no_number_that_is_not_finite(literal: str) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.float64())])
    letters = pa.table({"raw_value": pa.array([said(literal).encode()], pa.binary())})
    refused = rows_of_json(letters, schema, lines=True)
    assert (refused.of, literal in refused.failed[0].reason) == ([], True)
    # The letter of a Parquet row has numbers like these, but none too large for a double.
    assert rows_of_json(letters, schema).of == ([] if "e" in literal else [0])


IGNORED = {
    "a name twice": ('{"id": 1, "v": 5, "x": 1, "x": 2}', ""),
    "a name twice below": ('{"id": 1, "v": 5, "x": {"y": 1, "y": 2}}', ""),
    "a huge number": ('{"id": 1, "v": 5, "x": %s}' % ("9" * 5000), ""),
    "1e999": ('{"id": 1, "v": 5, "x": 1e999}', ""),
    "half a pair": (r'{"id": 1, "v": 5, "x": "\ud800"}', ""),
    "the words": ('{"id": 1, "v": 5, "x": "Info, NaN", "y": ": Inf"}', ""),
    "NaN": ('{"id": 1, "v": 5, "x": NaN}', "parse: not JSON: "),
    "Infinity": ('{"id": 1, "v": 5, "x": [-Infinity]}', "parse: not JSON: "),
    "Inf": ('{"id": 1, "v": 5, "x": Inf}', "parse: not JSON: "),
    "a name twice that is read": ('{"id": 1, "v": 5, "v": 5}', "(value.v): ambiguous JSON: 'v' occurs twice"),
    "an escaped name twice": (r'{"id": 1, "v": 5, "\u0076": 6}', "(value.v): ambiguous JSON: 'v' occurs twice"),
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("case", IGNORED)
def test_fields_that_no_column_reads_matter_only_if_they_are_no_json(case: str, neighbours: list[Record]) -> None:
    record, wanted = IGNORED[case]
    values, problem = found_of(pa.int64(), record, neighbours)
    if wanted:
        assert wanted in problem
    else:
        assert (problem, values.to_pylist()) == ("", [5])


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("side", ["op", "after", "payload"])
def test_an_envelope_with_a_part_twice_is_refused(side: str, neighbours: list[Record]) -> None:
    parts = {"op": '"c"', "after": '{"id": 1, "v": 2}', "payload": '{"op": "c", "after": {"id": 1}}'}
    record = ", ".join(
        f'"{name}": {part}'
        for name, part in [*parts.items(), (side, parts[side])]
        if name in (("payload",) if side == "payload" else ("op", "after"))
    )
    _, problem = found_of(pa.int64(), f"{{{record}}}", neighbours, envelope="debezium")
    assert problem == f"parse: ambiguous JSON: {side!r} occurs twice"


def test_a_name_twice_in_what_becomes_text_or_a_struct_is_refused() -> None:
    for kind, unit in ((pa.string(), ANY_TEXT), (pa.struct([("a", pa.int64())]), "")):
        value = of_json(b'{"a": {"a": 1}, "b": [{"a": 1, "a": 1}]}' if unit else b'{"a": 1, "a": 1}')
        with raises(ValueError):
            typed(value, kind, unit)


# ---- keys in Debezium's wrapper ------------------------------------------------------------------------------------

PLAIN, WRAPPED = b'{"id": 5}', b'{"schema": {"type": "struct", "fields": []}, "payload": {"id": 7}}'
KEYS: dict[str, tuple[bytes, int | None]] = {
    "plain": (PLAIN, 5),
    "wrapped": (WRAPPED, 7),
    "wrapped without spaces": (b'{"schema":{"name":"a.payload"},"payload":{"id":7}}', 7),
    "the other order": (b'{"payload": {"id": 7}, "schema": {}}', 7),
    "no schema": (b'{"schema": null, "payload": {"id": 7}}', 7),
    "a payload of its own": (b'{"id": 5, "payload": {"id": 7}}', 5),
    "only a payload": (b'{"payload": {"id": 7}}', None),
    "a third field": (b'{"schema": {}, "payload": {"id": 7}, "id": 5}', 5),
    "a third object": (b'{"schema": {"type": "struct", "fields": []}, "payload": {"id": 7}, "id": {}}', None),
    "no payload": (b'{"schema": {}, "payload": null}', None),
    "a schema of its own": (b'{"schema": "public", "id": 5}', 5),
}


@pytest.mark.parametrize("neighbours", [[], [PLAIN], [WRAPPED], [b'{"id": "x"}'], [b"{"]], ids=str)
@pytest.mark.parametrize("case", KEYS)
def test_only_an_object_of_schema_and_payload_is_unwrapped(case: str, neighbours: list[bytes]) -> None:
    key, wanted = KEYS[case]
    others = [Record(b'{"id": 2}', key=each) for each in neighbours]
    values, problem = found_of(pa.int64(), Record(b'{"id": 1}', key=key), others, columns={"v": "key.id"})
    refused = "map: column 'v' (key.id): {} is not a valid int64" if case == "a third object" else ""
    assert (problem, values.to_pylist()) == (refused, [wanted])


def test_keys_in_a_wrapper_are_taken_fast() -> None:
    for keys in ([WRAPPED] * 3, [PLAIN] * 3):
        found = json_columns.wrapped(pa.array(keys), [(("id",), pa.int64(), "")])
        assert found is not None
        assert found[0].to_pylist() == [7 if keys[0] is WRAPPED else 5] * 3


# ---- numbers in float columns --------------------------------------------------------------------------------------

ROUNDED: dict[str, tuple[pa.DataType, str, float | None]] = {
    "2**53": (pa.float64(), "9007199254740992", 2.0**53),
    "2**53 + 1": (pa.float64(), "9007199254740993", None),
    "2**54": (pa.float64(), "18014398509481984", 2.0**54),
    "of 23 digits": (pa.float64(), "-12345678901234567890123", None),
    "large with a fraction": (pa.float64(), "9007199254740993.5", 9007199254740994.0),
    "large with an exponent": (pa.float64(), "1e300", 1e300),
    "2**24 + 1": (pa.float32(), "16777217", None),
    "2**24 + 2": (pa.float32(), "16777218", 16777218.0),
    "2**24 + 1 with a fraction": (pa.float32(), "16777217.0", 16777216.0),
    "2049": (pa.float16(), "-2049", None),
    "a fraction": (pa.float32(), "0.1", 0.10000000149011612),
    "between two float32": (pa.float32(), "1.00000005960464477540", 1.0),  # that is read as float64 first
    "minus zero": (pa.float64(), "-0.0", -0.0),
    "minus zero without a fraction": (pa.float64(), "-0", 0.0),
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("case", ROUNDED)
def test_a_whole_number_in_a_float_column_is_exact_or_refused(case: str, neighbours: list[Record]) -> None:
    kind, literal, wanted = ROUNDED[case]
    for of, text, inside in ((kind, literal, wanted), (pa.list_(kind, 1), f"[ {literal} ]", [wanted])):
        values, problem = found_of(of, said(text), neighbours)
        if wanted is None:
            assert f"{literal} is not a valid float{kind.bit_width} (it would be rounded" in problem
        else:
            assert (problem, str(values.to_pylist())) == ("", str([inside]))


@pytest.mark.parametrize(
    ("lines", "fields", "wanted"),
    [
        (
            [b'{"a": 1, "b": {"c": "x"}}', b" {} ", b'{\n"a": 2, "z": [1, "x", {}]\n}'],
            [(("a",), pa.int64(), ""), (("b", "c"), pa.string(), "")],
            [[1, None, 2], ["x", None, None]],
        ),
        (
            [b'{"v": 1e300, "x": 17, "y": "9007199254740993"}', b'{"v": -0.0}'],
            [(("v",), pa.float64(), "")],
            [[1e300, -0.0]],
        ),
    ],
    ids=["fields and nothing else", "floats without whole numbers"],
)
def test_good_records_are_taken_fast(lines: list[bytes], fields: list[Any], wanted: list[Any]) -> None:
    """One bad record sends its batch to the slow path; good records never do."""
    found = json_columns.plain(pa.array(lines), fields)
    assert found is not None
    assert str([each.to_pylist() for each in found]) == str(wanted)


@pytest.mark.parametrize("value", [2**53 + 1, Decimal("12345678901234567890.5"), Decimal("1e400")])
def test_a_number_of_avro_is_not_rounded_to_a_float(value: int | Decimal) -> None:
    with raises(ValueError):
        typed(value, pa.float64())
    assert typed(Decimal("0.1"), pa.float32()) == 0.1
    assert typed(Decimal("2.50"), pa.float64()) == 2.5


# ---- times of Avro, texts of keys ----------------------------------------------------------------------------------


def test_a_local_time_of_avro_is_not_taken_for_utc() -> None:
    aware = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    local = aware.replace(tzinfo=None)
    with raises(ValueError):
        typed(local, pa.timestamp("us", "UTC"))
    assert typed(local, pa.timestamp("us")) == local
    assert typed(aware, pa.timestamp("us", "UTC")) == aware


@pytest.mark.parametrize("text", ["0x10", "0X10", "0x"])
@pytest.mark.parametrize("kind", [pa.int64(), pa.uint8()], ids=str)
def test_a_hexadecimal_text_is_no_number(text: str, kind: pa.DataType, tmp_path: Path) -> None:
    key = Record(b'{"id": 1}', key=text.encode())
    _, problem = found_of(kind, key, [], columns={"v": "key"})
    assert problem == f"map: column 'v' (key): {text!r} is not a valid {kind}"
    assert found_of(kind, Record(b'{"id": 1}', key=b" 16"), [], columns={"v": "key"})[0].to_pylist() == [16]
    with raises(Invalid):
        normalise_keys([text], pa.schema([("id", kind)]), ("id",))
    (tmp_path / "a.csv").write_text(f"v\n{text}\n")
    with raises(Invalid):
        list(tables(*find_files([str(tmp_path / "a.csv")], None, {}), pa.schema([("v", kind)])))


TEXTS: dict[str, tuple[pa.DataType, str, float | None]] = {
    "2**24 + 1": (pa.float32(), "16777217", None),
    "2**24 + 2": (pa.float32(), " +16777218", 16777218.0),
    "2**53 + 1": (pa.float64(), "-9007199254740993", None),
    "2**54": (pa.float64(), "18014398509481984", 2.0**54),
    "2**63 - 1": (pa.float64(), "9223372036854775807", None),
    "2**63": (pa.float64(), "9223372036854775808", 2.0**63),
    "1e22": (pa.float64(), "1" + "0" * 22, 1e22),
    "1e23": (pa.float64(), "1" + "0" * 23, None),
    "2049": (pa.float16(), "2049", None),
    "2050": (pa.float16(), "2050", 2050.0),
    "with many zeros": (pa.float64(), "0" * 5000 + "1", 1.0),
    "with a fraction": (pa.float32(), "16777217.0", 16777216.0),
    "with an exponent": (pa.float64(), "9007199254740993e0", 2.0**53),
    "a fraction": (pa.float64(), "0.1", 0.1),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_whole_number_as_text_in_a_float_column_is_exact_or_refused(case: str, tmp_path: Path) -> None:
    kind, text, wanted = TEXTS[case]
    values, problem = found_of(kind, Record(b'{"id": 1}', key=text.encode()), [], columns={"v": "key"})
    (tmp_path / "a.csv").write_text(f"v\n0.5\n{text}\n\n")

    def loaded() -> list[Any]:
        return list(tables(*find_files([str(tmp_path / "a.csv")], None, {}), pa.schema([("v", kind)])))

    if wanted is None:
        why = f"{text} is not a valid float{kind.bit_width} (it would be rounded"
        assert why in problem
        with raises(Invalid):
            loaded()
    else:
        assert (problem, values.to_pylist()) == ("", [wanted])
        assert loaded()[0]["v"].to_pylist() == [0.5, wanted]


def test_texts_of_floats_without_rounded_numbers_are_taken_fast() -> None:
    large = pa.array(["0.1", None, "1e300", str(2**60), "9007199254740994", "9007199254740993.0"])
    assert not rounds(large, large.cast(pa.float64()))
    for text in ("9007199254740993", "9223372036854775807", "1" + "0" * 22):
        more = pa.array([*large.to_pylist(), text])
        assert rounds(more, more.cast(pa.float64()))


@pytest.mark.parametrize("raw", [b'{"v": 1, "v": 2}', b'{"v": 1, "x": [{"y": 1, "y": 2}]}'])
def test_a_dead_letter_of_a_file_with_a_name_twice_is_not_replayed(raw: bytes) -> None:
    failed = rows_of_json(pa.table({"raw_value": pa.array([raw])}), pa.schema([("v", pa.int64())])).failed
    assert "ambiguous JSON" in failed[0].reason
