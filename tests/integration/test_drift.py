"""Fields that come up while a stream runs: a column from then on, or the end of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance


def test_new_fields_become_columns_and_no_row_is_lost_or_doubled(
    small_config: Callable[..., Path], memwal: Callable[..., Any], tmp_path: Path, uri: str
) -> None:
    (tmp_path / "in").mkdir()

    def land(number: int, *rows: dict[str, Any]) -> None:
        (tmp_path / "in" / f"{number}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def configured(drift: str) -> Path:
        columns = {"append_only": True, "columns": {"id": "int64", "name": "string"}, "key": [], "indexes": {}}
        source = {"format": "json", "path": str(tmp_path / "in"), "schema_drift": drift}
        return small_config(table=columns, source=source)

    def rows() -> list[dict[str, Any]]:
        return sorted(lance.dataset(uri).to_table().to_pylist(), key=lambda row: row["id"])

    land(0, *({"id": id, "name": "a"} for id in range(10)))
    land(1, *({"id": id, "name": "b", "grade": id} for id in range(10, 20)), {"id": 20, "more": {"deep": 1}})
    land(2, {"id": 21, "grade": 7, "note": "n"})
    ran = memwal("run", configured("add"), "--once")
    assert (ran.code, ran.error_lines) == (0, [])
    assert "new columns: grade" in ran.out
    assert "new columns: note" in ran.out
    nothing = {"name": None, "grade": None, "note": None}
    first = [{**nothing, "id": id, "name": "a"} for id in range(10)]
    second = [{**nothing, "id": id, "name": "b", "grade": id} for id in range(10, 20)] + [{**nothing, "id": 20}]
    expected = [*first, *second, {**nothing, "id": 21, "grade": 7, "note": "n"}]
    assert rows() == expected

    land(3, {"id": 22, "late": 1.5})
    ran = memwal("run", configured("fail"), "--once")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "late (double)" in ran.err
    assert "source.schema_drift" in ran.err
    assert rows() == expected
