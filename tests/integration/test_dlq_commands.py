"""`memwal dlq` as a user types it: its output, its effects, and one line for every mistake."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import memwal
from memwal.ingest.settings.load import load
from memwal.ingest.spark.dlq.table import SCHEMA, DeadLetters
from memwal.wal import SystemClock, SystemIds
from tests.conftest import Ran
from tests.support.clock import FakeClock

DAY = 86_400_000_000


@pytest.fixture
def typed(cli: Callable[..., Ran]) -> Callable[..., tuple[int, str, str]]:
    """Run a command; return its exit code, output and error lines."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        ran = cli(*arguments)
        return ran.code, ran.out, ran.err

    return run


@pytest.fixture
def config(small_config: Callable[..., Path], open_small: Callable[..., Any], uri: str, made: Any) -> Path:
    """Return the small table's configuration, with six letters: two of valid rows, two of bytes,
    two of invalid rows.
    """
    open_small().close()
    now = int(SystemClock().now() * 1e6)
    raws = [json.dumps(made.row(id)).encode() for id in (1, 2)] + [b"\x00\xff\xfe", b"{"] + [b'{"name": "no key"}'] * 2
    rows = [
        {
            "id": f"{number:04x}{'ab' * 8}",
            "time": now - (40 if number == 3 else 0) * DAY - 1,
            "stage": ("refused", "refused", "parse", "parse", "fit", "fit")[number],
            "column": "id" if number > 3 else None,
            "reason": ("refused then", "refused then", "no JSON", "no JSON", "key is null", "key is null")[number],
            "query_id": "q",
            "batch_id": 3,
            "file": "file:/in/a.json",
            "block": 0,
            "row": number,
            "raw_value": raw,
        }
        for number, raw in enumerate(raws)
    ]
    table = DeadLetters.create(f"{uri}.dlq", {}, FakeClock(), SystemIds())
    table.append(pa.Table.from_pylist(rows, schema=SCHEMA).to_batches(), "q", 3)
    found = small_config(dlq={"mode": "table"})
    checkpoint = Path(load(found, {}).checkpoint)
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
        (checkpoint / name / "3").touch()
    (checkpoint / "metadata").write_text('{"id":"q"}')
    return found


def test_list_counts_by_stage_and_reason_and_shows_the_newest(typed: Any, config: Path) -> None:
    code, out, _ = typed("dlq", "list", config)
    assert code == 0
    assert "6 dead letters" in out
    assert "key is null" in out
    assert "a.json row 5" in out
    found = json.loads(typed("dlq", "list", config, "--format", "json", "--limit", "2")[1])
    assert found["letters"] == 6
    counted = {(each["stage"], each["column"], each["reason"]): each["letters"] for each in found["groups"]}
    assert counted == {
        ("refused", None, "refused then"): 2,
        ("parse", None, "no JSON"): 2,
        ("fit", "id", "key is null"): 2,
    }
    assert len(found["newest"]) == 2
    rows = list(csv.DictReader(io.StringIO(typed("dlq", "list", config, "--format", "csv", "--stage", "fit")[1])))
    assert [row["row"] for row in rows] == ["4", "5"]


def test_show_prints_raw_bytes_as_text_or_digits(typed: Any, config: Path) -> None:
    assert '{"name": "no key"}' in typed("dlq", "show", config, "0004")[1]
    assert "00 ff fe" not in typed("dlq", "show", config, "0004")[1]
    assert "00fffe" in typed("dlq", "show", config, "0002")[1].replace(" ", "")
    found = json.loads(typed("dlq", "show", config, "0003", "--hex", "--json")[1])
    assert (found["raw_value"], found["stage"], found["batch_id"], found["file"]) == (
        "7b",
        "parse",
        3,
        "file:/in/a.json",
    )


