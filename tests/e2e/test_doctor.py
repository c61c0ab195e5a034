"""`memwal doctor` names what is wrong with the machine or the configuration, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memwal import wal
from memwal.ingest.cli import doctor
from memwal.ingest.cli.doctor import Finding, examine
from memwal.ingest.settings.load import load
from tests.conftest import toml
from tests.s3_place import on_s3


def findings(config: Path) -> dict[str, Finding]:
    """Return the finding of each check by name; of several lines of one check, the last one."""
    found: dict[str, Finding] = {}
    examine(load(config, os.environ), os.environ, lambda each: found.update({each.check: each}))
    return found


def test_a_sound_machine_passes_and_nothing_is_left(
    small_config: Callable[..., Path],
    cli: Callable[..., Any],
    tmp_path: Path,
    tree: Callable[[Path], dict[str, int]],
) -> None:
    config = small_config()
    before = tree(tmp_path)
    ran = cli("doctor", config, cwd=tmp_path)
    assert (ran.code, ran.error_lines) == (0, [])
    lines = ran.out.splitlines()
    assert lines[0] == str(config)
    assert lines[-1] == "everything is as it should be"
    assert all(line.startswith("  ok ") for line in lines[1:-1])
    for told in ("libraries", "addresses", "conditional writes work", "does not exist yet", "GB free at", "open files"):
        assert told in ran.out
    assert tree(tmp_path) == before


def test_what_is_wrong_is_told_with_the_rest_and_the_exit_code_is_2(
    small_config: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path
) -> None:
    config = small_config(source={"path": "absent"}, daemon={"token": "env:NO_SUCH_NAME"})
    ran = cli("doctor", config, "--json", cwd=tmp_path)
    assert ran.code == 2
    ((name, told),) = json.loads(ran.out).items()
    assert name == str(config)
    wrong = {each["check"]: each["text"] for each in told if each["state"] == "wrong"}
    assert "NO_SUCH_NAME is not set; set it" in wrong["addresses"] + wrong.get("secrets", "")
    assert {"Java", "PySpark", "storage", "disk"} <= {each["check"] for each in told if each["state"] == "ok"}
    shown = cli("doctor", config, cwd=tmp_path).out.splitlines()
    assert shown[-1].endswith("each line names its remedy")


def test_the_daemon_of_a_table_is_named(serve: Callable[..., Any], small_config: Callable[..., Path]) -> None:
    config = small_config()
    assert findings(config).get("daemons") is None
    _, endpoint = serve(config)
    assert findings(config)["daemons"] == Finding("daemons", "ok", f"1 daemon found: {endpoint}")


def test_a_storage_without_conditional_writes_is_refused(
    small_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrites(self: wal.LocalStore, key: str, data: bytes) -> wal.PutOutcome:
        self.put(key, data)
        return wal.PutOutcome.CREATED

    monkeypatch.setattr(wal.LocalStore, "put_if_absent", overwrites)
    found = findings(small_config())["storage"]
    assert found.state == "wrong"
    assert "exactly one must win" in found.text


@pytest.mark.parametrize(("off", "told"), [(400.0, "400 s ahead of"), (-400.0, "400 s behind")])
def test_a_clock_that_is_off_is_told(
    small_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, off: float, told: str
) -> None:
    now = wal.SystemClock.now
    monkeypatch.setattr(wal.SystemClock, "now", lambda self: now(self) + off)
    found = findings(small_config())["storage"]
    assert found.state == "wrong"
    assert told in found.text


def test_limits_of_the_machine_are_notices(
    small_config: Callable[..., Path], cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(table={"cache_max": "100TiB"})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(doctor, "DISK_LEAST", 1 << 60)
    found = findings(config)
    assert {found[name].state for name in ("memory", "open files", "disk")} == {"notice"}
    assert "lower one of table.cache_max" in found["memory"].text
    assert "may open 256 files; allow 1024" in found["open files"].text
    assert "free some" in found["disk"].text


def test_a_library_of_another_version_is_named(
    small_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "1.0" if name == "pyarrow" else real(name))
    found = findings(small_config())["libraries"]
    assert found.state == "wrong"
    assert "pyarrow 1.0 (needs >=26)" in found.text


def test_a_table_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_s3(tmp_path) as place:
        for name, value in place.environ.items():
            monkeypatch.setenv(name, value)
        config = tmp_path / "s3.toml"
        config.write_text(toml({"table": {**place.section, "key": ["id"], "columns": {"id": "int64"}}}))
        found = findings(config)
    assert found["storage"].state == "ok", found["storage"].text
    assert found["disk"].text.endswith("/tmp") or "free at" in found["disk"].text
