"""Bad rows inside Spark: they do not stop a micro-batch, become letters once, and too many of them end the stream."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memwal
from memwal.flush import BaseTable
from memwal.ingest.cli import dlq as cli_dlq
from memwal.ingest.cli.command import Call, CommandConsole
from memwal.ingest.engine.loads.files import find_files
from memwal.ingest.engine.loads.formats import tables
from memwal.ingest.service.client.target import opened
from memwal.ingest.settings.load import load
from memwal.ingest.spark.dlq.replay import Replaying
from memwal.ingest.spark.dlq.sources import by_source
from memwal.ingest.spark.dlq.table import DeadLetters
from memwal.ingest.spark.errors import of_spark
from memwal.ingest.spark.pipeline.checkpoint import noted
from memwal.ingest.spark.pipeline.checks import written_schema
from memwal.ingest.spark.session import configuration, start_session
from memwal.ingest.spark.sink import foreach_batch as spark_sink
from memwal.ingest.spark.sink.foreach_batch import MemWalSink
from memwal.ingest.spark.sink.receipts import BatchReceipt
from memwal.ingest.spark.source.columns import BUCKET
from memwal.ingest.spark.source.feed import Feed
from memwal.ingest.spark.source.files import UNREADABLE_RECORD, has_header
from memwal.ingest.spark.source.stream import ByHeader, read_stream
from tests.conftest import toml
from tests.opened import announced
from tests.support.clock import FakeClock

Dying = Callable[[str], AbstractContextManager[None]]
COLUMNS = {"id": "int64", "name": "string", "price": "int64"}
POISON = ("no JSON {", '{"id": "x", "name": "a number as text"}', '{"name": "no key"}', '{"id": 7.5}')


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start one Spark for the module."""
    settings = load({"table": {"uri": str(tmp_path_factory.mktemp("unused"))}}, {})
    session = start_session(configuration(settings, 2, once=True))
    yield session
    session.stop()