def test_replay_puts_what_fits_and_says_why_the_others_stay(typed: Any, config: Path, uri: str, made: Any) -> None:
    code, out, err = typed("dlq", "replay", config, "--stage", "parse")
    assert (code, err) == (0, "")
    assert "replayed 0 dead letters" in out
    assert "2 remain" in out
    code, out, _ = typed("dlq", "replay", config)
    assert code == 0
    assert "replayed 2 dead letters" in out
    assert "2x fit: key column 'id' is null" in out
    assert json.loads(typed("dlq", "list", config, "--format", "json")[1])["letters"] == 4
    with memwal.open(uri) as table:
        assert sorted(table.scan().read_all().to_pylist(), key=lambda row: row["id"]) == made.rows([1, 2])


def test_replay_leaves_what_another_query_may_repeat(typed: Any, config: Path) -> None:
    Path(load(config, {}).checkpoint, "metadata").write_text('{"id":"another"}')
    code, out, _ = typed("dlq", "replay", config)
    assert code == 0
    assert "6x their micro-batch may not be finished" in " ".join(out.split())
    assert "replayed 2 dead letters" in typed("dlq", "replay", config, "--force")[1]


def test_replay_goes_through_the_daemon_that_owns_the_regions(
    typed: Any, config: Path, serve: Callable[[Path], tuple[Any, str]]
) -> None:
    _, endpoint = serve(config)
    assert "replayed 1 dead letter into" in typed("dlq", "replay", config, "--id", f"0001{'ab' * 8}")[1]
    with memwal.connect(endpoint) as table:
        assert table.scan(["id"]).read_all()["id"].to_pylist() == [2]


def test_purge_deletes_by_age_and_stage(typed: Any, config: Path) -> None:
    assert "1 dead letter older than 30d would be deleted" in typed("dlq", "purge", config, "--dry-run")[1]
    assert "1 dead letter older than 30d deleted" in typed("dlq", "purge", config)[1]
    assert (
        "2 dead letters older than 0s deleted"
        in typed("dlq", "purge", config, "--older-than", "0", "--stage", "fit")[1]
    )
    assert json.loads(typed("dlq", "list", config, "--format", "json")[1])["letters"] == 3


def test_a_mistake_is_one_line(typed: Any, config: Path) -> None:
    not_text = os.fsdecode(b"\xff\xff\xff\xff")
    for arguments, says in (
        (["list", "--stage", "fits"], "did you mean 'fit'"),
        (["list", "--limit", "0"], "--limit"),
        (["list", "--format", "xml"], "--format"),
        (["show", "ffff"], "no dead letter"),
        (["show", "00"], "at least 4"),
        (["show", not_text], "is not UTF-8 text"),
        (["replay", "--id", not_text], "is not UTF-8 text"),
        (["purge", "--older-than", "5"], "--older-than '5' has no unit"),
        (["purge", "--older-than", "soon"], "--older-than 'soon' is not a duration"),
        (["replay", "--stage", "x"], "--stage"),
        (["repair"], "repair"),
    ):
        command, *rest = arguments
        code, out, err = typed("dlq", command, config, *rest)
        assert (code, out, len(err.splitlines())) == (2, "", 1), arguments
        assert says in err


def test_without_letters_there_is_nothing_to_do(typed: Any, small_config: Callable[..., Path]) -> None:
    config = small_config()
    for command, says in (("list", "no dead letters"), ("replay", "no dead letters"), ("purge", "0 dead letters")):
        code, out, err = typed("dlq", command, config)
        assert (code, err) == (0, "")
        assert says in out


def test_a_table_of_something_else_is_refused_before_anything_is_written(
    typed: Any, small_config: Callable[..., Path], tmp_path: Path, tree: Callable[[Path], dict[str, int]]
) -> None:
    import lance

    lance.write_dataset(pa.table({"a": [1]}), str(tmp_path / "other.lance"))
    (tmp_path / "in").mkdir()
    config = small_config(
        dlq={"mode": "table", "uri": str(tmp_path / "other.lance")},
        source={"format": "json", "path": str(tmp_path / "in")},
    )
    before = tree(tmp_path)
    for command in (("dlq", "list", config), ("run", config, "--once")):
        code, _, err = typed(*command)
        assert code == 2
        assert "dlq.uri" in err
        assert len(err.splitlines()) == 1
    assert tree(tmp_path) == before
