"""`config check` reports all errors of `run` at once and only reads; it reports changed indexes instead of ignoring
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.settings.sections import SourceSettings
from memwal.ingest.spark.names import misspelt

FOUND = [
    ({"source": {"path": "absent"}}, ["source.path: absent: No such file or directory"]),
    ({"source": {"path": "in", "options": {"user": "env:NO_SUCH_NAME"}}}, ["[source] options.user", "NO_SUCH_NAME"]),
    ({"daemon": {"token": "env:NO_SUCH_NAME"}}, ["daemon.token", "NO_SUCH_NAME is not set"]),
    ({"daemon": {"tls_ca": "absent.pem"}}, ["daemon.tls_ca: absent.pem"]),
    ({"daemon": {"host": "0.0.0.0"}}, ["daemon.host: 0.0.0.0 is not a loopback address", "set daemon.token"]),
    ({"sink": {"http_port": 0, "http_host": "0.0.0.0"}}, ["sink.http_host: 0.0.0.0 is not a loopback address"]),
    ({"table": {"uri": "gs://bucket/t.lance"}}, ["gs://bucket/t.lance", "'gs' is not supported"]),
    ({"table": {"uri": "s3a://bucket/t.lance"}}, ["write s3://"]),
    ({"source": {"path": "in", "format": "parqet"}}, ["source.format", "did you mean 'parquet'"]),
    ({"source": {"path": "in", "options": {"maxFilesPerTriger": "1"}}}, ["did you mean 'maxFilesPerTrigger'"]),
    ({"source": {"path": "in", "spark": {"spark.mastr": "local[2]"}}}, ["did you mean 'spark.master'"]),
    ({"source": {"path": "in", "spark": {"master": "local[2]"}}}, ["begin with 'spark.'"]),
    ({"flush": {"page_size": "9000000TiB"}}, ["[flush] page_size", "too large"]),
    ({"flush": {"storage_version": "2.0", "compression": {"*": "fsst"}}}, ["[flush] storage_version = '2.0'"]),
]


@pytest.mark.parametrize(("changes", "texts"), FOUND)
def test_what_run_would_say(
    changes: dict[str, Any],
    texts: list[str],
    small_config: Callable[..., Path],
    cli: Callable[..., Any],
    tmp_path: Path,
    tree: Callable[[Path], dict[str, int]],
) -> None:
    (tmp_path / "in").mkdir()
    config = small_config(**changes)
    before = tree(tmp_path)
    ran = cli("config", "check", config, cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.error_lines) == 1
    assert all(text in ran.error_lines[0] for text in (str(config), *texts))
    assert tree(tmp_path) == before


def test_run_says_the_same_and_writes_nothing(
    small_config: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path, uri: str
) -> None:
    (tmp_path / "in").mkdir()
    ran = cli("run", small_config(source={"path": "in", "spark": {"spark.mastr": "local[2]"}}), cwd=tmp_path)
    assert ran.code == 2
    assert "did you mean 'spark.master'" in ran.error_lines[0]
    assert not Path(uri).exists()


def test_all_of_it_at_once(small_config: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path) -> None:
    config = small_config(
        source={"path": "absent", "options": {"multiLien": "true"}}, daemon={"token": "env:NO_SUCH_NAME"}
    )
    said = cli("config", "check", config, cwd=tmp_path).err
    assert [text for text in ("absent", "multiLine", "NO_SUCH_NAME") if text not in said] == []
    ran = cli("config", "check", small_config(comit={"interval": "1s"}), env={"MEMWAL__DAEMON__PRT": "1"})
    assert [text for text in ("comit", "commit", "PRT", "port") if text not in ran.err] == []


def test_a_daemon_that_runs_does_not_make_its_configuration_wrong(
    small_config: Callable[..., Path], serve: Callable[..., Any], cli: Callable[..., Any]
) -> None:
    from tests.s3_server import free_ports

    config = small_config(daemon={"port": free_ports(1)[0]})
    serve(config)
    ran = cli("config", "check", config)
    assert (ran.code, ran.err, ran.out) == (0, "", f"{config}: ok\n")


@pytest.mark.parametrize(
    "source",
    [
        {"format": "custom", "options": {"mod": "x"}},
        {"format": "json", "options": {"MULTILINE": "true", "vendorOption": "1", "mode": "PERMISSIVE"}},
        {
            "spark": {
                "spark.driver.host": "h",
                "spark.driver.port": "1",
                "spark.hadoop.fs.s3a.path.style.access": "true",
            }
        },
        {"format": "rate", "options": {"rowsPerSecond": "5"}},
    ],
)
def test_what_spark_or_a_plugin_may_know_is_no_slip(source: dict[str, Any]) -> None:
    assert list(misspelt(SourceSettings.model_validate(source))) == []


@pytest.mark.parametrize(
    ("indexes", "text"),
    [
        ({"vector": "ivf_pq", "body": "btree", "price": "btree"}, "indexes.body is btree, but .* has fts on it"),
        (
            {"vector": "ivf_pq", "body": "fts", "price": "btree", "name": "btree"},
            "indexes.name .* has none on this col",
        ),
        (
            {"vector": {"type": "ivf_pq", "metric": "cosine"}, "body": "fts", "price": "btree"},
            "indexes.vector: metric = 'cosine', but 'l2' in the table",
        ),
    ],
)
def test_changed_indexes_are_refused(
    indexes: Any, text: str, small_config: Callable[..., Path], cli: Callable[..., Any]
) -> None:
    first = {"vector": {"type": "ivf_pq", "metric": "l2"}, "body": "fts", "price": "btree"}
    config = small_config()
    for _ in range(2):
        assert cli("init", config, env={"MEMWAL__TABLE__INDEXES": json.dumps(first)}).code == 0
    fewer = {"vector": "ivf_pq"}  # other indexes may have been added later
    assert cli("init", config, env={"MEMWAL__TABLE__INDEXES": json.dumps(fewer)}).code == 0
    for command in (("init",), ("config", "check")):
        ran = cli(*command, config, env={"MEMWAL__TABLE__INDEXES": json.dumps(indexes)})
        assert ran.code == 2
        (line,) = ran.error_lines
        assert re.search(text, line), line