class Stream:
    """A table, a directory of files of a format, and the query between them, as `memwal run` builds it."""

    def __init__(
        self, spark: Any, at: Path, form: str, table: dict[str, Any], dlq: dict[str, Any], ends: ExitStack
    ) -> None:
        self.at, self.spark, self.form, self.ends = at, spark, form, ends
        (at / "feed").mkdir()
        (at / "in").mkdir()
        self.sections: dict[str, dict[str, Any]] = {
            "table": {"uri": str(at / "t.lance"), "key": ["id"], "columns": COLUMNS, **table},
            "source": {"format": form, "path": str(at / "in"), "files_per_trigger": 1},
            "commit": {"interval": "0s"},
            "sink": {"checkpoint": str(at / "checkpoint")},
            "dlq": dlq,
        }
        self.batches: list[BatchReceipt] = []
        self.daemon = ""

    @property
    def config(self) -> Path:
        path = self.at / "config.toml"
        path.write_text(toml(self.sections))
        return path

    def land(self, lines: Sequence[str] | pa.Table) -> None:
        file = self.at / "feed" / f"{len(list((self.at / 'feed').iterdir())):03d}.{self.form}"
        if isinstance(lines, pa.Table):
            pq.write_table(lines, file)
        else:
            file.write_bytes(os.fsencode("\n".join(lines) + "\n"))
        Feed(self.at / "feed", self.at / "in", 0.0, FakeClock()).land_all()

    def rewrite(self, file: int, lines: Sequence[str]) -> None:
        """Replace the lines of a file that has landed, as if another mapping read other rows from it."""
        for landed in self.at.glob(f"*/{file:03d}.{self.form}"):
            before = landed.stat()
            landed.write_text("\n".join(lines) + "\n")
            os.utime(landed, ns=(before.st_atime_ns, before.st_mtime_ns))

    def run(self) -> None:
        """Process the existing files with a new sink. Raises: the error that ended the query, with its kind."""
        settings = load(self.config, {})
        sink = MemWalSink(self.config, endpoint=self.endpoint(), on_batch=self.batches.append)
        schema = written_schema(settings, BaseTable.open(settings.table.uri))
        frame = read_stream(self.spark, settings.source, schema).frame
        to: Any = ByHeader(settings.source, schema, sink) if has_header(settings.source) else sink
        writer = frame.writeStream.foreachBatch(to).option("checkpointLocation", str(self.at / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(300)
        except Exception as error:
            raise (getattr(to, "failure", None) or sink.failure or of_spark(error)) from error
        finally:
            query.stop()

    def endpoint(self) -> str:
        """Return the endpoint of one daemon, in this process, for all runs."""
        if not self.daemon:
            self.daemon = announced(load(self.config, {}), self.ends)
        return self.daemon

    def forget_the_last_micro_batch(self) -> None:
        """Remove Spark's record of the newest micro-batch, as if the driver had died between the
        acks and the record.
        """
        commits = self.at / "checkpoint" / "commits"
        newest = max(int(each.name) for each in commits.glob("[0-9]*"))
        (commits / f"{newest}").unlink()

    def rows(self) -> dict[int, str]:
        with memwal.connect(self.endpoint()) as table:
            found = table.scan(["id", "name"]).read_all().to_pylist()
        assert len({row["id"] for row in found}) == len(found)
        return {row["id"]: row["name"] for row in found}

    def letters(self) -> list[dict[str, Any]]:
        """Return the letters, oldest first, by file and row."""
        found = lance.dataset(str(self.at / "t.lance.dlq")).to_table().to_pylist()
        return sorted(found, key=lambda each: (each["file"], each["row"]))


@pytest.fixture
def stream(spark: Any, tmp_path: Path, ends: ExitStack) -> Callable[..., Stream]:
    """Make streams; their daemons end with the test."""

    def make(form: str = "json", table: dict[str, Any] | None = None, **dlq: Any) -> Stream:
        return Stream(spark, tmp_path, form, table or {}, dlq, ends)

    return make


def line(id: int, name: str = "") -> str:
    return json.dumps({"id": id, "name": name or f"name {id}", "price": id})


def poisoned(first: int, rows: int, every: int = 100) -> list[str]:
    """Return the lines of a file; one line of every `every` is bad, with the kinds of errors in turn."""
    return [
        POISON[(id // every) % len(POISON)] if id % every == every // 2 else line(id)
        for id in range(first, first + rows)
    ]


def test_a_poison_record_every_100_rows_is_a_letter_each_and_every_other_row_arrives(
    stream: Callable[..., Stream],
) -> None:
    source = stream(mode="table")
    source.land(poisoned(0, 400))
    source.land(poisoned(400, 400))
    source.run()
    good = {id: f"name {id}" for id in range(800) if id % 100 != 50}
    assert source.rows() == good
    assert [(each.rows, each.bad, each.letters) for each in source.batches] == [(396, 4, 4)] * 2
    letters = source.letters()
    assert [each["raw_value"].decode() for each in letters] == list(POISON) * 2
    assert [each["stage"] for each in letters] == ["parse", "parse", "fit", "parse"] * 2
    assert [each["row"] for each in letters] == [50, 150, 250, 350] * 2
    assert letters[2]["reason"] == "key column 'id' is null: give it a value"
    assert letters[2]["column"] == "id"
    assert {each["batch_id"] for each in letters[:4]} == {0}
    assert letters[0]["file"].endswith("000.json")

    source.forget_the_last_micro_batch()
    source.run()
    assert source.rows() == good
    assert source.letters() == letters
    assert (source.batches[-1].bad, source.batches[-1].letters) == (4, 0)
    assert [region.applied for region in source.batches[-1].regions] == [False, False]


def test_letters_name_their_files_where_the_paths_had_been_left_out(
    stream: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_sink, "WITHOUT_PATHS_FROM", 10)
    source = stream("parquet", table={"on_duplicate": "fail"}, mode="table")
    names = [f"name {n}" for n in range(60)]
    source.land(pa.table({"id": range(60), "name": names, "price": range(60)}))
    source.land(pa.table({"id": [*range(60, 110), *range(60, 70)], "name": names, "price": range(60)}))
    source.run()
    assert sorted(source.rows()) == list(range(110))
    letters = source.letters()
    assert [(each["file"].rsplit("/", 1)[1], each["row"]) for each in letters] == [
        ("001.parquet", row) for row in range(50, 60)
    ]
    assert [(each.rows, each.bad, each.letters) for each in source.batches] == [(60, 0, 0), (50, 10, 10)]


TYPED = {
    "id": "int64",
    "name": "string",
    "at": "timestamp[us, UTC]",
    "local": "timestamp[us]",
    "day": "date32",
    "ratio": "float32",
}
GOOD = {"at": "2026-01-02T03:04:05.5Z", "local": "2026-01-02 03:04:05", "day": "2026-01-02", "ratio": 0.1}
BAD = {
    "at": (1_700_000_000_000, "2026-01-02T03:04:05", "soon"),
    "local": (1_700_000_000_000, "2026-01-02T03:04:05Z", "2026-01-02T03:04:05.1234567"),
    "day": (19_000, "2026-01-02T03:04:05", "2026-02-31"),
    "ratio": (1e300, "much"),
}
WHY = {"at": "a number needs a unit", "local": "declare the column timestamp[us, UTC]", "day": "2020-01-31"}


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_number_beyond_every_float_is_not_taken_for_infinity(stream: Callable[..., Stream], form: str) -> None:
    columns = {"id": "int64", "name": "string", "x": "float64"} | ({"v": "vector[2]"} if form == "json" else {})
    source = stream(form, table={"columns": columns}, mode="table")
    if form == "json":
        bad = [
            '{"id": 1, "x": 1e309}',
            '{"id": 2, "x": -1e309}',
            '{"id": 3, "v": [1, 1e309]}',
            '{"id": 4, "v": [-1e309, 1]}',
        ]
        source.land([*bad, '{"id": 5, "name": "good", "x": -1e308, "v": [1, 2.5]}', '{"id": 6, "name": "nothing"}'])
    else:
        source.land(["id,name,x", "1,,1e309", "2,,-1e309", "5,good,-1e308", "6,nothing,", "7,said,Infinity"])
    source.run()
    assert source.rows() == {5: "good", 6: "nothing"} | ({} if form == "json" else {7: "said"})
    reasons = [letter["reason"] for letter in source.letters()]
    assert len(reasons) == (4 if form == "json" else 2)
    for reason, name in zip(reasons, "xxvv", strict=False):
        assert f"column '{name}'" in reason
        assert "finite number in range" in reason


@pytest.mark.parametrize("form", ["json", "csv"])
def test_what_a_file_says_is_not_guessed_at(stream: Callable[..., Stream], form: str) -> None:
    """Numbers as times, a time after a date, an offset in a column without a time zone, a float
    that becomes infinite.
    """
    source = stream(form, table={"columns": TYPED}, mode="table")
    bad = [(column, value) for column, values in BAD.items() for value in values]
    rows = [{"id": n, "name": "", **GOOD, column: value} for n, (column, value) in enumerate(bad)]
    rows += [{"id": 50, "name": "good", **GOOD}, {"id": 51, "name": "nothing"}]
    if form == "json":
        source.land([json.dumps(row) for row in rows])
    else:
        names = ["day", "id", "ratio", "local", "at", "name"]  # in a different order than the table's
        source.land([",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)])
    source.run()
    assert source.rows() == {50: "good", 51: "nothing"}
    with memwal.connect(source.endpoint()) as table:
        (row,) = table.get([50]).to_pylist()
    assert row["at"] == datetime(2026, 1, 2, 3, 4, 5, 500_000, UTC)
    assert (row["local"], row["day"]) == (datetime(2026, 1, 2, 3, 4, 5), date(2026, 1, 2))  # noqa: DTZ001
    letters = source.letters()
    assert len(letters) == len(bad)
    for letter, (column, value) in zip(letters, bad, strict=True):
        assert f"'{column}'" in letter["reason"]
        assert str(json.loads(letter["raw_value"])[column]) == str(value), "a letter holds what the file says"
    for column, why in WHY.items():
        assert any(why in letter["reason"] for letter in letters if f"'{column}'" in letter["reason"])


MISREAD = {
    b'{"id": 1} {"id": 2}': "not JSON: Extra data at character 10",
    b'{"id": 1}, "_memwal_end": true}': "not JSON: Extra data at character 9",
    b'[{"id": 1}, {"id": 2}]': "not a JSON object",
    b"null": "not a JSON object",
    b'{"id": 1, "name": "a", "name": "b"}': "ambiguous JSON: 'name' occurs twice",
    b'{"id": 1, "in": {"a": 1, "a": 2}}': "ambiguous JSON: 'a' occurs twice",
    b'{"id": 1, "name": "\\ud83d"}': "half of a surrogate pair",
    b'{"id": 1, "name": "\xff"}': "byte 19 is not UTF-8",
    b'{"id": 1, "x": 9007199254740993}': "it would be rounded",
    b'{"id": 1, "v": [1, 16777217]}': "it would be rounded",
    b'{"id": 1, "price": 0.12345678901234567891}': "not a number with that precision and scale",
    b'{"id": 1, "name": "\\ud83d\\ude00", "x": 1e400}': "not a finite number in range",
    b'{"id": 1, "x": NaN}': "NaN is not a JSON number",
    b'{"id": 1, "in": {"f": "NaN"}}': "'in'",
    b'{"id": 1, "fs": ["NaN", 1.5]}': "'fs'",
    b'{"id": 1, "w": [1, 2.7]}': "2.7 is not a valid int32",
}
"""Lines from which Spark's JSON reader makes rows with altered values, or with values missing."""
EXACT = (
    '{"id": 10, "name": "\\ud83d\\ude00 \\\\ud83d"}',
    '{"id": 11, "price": 1234567890.1234567890}',
    '{"id": 12, "x": 9007199254740994, "v": [16777218, 0.5]}',
    ' {"id": 13, "more": {"a": 1}, "name": 5}\r',
    '{"id": 14, "name": 0.12345678901234567890}',
    '{"id": 15, "name": {"e": [1e400, 2]}, "w": [1, -2]}',
    "\t",
    "",
)


def test_a_line_of_a_json_file_is_one_object_and_has_the_values_that_it_says(stream: Callable[..., Stream]) -> None:
    source = stream(table={"columns": {}}, mode="table")
    inside, price = pa.struct([("a", pa.int64()), ("f", pa.float64())]), pa.decimal128(20, 10)
    columns = {"name": pa.string(), "x": pa.float64(), "v": pa.list_(pa.float32(), 2), "price": price, "in": inside}
    columns |= {"fs": pa.list_(pa.float64()), "w": pa.list_(pa.int32(), 2)}
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *(pa.field(*each) for each in columns.items())])
    memwal.open(str(source.at / "t.lance"), schema=schema, key="id").close()
    source.land([*(os.fsdecode(line) for line in MISREAD), *EXACT])
    source.run()
    letters = source.letters()
    assert [letter["raw_value"] for letter in letters] == list(MISREAD), "as it stands in the file, in its order"
    for letter, reason in zip(letters, MISREAD.values(), strict=True):
        assert reason in letter["reason"]
    numbers = {14: "0.12345678901234567890", 15: '{"e":[1e400,2]}'}
    assert source.rows() == {10: "\U0001f600 \\ud83d", 11: None, 12: None, 13: "5", **numbers}
    with memwal.connect(source.endpoint()) as table:
        found = {row["id"]: row for row in table.get([11, 12]).to_pylist()}
    assert found[11]["price"] == Decimal("1234567890.1234567890")
    assert (found[12]["x"], found[12]["v"]) == (9007199254740994.0, [16777218.0, 0.5])


def test_columns_of_json_files_may_be_names_of_directories(stream: Callable[..., Stream]) -> None:
    """The values have the types of the table: Spark would read 007 as a number."""
    source = stream(table={"columns": {"id": "int64", "name": "string", "day": "date32"}}, mode="table")
    for day in ("2020-01-31", "2020-02-30"):
        at = source.at / "in" / f"day={day}" / "name=007"
        at.mkdir(parents=True)
        (at / "a.json").write_text('{"id": 1}\n{"id": 2, "name": "not this"}\n')
    source.run()
    assert source.rows() == {1: "007", 2: "007"}
    assert ["'2020-02-30' is no date32" in letter["reason"] for letter in source.letters()] == [True, True]


def test_options_of_sparks_json_reader_are_applied(stream: Callable[..., Stream]) -> None:
    source = stream(table={"columns": {"id": "int64", "name": "string", "day": "date32"}}, mode="table")
    source.sections["source"]["options"] = {"dateFormat": "dd/MM/yyyy", "allowComments": "true"}
    source.land(['{"id": 1, "day": "31/01/2020"} // said', '{"id": 2}{"id": 3}'])
    source.run()
    with memwal.connect(source.endpoint()) as table:
        assert [row["day"] for row in table.get([1, 2, 3]).to_pylist()] == [date(2020, 1, 31)]
    assert [letter["raw_value"] for letter in source.letters()] == [b'{"id": 2}{"id": 3}']


def test_json_over_several_lines(stream: Callable[..., Stream]) -> None:
    source = stream(mode="table")
    source.sections["source"]["options"] = {"multiLine": "true"}
    source.land(['[{"id": 1,', ' "name": "one"},', '{"id": 2, "name": "two"}]'])
    source.run()
    assert source.rows() == {1: "one", 2: "two"}


def test_csv_is_read_by_the_names_of_its_header(
    stream: Callable[..., Stream], caplog: pytest.LogCaptureFixture
) -> None:
    source = stream("csv", mode="fail")
    source.sections["source"]["files_per_trigger"] = 3
    source.land(["price,name,id", "10,one,1", "20,two,2"])
    source.land(["id,more,name,price", "3,x,three,30"])
    source.land(["id,name,price", "4,four,40"])
    with caplog.at_level("WARNING", "memwal.pipeline"):
        source.run()
    assert source.rows() == {1: "one", 2: "two", 3: "three", 4: "four"}
    with memwal.connect(source.endpoint()) as table:
        assert sorted(table.scan(["price"]).read_all()["price"].to_pylist()) == [10, 20, 30, 40]
    assert "001.csv: columns that the table does not have are left out: more" in caplog.text
    source.land(["id,name,prize", "5,five,50"])
    with pytest.raises(memwal.Invalid, match=r"003\.csv: its header has no column 'price'; did you mean 'prize'"):
        source.run()
    assert len(source.rows()) == 4
    source.rewrite(3, ["id,name,price", "5,five,fifty"])
    with pytest.raises(memwal.Invalid, match=r"'price': 'fifty' is no int64.*row 0 of 003\.csv"):
        source.run()


def test_csv_without_a_header_is_read_by_position_on_purpose(stream: Callable[..., Stream]) -> None:
    source = stream("csv", mode="table")
    source.sections["source"]["options"] = {"header": "false"}
    source.land(["1,one,10", "2,two", "x,three,30"])
    source.run()
    assert source.rows() == {1: "one"}
    assert [letter["reason"].partition(" ")[0] for letter in source.letters()] == ["the", "column"]


QUOTED = {1: "two\nlines", 3: 'a "quoted" word', 4: 'mid"dle', 9: 'comma, "q", more', 10: "C:\\", 11: "two\r\nlines"}
UNMATCHED = ('5,"x"y', '7,"a\\"b"', "8,too,many", "9", '2,"unclosed\n12,"a ""quoted"" word"', '13,"to the end\n14,x')


def quoted_file(*records: str) -> bytes:
    written = [
        "".join(f'{id},"{name}"\n') for id, name in ((id, QUOTED[id].replace('"', '""')) for id in (1, 3, 9, 10, 11))
    ]
    return ("\ufeff" + 'id,"name"\r\n' + "".join(written) + '4,mid"dle\r\n \t\r\n' + "\n".join(records)).encode()


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_csv_is_read_as_rfc_4180_has_it(stream: Callable[..., Stream], ending: str) -> None:
    """Quotes, line breaks and `\\r\\n` stay as written; a line that is not CSV becomes a letter with its text
    unchanged.
    """
    source = stream("csv", table={"columns": {"id": "int64", "name": "string"}}, mode="table")
    data = quoted_file(*UNMATCHED)
    (source.at / "in" / f"[a] b.{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    source.run()
    assert source.rows() == QUOTED
    letters = source.letters()
    assert [letter["raw_value"].decode() for letter in letters] == list(UNMATCHED)
    assert [letter["row"] for letter in letters] == list(range(6, 12))
    assert {letter["reason"] for letter in letters} == {UNREADABLE_RECORD.removeprefix("parse: ")}
    right = source.at / "right.csv"
    right.write_bytes(quoted_file().replace(b" \t\r\n", b"\r\n"))
    (loaded,) = tables(*find_files([str(right)], None, {}), pa.schema([("id", pa.int64()), ("name", pa.string())]))
    assert {row["id"]: row["name"] for row in loaded.to_pylist()} == QUOTED


def test_a_quote_of_a_header_that_never_closes_ends_the_run(stream: Callable[..., Stream]) -> None:
    source = stream("csv", table={"columns": {"id": "int64", "name": "string"}}, mode="table")
    source.land(['id,name,"more', "1,one,1"])
    with pytest.raises(memwal.Invalid, match=r"000\.csv: its header has quotes that do not match"):
        source.run()
    source.rewrite(0, ['id,name,"more', '  and more"', "1,one,1"])
    source.run()
    assert source.rows() == {1: "one"}


def test_options_of_csv_take_precedence(stream: Callable[..., Stream]) -> None:
    source = stream("csv", table={"columns": {"id": "int64", "name": "string"}}, mode="table")
    source.sections["source"]["options"] = {"escape": "\\", "multiLine": "false", "sep": ";"}
    source.land(["id;name", '1;"a \\"quoted\\" word"', '2;"one;line"'])
    source.run()
    assert source.rows() == {1: 'a "quoted" word', 2: "one;line"}


def test_a_whole_number_of_csv_that_a_float_would_round_is_a_bad_row(stream: Callable[..., Stream]) -> None:
    columns = {"id": "int64", "name": "string", "x": "float64", "y": "float32"}
    source = stream("csv", table={"columns": columns}, mode="table")
    good = ["1,,9007199254740992,16777218", f"2,,-{2**70},-{2**100}", "3,,0.1,16777217.0", f"4,,1{'0' * 22},-5"]
    bad = ["5,,9007199254740993,", "6,,,-16777217", f"7,,1{'0' * 23},", f"8,,,{2**100 + 2**70}"]
    source.land(["id,name,x,y", *good, *bad])
    source.run()
    with memwal.connect(source.endpoint()) as table:
        found = [(row["x"], row["y"]) for row in table.get([1, 2, 3, 4]).to_pylist()]
    assert found == [(2.0**53, 16777218.0), (-(2.0**70), -(2.0**100)), (0.1, 16777216.0), (1e22, -5.0)]
    assert ["it would be rounded" in letter["reason"] for letter in source.letters()] == [True] * 4


def test_letters_of_csv_are_texts_that_a_replay_reads(stream: Callable[..., Stream]) -> None:
    source = stream("csv", table={"columns": {"id": "int64", "name": "string", "day": "date32"}}, mode="table")
    source.land(["id,name,day", "1,one,2026-02-31", "2,two,2026-02-01"])
    source.run()
    settings = load(source.config, {})
    base = BaseTable.open(settings.table.uri)
    letters = lance.dataset(f"{settings.table.uri}.dlq").to_table()
    mapped = by_source(settings, base.schema, base.key)(letters)
    assert "'day' cannot become date32" in mapped.failed[0].reason
    raw = letters["raw_value"][0].as_py().replace(b"31", b"28")
    mended = letters.set_column(letters.schema.get_field_index("raw_value"), "raw_value", pa.array([raw]))
    (row,) = by_source(settings, base.schema, base.key)(mended).rows.to_pylist()
    assert row == {"id": 1, "name": "one", "day": date(2026, 2, 28)}


def test_parquet_as_pandas_writes_it_goes_into_float32(stream: Callable[..., Stream]) -> None:
    table = {"columns": {"id": "int64", "name": "string", "price": "float32", "v": "vector[2]"}}
    source = stream("parquet", table=table, mode="table")
    vectors = [[0.5, 1.5], [1.0, 1e300], [1.0, 2.0, 3.0], [3.0, 4.0]]
    prices, names = [0.1, 1.0, 2.0, 1e300], ["good", "v beyond", "v too long", "price beyond"]
    source.land(pa.table({"id": range(4), "name": names, "price": prices, "v": vectors}))
    source.run()
    assert source.rows() == {0: "good"}
    assert [letter["column"] for letter in source.letters()] == ["v", "v", "price"]


def test_rows_that_are_left_out_are_counted_and_kept_nowhere(stream: Callable[..., Stream]) -> None:
    source = stream(mode="skip")
    source.land(poisoned(0, 300))
    source.run()
    assert len(source.rows()) == 297
    assert [(each.rows, each.bad, each.letters) for each in source.batches] == [(297, 3, 0)]
    assert "'id' cannot become int64 ('x' is not a valid int64) (1x)" in source.batches[0].reasons
    assert not (source.at / "t.lance.dlq").exists()


def test_too_many_bad_rows_end_the_stream_and_nothing_is_lost(stream: Callable[..., Stream]) -> None:
    source = stream(mode="table", max_bad_percent=5, bad_window=100)
    source.land(poisoned(0, 200))
    source.land(poisoned(200, 200, every=10))
    source.land(poisoned(400, 100))
    for _ in range(2):  # the same micro-batch stops it again
        with pytest.raises(
            memwal.Invalid, match=r"20 of the last 200 rows \(10.0 %\) are bad.*max_bad_percent = 5"
        ) as e:
            source.run()
        assert len(e.value.lines) == 1
        assert "parse: column 'id' cannot become int64" in str(e.value)
        assert len(source.rows()) == 198 + 180
        assert len(source.letters()) == 2 + 20
    source.sections["dlq"]["max_bad_percent"] = 100
    source.run()
    assert len(source.rows()) == 198 + 180 + 99
    assert len(source.letters()) == 2 + 20 + 1


def test_a_source_that_is_mended_does_not_bring_the_rows_of_letters_as_well(stream: Callable[..., Stream]) -> None:
    """All rows of a micro-batch are bad, so no region has it; Spark repeats it, and its letters are replayed too."""
    source = stream(mode="table", max_bad_percent=5, bad_window=10)
    source.land([line(id).replace('"price": ', '"price": "about "') for id in range(20)])
    with pytest.raises(memwal.Invalid, match="20 of the last 20 rows"):
        source.run()
    assert len(source.letters()) == 20
    source.rewrite(0, [line(id) for id in range(20)])
    source.land([line(20)])
    source.run()
    assert sorted(source.rows()) == [20]
    assert len(source.letters()) == 20


@pytest.mark.parametrize("mode", ["table", "fail"])
def test_a_letter_stays_one_where_the_mapping_is_mended_between_it_and_the_acks(
    stream: Callable[..., Stream], dying: Dying, mode: str
) -> None:
    """The table has no key: a row that is accepted although its letter exists would be doubled."""
    source = stream(table={"append_only": True}, mode="table")
    del source.sections["table"]["key"]
    source.land([line(id) if id % 5 else line(id).replace('"price": ', '"price": "about "') for id in range(20)])
    with dying("behind the letters"):
        source.run()
    letters = source.letters()
    assert [each["row"] for each in letters] == [0, 5, 10, 15]
    assert source.rows() == {}

    source.rewrite(0, [line(id) for id in range(20)])
    assert "4x their micro-batch is not finished" in replayed(source)
    source.sections["dlq"]["mode"] = mode
    source.land([line(20)])
    source.run()
    good = [id for id in range(21) if id % 5 or id == 20]
    assert sorted(source.rows()) == good
    assert source.letters() == letters
    source.forget_the_last_micro_batch()
    source.run()
    assert sorted(source.rows()) == good
    assert "not finished" not in replayed(source), "every region has it"


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Dying:
    """Return a context in which the driver dies: "behind the letters", when they are written and before any region got
    a row, or "at the third job", when a region has rejected rows and their letters are written.
    """
    collected = spark_sink.collected

    @contextmanager
    def begin(when: str) -> Iterator[None]:
        jobs: list[Any] = []

        def dies(routed: Any, send: Any) -> Any:
            jobs.append(routed)
            if when == "behind the letters":
                collected(routed.where(f"{BUCKET} < 0"), send)
            elif len(jobs) < 3:
                return collected(routed, send)
            raise memwal.Unavailable("the driver died")

        with monkeypatch.context() as patched:
            patched.setattr(spark_sink, "collected", dies)
            with pytest.raises(memwal.Unavailable, match="the driver died"):
                yield

    return begin


def replayed(source: Stream) -> str:
    """Return the output of `memwal dlq replay`."""
    output = io.StringIO()
    call = Call(load(source.config, {}), {}, CommandConsole(file=output, width=200))
    cli_dlq.replay(call, ids=[], stage=None, limit=None)
    return output.getvalue()


def test_a_refused_row_stays_a_letter_where_its_region_would_take_it_at_the_replay(
    stream: Callable[..., Stream], dying: Dying
) -> None:
    source = stream("json", table={"on_duplicate": "fail"}, mode="table")
    source.land([line(1), line(1, "the second"), line(2)])
    with dying("at the third job"):
        source.run()
    (letter,) = source.letters()
    assert (letter["row"], letter["stage"]) == (1, "refused")
    source.rewrite(0, [line(1), line(3, "the second"), line(2)])
    source.run()
    assert source.rows() == {1: "name 1", 2: "name 2"}
    assert source.letters() == [letter]


def test_rows_that_their_region_refuses_become_letters_before_it_applies_the_others(
    stream: Callable[..., Stream], dying: Dying
) -> None:
    source = stream("parquet", table={"on_duplicate": "fail"}, mode="table")
    ids = [*range(100), *range(10), 100]
    rows = {"id": ids, "name": [f"{id} at {n}" for n, id in enumerate(ids)], "price": ids}
    source.land(pa.table(rows))
    with dying("at the third job"):
        source.run()
    letters = source.letters()
    assert [each["row"] for each in letters] == list(range(100, 110))
    assert {each["stage"] for each in letters} == {"refused"}
    assert [json.loads(each["raw_value"])["name"] for each in letters] == [f"{n} at {100 + n}" for n in range(10)]
    assert "an earlier row of the same put has the key" in letters[0]["reason"]

    source.run()
    first = {id: f"{id} at {id}" for id in range(100)} | {100: "100 at 110"}
    assert source.rows() == first
    assert source.letters() == letters
    assert [(each.rows, each.bad, each.letters) for each in source.batches] == [(101, 10, 0)]
    source.forget_the_last_micro_batch()
    source.run()
    assert source.rows() == first
    assert source.letters() == letters

    settings = load(source.config, {})
    dead = DeadLetters.find(settings.dead_letters, {}, FakeClock())
    assert dead is not None
    target = opened(settings.table.uri, ())
    with memwal.connect(source.endpoint()) as table:
        mapping = by_source(settings, written_schema(settings, target.base), target.base.key)
        outcome = Replaying(dead, target, table, mapping, partial(noted, settings)).replay(None, None)
    assert (outcome.replayed, outcome.stay) == (10, {})
    assert source.letters() == []
    assert source.rows() == first | {n: f"{n} at {100 + n}" for n in range(10)}


def test_columns_that_fit_no_row_end_the_stream_in_every_mode(stream: Callable[..., Stream]) -> None:
    source = stream("parquet", mode="table")
    source.land(pa.table({"id": [1, 2], "name": ["a", "b"], "price": [1, 2]}))
    sink = MemWalSink(source.config, endpoint=source.endpoint())
    frame = source.spark.readStream.schema("id long, nome string").format("parquet").load(str(source.at / "in"))
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(source.at / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    with pytest.raises(Exception, match="nome"):
        query.awaitTermination(300)
    assert isinstance(sink.failure, memwal.Invalid)
    assert "'nome' is not in the table" in str(sink.failure)
    assert not (source.at / "t.lance.dlq").exists()
