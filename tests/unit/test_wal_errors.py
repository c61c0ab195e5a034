"""The part of another library's error that memwal shows."""

from __future__ import annotations

import pytest

from memwal.wal.errors import first_line


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            (
                "Not found: t.lance/_versions, /build/lance/rust/lance-table/src/io/commit.rs:653:26, "
                "/build/lance/rust/lance/src/dataset/builder.rs:921:29"
            ),
            "Not found: t.lance/_versions",
        ),
        (
            "cannot read /data/a, /data/b and /data/c.rs: permission denied",
            "cannot read /data/a, /data/b and /data/c.rs: permission denied",
        ),
        (
            "no such column, /price/: one of /id, /n, /build/lance/rust/lance/src/scanner.rs:12:3",
            "no such column, /price/: one of /id, /n",
        ),
        ("\n first \nsecond, /a/b.rs:1:2", "first "),
        ("", "ValueError"),
        ("  ", "ValueError"),
    ],
)
def test_the_first_line_is_shown_without_lances_source_location(message: str, shown: str) -> None:
    assert first_line(ValueError(message)) == shown
