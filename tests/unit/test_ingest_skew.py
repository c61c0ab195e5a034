"""Rows that are spread unevenly over the regions: the output of the page, `status`, `config check` and `doctor`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memwal.flush import BaseTable
from memwal.ingest.service.ops.sentence import Situation, health
from memwal.ingest.service.ops.skew import measured


def regions(*rows: int) -> list[dict[str, Any]]:
    return [
        {"bucket": bucket, "rows_put": count, "memtable_rows": 0, "ssts": list[Any]()}
        for bucket, count in enumerate(rows)
    ]


@pytest.mark.parametrize("rows", [(5_000, 0), (9_999, 0, 0), (20_000,), (60_000, 7_000), (60_000, 0, 50_000), ()])
def test_a_spread_that_is_even_or_cannot_be_judged_is_not_mentioned(rows: tuple[int, ...]) -> None:
    assert measured(regions(*rows)) == ""


@pytest.mark.parametrize(
    ("rows", "said"), [((0, 10_000), "region 1 has 100 %"), ((50_000, 4_900, 0), "region 0 has 91 %")]
)
def test_one_region_far_above_the_others_is_named_with_the_remedy(rows: tuple[int, ...], said: str) -> None:
    text = measured(regions(*rows))
    assert text.startswith(said)
    assert "new table of wal.format = 'lance'" in text
    shown = health(Situation(skewed=text))
    assert (shown["state"], shown["reason"]) == ("warning", "skewed")
    assert said in shown["text"].replace("Region", "region")


def test_rows_that_are_not_committed_count_where_the_owner_says_no_more() -> None:
    uncommitted = {"ssts": [{"rows": 12_000, "committed": False}, {"rows": 10**6, "committed": True}]}
    first, second = regions(0, 0)
    assert "region 0 has 100 % of the last 12,000 rows" in measured([first | uncommitted, second])


CASES = {
    "arrow": (["name", "id"], "arrow", 2, True),
    "lance": (["name", "id"], "lance", 2, False),
    "one key column": (["id"], "arrow", 2, False),
    "one region": (["name", "id"], "arrow", 1, False),
}


@pytest.mark.parametrize("exists", [False, True], ids=["no table", "a table"])
@pytest.mark.parametrize("case", CASES)
def test_config_check_and_doctor_warn_where_the_first_key_column_alone_decides(
    small_config: Callable[..., Path], cli: Callable[..., Any], exists: bool, case: str
) -> None:
    key, wal_format, count, warned = CASES[case]
    config = small_config(table={"key": key}, wal={"format": wal_format}, regions={"count": count})
    if exists:
        assert cli("init", config).code == 0
    checked, examined = cli("config", "check", config), cli("doctor", config)
    told = f"the first key column 'name' alone decides which of the {count} regions a row goes to"
    assert checked.code == 0
    assert (told in checked.out, told in examined.out) == (warned, warned)
    assert ("wal.format = 'lance'" in checked.out) == warned


def test_a_table_of_an_older_version_is_warned_of_too(
    small_config: Callable[..., Path], cli: Callable[..., Any], uri: str
) -> None:
    config = small_config(table={"key": ["name", "id"]}, regions={"count": 2})
    assert cli("init", config).code == 0
    BaseTable.open(uri).dataset.update_schema_metadata({"memwal:routed_by": None, "memwal:storage": None})
    assert "the first key column 'name' alone decides" in cli("config", "check", config).out
