"""Pause, resume, flush and commit by an operator: by command and over HTTP, at a real daemon and a real run."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import memwal
from memwal.ingest.service.rpc.guard import Guard
from tests.conftest import Cli, OpenSmall, Running, SmallConfig, Start, small_sections, toml, wait_until
from tests.integration.test_roles import ENV, SETTINGS, TOKENS
from tests.page_site import JSON, Site

PATHS = ("/pause", "/resume", "/flush", "/commit")


@pytest.fixture
def guarded(site: Callable[..., Site], open_small: OpenSmall, made: Any) -> tuple[Any, Site]:
    """Serve a table with rows in memtables, with pages that require tokens with roles."""
    table = open_small()
    table.put(made.rows(range(12)))
    return table, site(table, guard=Guard.of(SETTINGS, ENV))


def as_role(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[role]}"}


def state(table: Any) -> Any:
    told = table.status()
    return told["paused"], told["base_version"], [region["memtable_rows"] for region in told["regions"]]


# ---- permissions -----------------------------------------------------------------------------------------------------


def test_only_admins_may_and_each_refusal_is_logged(
    guarded: tuple[Any, Site], caplog: pytest.LogCaptureFixture
) -> None:
    table, site = guarded
    before = state(table)
    with caplog.at_level(logging.INFO, "memwal.access"):
        for path in PATHS:
            status, _, told = site.ask("POST", path, **as_role("read"))
            assert (status, told["error"]["kind"]) == (403, "INVALID")
            assert f"'read', and POST {path} needs 'admin'" in told["error"]["message"]
            assert site.ask("POST", path, **as_role("write"))[0] == 403
            assert site.ask("POST", path)[0] == site.ask("POST", path, Authorization="Bearer other")[0] == 401
            status, headers, _ = site.ask("GET", path, **as_role("admin"))
            assert (status, headers["Allow"]) == (405, "POST")
    assert state(table) == before
    assert {record.event for record in caplog.records} == {"refused"}  # type: ignore[attr-defined]
    assert not any(token in caplog.text for token in TOKENS.values())


def test_the_page_of_another_site_may_not_even_without_a_token(
    guarded: tuple[Any, Site], site: Callable[..., Site]
) -> None:
    table, with_tokens = guarded
    before, open_to_all = state(table), site(table)
    evil = {"Origin": "http://evil.example"}
    for path in PATHS:
        assert with_tokens.ask("POST", path, **as_role("admin"), **evil)[0] == 403
        assert open_to_all.ask("POST", path, **evil)[0] == open_to_all.ask("POST", path, Origin="null")[0] == 403
        named = {"Host": "evil.example", "Origin": "http://evil.example"}  # a foreign name that points to this server
        assert open_to_all.ask("POST", path, **named)[0] == 403
        form = {"Content-Type": "text/plain"}  # forms of any page can send it without a preflight request
        assert open_to_all.ask("POST", path, b'{"reason": "x"}', **form)[0] == 400
    assert state(table) == before
    assert open_to_all.ask("POST", "/flush", Origin=f"http://127.0.0.1:{open_to_all.port}")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/pause", b"{", "not JSON"),
        ("/pause", b"[" * 9000, "not JSON"),
        ("/pause", [], "no object"),
        ("/pause", {"what": "everything"}, "write one of ingestion, commits"),
        ("/pause", {"why": "x"}, "/pause takes what and reason, and not 'why'"),
        ("/resume", {"reason": "x"}, "/resume takes what, and not 'reason'"),
        ("/pause", {"reason": 7}, "reason: write a text"),
        ("/commit", {"what": "all"}, "/commit takes no fields"),
    ],
)
def test_a_wrong_body_is_told_in_one_line_and_changes_nothing(
    guarded: tuple[Any, Site], path: str, body: Any, says: str
) -> None:
    table, site = guarded
    before = state(table)
    status, _, told = site.ask("POST", path, body, **JSON, **as_role("admin"))
    assert status == 400
    assert says in told["error"]["message"]
    assert "\n" not in told["error"]["message"]
    assert state(table) == before


def test_before_the_table_is_open_it_is_said_so(site: Callable[..., Site]) -> None:
    starting = site()
    for path in PATHS:
        status, _, told = starting.ask("POST", path)
        assert (status, told["error"]["kind"]) == (503, "UNAVAILABLE")


# ---- effects ---------------------------------------------------------------------------------------------------------


def test_flush_and_commit_over_http_say_what_was_done(
    guarded: tuple[Any, Site], caplog: pytest.LogCaptureFixture
) -> None:
    table, site = guarded
    with caplog.at_level(logging.INFO, "memwal.access"):
        assert site.ask("POST", "/flush", **as_role("admin"))[2] == {"rows": 12, "regions": 2}
        status, _, told = site.ask("POST", "/commit", {}, **as_role("admin"))
        assert site.ask("POST", "/commit", **as_role("admin"))[2]["ssts"] == 0
    assert (status, told["rows_inserted"], told["ssts"]) == (200, 12, 2)
    assert told["version"] == table.status()["base_version"]
    assert table.count(level="committed") == 12
    told = [(each.call, each.peer) for each in caplog.records]  # type: ignore[attr-defined]
    assert told == [(f"POST {path}", "127.0.0.1") for path in ("/flush", "/commit", "/commit")]


def test_who_asks_for_a_commit_while_one_runs_gets_its_answer(guarded: tuple[Any, Site]) -> None:
    table, site = guarded
    table.flush()
    answers, server = list[Any](), site.server.runner.server

    def ask() -> None:
        answers.append(site.ask("POST", "/commit", **as_role("admin")))

    asking = [threading.Thread(target=ask) for _ in range(2)]
    with table._commits.alone:  # the table itself is committing
        for number, thread in enumerate(asking, 1):
            thread.start()
            wait_until(lambda number=number: server.requests_count == number)
        assert site.ask("GET", "/live", **as_role("read"))[0] == 200, "nothing else waits"
    for thread in asking:
        thread.join()
    (one, other) = sorted((each for _, _, each in answers), key=len)
    assert other == one | {"joined": True}
    assert one["rows_inserted"] == table.count(level="committed") == 12


def test_a_commit_that_fails_is_told_in_one_line(guarded: tuple[Any, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    table, site = guarded
    table.flush()

    def conflict(*_: Any, **__: Any) -> None:
        raise memwal.flush.CommitConflict("other writers keep committing; nothing is lost, commit again")

    with monkeypatch.context() as other:
        other.setattr("memwal.flush.commit", conflict)
        status, _, told = site.ask("POST", "/commit", **as_role("admin"))
    assert (status, told["error"]["kind"]) == (503, "UNAVAILABLE")
    assert told["error"]["message"].splitlines() == ["other writers keep committing; nothing is lost, commit again"]
    assert site.ask("POST", "/commit", **as_role("admin"))[2]["rows_inserted"] == 12


def test_a_second_pause_and_a_second_resume_say_so(guarded: tuple[Any, Site]) -> None:
    _, site = guarded
    asked = {"what": "commits", "reason": "the table is rewritten"}
    first = site.ask("POST", "/pause", asked, **as_role("admin"))[2]
    assert (first["already"], first["by"]) == (False, "127.0.0.1 over HTTP")
    again = site.ask("POST", "/pause", {"what": "commits", "reason": "other"}, **as_role("admin"))[2]
    assert again == first | {"already": True}
    assert site.ask("POST", "/resume", **as_role("admin"))[2] == {"what": "ingestion", "paused": False, "already": True}
    ended = site.ask("POST", "/resume", {"what": "commits"}, **as_role("admin"))[2]
    assert ended == first | {"paused": False, "already": False}
    assert site.ask("POST", "/resume", {"what": "commits"}, **as_role("admin"))[2]["already"]


def test_paused_is_said_by_page_readiness_metrics_and_status(
    guarded: tuple[Any, Site], cli: Cli, small_config: SmallConfig
) -> None:
    table, site = guarded
    config = small_config()
    assert "paused" not in site.ask("GET", "/health/readyz", **as_role("read"))[2]
    out = cli("pause", config, "--commits", "--reason", "the table is rewritten").out
    assert "commits are paused since" in out
    assert "memwal resume CONFIG --commits" in out
    wait_until(table.pauses.recent)
    status, _, ready = site.ask("GET", "/health/readyz", **as_role("read"))
    assert (status, ready["ready"], ready["paused"]["commits"]["reason"]) == (200, True, "the table is rewritten")
    health = site.ask("GET", "/live", **as_role("read"))[2]["health"]
    assert (health["state"], health["title"]) == ("busy", "Commits are paused")
    assert "the table is rewritten." in health["text"]
    metrics = site.ask("GET", "/metrics", **as_role("read"))[2]
    assert 'memwal_paused{what="commits"} 1.0' in metrics
    assert 'memwal_paused{what="ingestion"} 0.0' in metrics
    assert site.ask("GET", "/status", **as_role("read"))[2]["paused"] == ready["paused"]
    assert "commits are paused already since" in cli("pause", config, "--commits").out
    shown = cli("status", config).out
    assert "commits are paused since" in shown
    assert "the table is rewritten" in shown
    for command in (("verify", "--deep"), ("gc",)):
        assert cli(command[0], config, *command[1:]).code == 0, "a pause is no orphan"
    assert "ingestion is not paused" in (said := cli("resume", config).out)
    assert "`memwal resume CONFIG --commits` ends that pause" in said
    assert "commits resumed after" in cli("resume", config, "--commits").out
    assert "commits are not paused" in cli("resume", config, "--commits").out
    assert json.loads(cli("status", config, "--json").out)["paused"] == {}


def test_a_pause_of_a_table_that_does_not_exist_is_refused(cli: Cli, small_config: SmallConfig) -> None:
    for command in ("pause", "resume"):
        ran = cli(command, small_config())
        assert (ran.code, len(ran.error_lines)) == (2, 1)
        assert "does not exist" in ran.err


# ---- a daemon --------------------------------------------------------------------------------------------------------


def posted(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, JSON, method="POST"), timeout=60) as answer:
        return json.load(answer)


def got(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.load(answer)


def test_a_daemon_commits_nothing_by_itself_while_paused_also_after_a_restart(
    start: Start, small_config: SmallConfig, made: Any
) -> None:
    config = small_config(daemon={"http_port": 0}, commit={"interval": "200ms"}, log={"level": "info"})

    def served() -> tuple[Running, str, Any]:
        running = start([sys.executable, "-m", "memwal.ingest.cli.app", "serve", str(config)])
        url = running.line_with("metrics, health and status at").rsplit(" ", 1)[1]
        return running, url, memwal.connect(running.line_with("serving").rsplit(" ", 1)[1])

    def behind(url: str) -> float:
        return max(region["behind"]["committed"] for region in got(url, "/status")["regions"])

    running, url, table = served()
    assert not posted(url, "/pause", {"what": "commits", "reason": "the table is rewritten"})["already"]
    table.put(made.rows(range(8)))
    wait_until(lambda: behind(url) > 1)  # five times the interval
    assert table.count(level="committed") == 0
    assert posted(url, "/flush")["rows"] == 8
    assert posted(url, "/commit")["rows_inserted"] == 8, "somebody asked for it"
    table.put(made.rows(range(8, 16)))
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    assert any("admin: POST /pause by 127.0.0.1" in line for line in running.log)

    running, url, table = served()
    wait_until(lambda: behind(url) > 1)
    assert table.count(level="committed") == 8
    assert got(url, "/health/readyz")["paused"]["commits"]["reason"] == "the table is rewritten"
    posted(url, "/resume", {"what": "commits"})
    wait_until(lambda: table.count(level="committed") == 16)


# ---- a run -----------------------------------------------------------------------------------------------------------


class Run:
    """A `memwal run` of small files, one per micro-batch, so that its source always has more."""

    def __init__(self, home: Path, start: Start) -> None:
        self.config, self._source, self._start = home / "run.toml", home / "source", start
        self._source.mkdir()
        sections = small_sections(str(home / "t.lance"))
        sections["table"] |= {"columns": {"id": "int64", "name": "string"}, "indexes": {}}
        sections["source"] = {
            "format": "json",
            "path": str(self._source),
            "trigger": "50ms",
        }
        sections["sink"] = {"http_port": 0, "checkpoint": str(home / "checkpoint")}
        self.config.write_text(toml(sections))
        self.checkpoint, self.landed = home / "checkpoint", 0

    def land(self, files: int) -> None:
        """Put files of ten rows into the source."""
        for number in range(self.landed, self.landed + files):
            lines = [json.dumps({"id": number * 10 + each, "name": "a"}) for each in range(10)]
            hidden = self._source / f".{number:05d}.json"
            hidden.write_text("\n".join(lines))
            hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        self.landed += files

    def begin(self, *options: str, files_per_trigger: int = 1) -> Running:
        env = {"MEMWAL__SOURCE__FILES_PER_TRIGGER": str(files_per_trigger)}
        command = [sys.executable, "-m", "memwal.ingest.cli.app", "run", str(self.config), *options]
        running = self._start(command, env=env)
        self.url = running.line_with("metrics, health and status at").rsplit(" ", 1)[1]
        return running

    @property
    def status(self) -> Mapping[str, Any]:
        told: Mapping[str, Any] = got(self.url, "/status")
        return told

    def noted(self, folder: str) -> int:
        """Return the newest micro-batch that Spark has recorded as begun (offsets) or done (commits)."""
        return max(int(file.name) for file in (self.checkpoint / folder).iterdir() if file.name.isdecimal())


def test_a_paused_run_begins_no_micro_batch_until_it_is_resumed(tmp_path: Path, start: Start, cli: Cli) -> None:
    run = Run(tmp_path, start)
    run.land(30)
    running = run.begin("--once")
    wait_until(lambda: run.status["micro_batches"] >= 2)
    assert "ingestion is paused since" in cli("pause", run.config, "--reason", "the brokers are moved").out
    wait_until(lambda: run.status["ingestion"] == "paused")
    done = run.status
    assert done["micro_batches"] < 30, "the source is not drained, and the run goes on"
    assert run.noted("commits") == done["batch_id"], "the one under way was finished, and is noted"
    begun = run.noted("offsets")
    assert running.line_with("ingestion is paused since").endswith("the brokers are moved")

    posted(run.url, "/flush")  # the regions, reads and commits continue
    posted(run.url, "/commit")
    with memwal.connect(str(tmp_path / "t.lance")) as table:
        assert table.count(level="committed") == done["rows"]
        table.put([{"id": -1, "name": "by hand"}])
    ready, health = got(run.url, "/health/readyz"), got(run.url, "/live")["health"]
    assert (ready["ready"], ready["paused"]["ingestion"]["reason"]) == (True, "the brokers are moved")
    assert (health["state"], health["title"]) == ("busy", "Ingestion is paused")
    with urllib.request.urlopen(f"{run.url}/metrics", timeout=60) as answer:
        assert 'memwal_paused{what="ingestion"} 1.0' in answer.read().decode()
    assert (run.status["micro_batches"], run.noted("offsets")) == (done["micro_batches"], begun)

    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    assert running.errors == []
    refused = cli("run", run.config, "--once")
    assert (refused.code, len(refused.error_lines)) == (1, 1)
    assert "ingestion is paused since" in refused.err
    run.land(1)
    running = run.begin(files_per_trigger=100)
    running.line_with("ingestion is paused since")
    assert (run.status["micro_batches"], run.noted("offsets")) == (0, begun), "a restart resumes nothing"

    assert not posted(run.url, "/resume")["already"]
    wait_until(lambda: run.status["micro_batches"] and run.status["rows"] + done["rows"] >= run.landed * 10)
    assert run.status["ingestion"] == "running"
    with memwal.connect(str(tmp_path / "t.lance")) as table:
        found = sorted(table.scan(["id"]).read_all()["id"].to_pylist())
    assert found == [-1, *range(run.landed * 10)]
    assert run.status["rows_repeated"] == 0
    assert running.errors == []


def test_a_run_whose_commits_are_paused_ends_without_its_commit(tmp_path: Path, start: Start, cli: Cli) -> None:
    run = Run(tmp_path, start)
    run.land(2)
    assert cli("init", run.config).code == 0
    cli("pause", run.config, "--commits", "--reason", "the table is rewritten")
    ran = cli("run", run.config, "--once")
    assert ran.code == 0, ran.err
    assert "commits are paused since" in ran.out
    assert "the table is rewritten; the rows stay in SSTs, where reads find them" in ran.out
    with memwal.open(tmp_path / "t.lance", read_only=True) as table:
        assert (table.count(level="flushed"), table.count(level="committed")) == (20, 0)
