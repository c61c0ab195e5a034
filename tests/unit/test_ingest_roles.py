"""Roles by token, and tokens that change in their files."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from memwal.ingest.errors import Invalid
from memwal.ingest.service.rpc.guard import GRACE, LOOK_EVERY, Grant, Guard, Tokens, permits
from memwal.ingest.settings.sections import DaemonSettings, Role
from tests.messages import raises
from tests.support.clock import FakeClock

ENV = {"ADMIN": "the-admins-token", "WRITER": "the-writers-token", "READER": "the-readers-token"}
SETTINGS = {"token": "env:ADMIN", "write_token": "env:WRITER", "read_token": "env:READER"}


def tokens(**settings: Any) -> Tokens:
    return Tokens(DaemonSettings(**settings), ENV, FakeClock())


def role_of(grant: Grant | None) -> Role | None:
    return None if grant is None else grant.role


@pytest.mark.parametrize(
    ("sent", "role"),
    [
        ("the-admins-token", "admin"),
        ("the-writers-token", "write"),
        ("the-readers-token", "read"),
        ("the-readers-toke", None),
        ("", None),
    ],
)
def test_a_token_has_the_role_of_its_setting(sent: str, role: Role | None) -> None:
    assert role_of(tokens(**SETTINGS).grant(sent.encode())) == role


def test_a_role_that_is_not_configured_is_nobodys() -> None:
    only = tokens(token="env:ADMIN")
    assert only.grant(b"the-admins-token") == Grant("admin")
    assert only.grant(b"the-readers-token") is only.grant(b"") is None


@pytest.mark.parametrize(
    ("role", "may"), [("read", {"read"}), ("write", {"read", "write"}), ("admin", {"read", "write", "admin"})]
)
def test_a_role_permits_what_is_below_it(role: Role, may: set[Role]) -> None:
    every: tuple[Role, ...] = ("read", "write", "admin")
    assert {wanted for wanted in every if permits(role, wanted)} == may


def test_one_token_for_two_roles_is_refused() -> None:
    with raises(Invalid):
        tokens(token="env:ADMIN", read_token="env:ADMIN")


def test_headers_are_read_as_before() -> None:
    guard = Guard.of(DaemonSettings(**SETTINGS), ENV)
    assert guard.grant("Bearer the-readers-token") == guard.grant("bearer  the-readers-token ") == Grant("read")
    assert guard.grant("Basic the-readers-token") is guard.grant(None) is guard.grant("the-readers-token") is None
    assert Guard().grant(None) == Grant("admin")
    assert "the-" not in repr(guard)


class File:
    """A token in a file, and the clock that decides when the file is read again."""

    def __init__(self, at: Path) -> None:
        self.path, self.clock = at / "token", FakeClock()
        self.written = 0
        self.write("first")
        settings = DaemonSettings(token="env:ADMIN", read_token=f"file:{self.path}")
        self.tokens = Tokens(settings, ENV, self.clock)

    def write(self, text: str) -> None:
        self.path.write_text(text + "\n")
        self.written += 1
        os.utime(self.path, ns=(self.written, self.written))  # file systems distinguish times by milliseconds

    def role(self, sent: str) -> Role | None:
        return role_of(self.tokens.grant(sent.encode()))


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


def test_a_changed_file_changes_the_token_and_the_one_before_runs_out(file: File) -> None:
    file.write("second")
    assert (file.role("first"), file.role("second")) == ("read", None), "it is looked at once a second"
    file.clock.advance(LOOK_EVERY)
    assert (file.role("second"), file.role("first")) == ("read", "read")
    file.clock.advance(GRACE - LOOK_EVERY)
    assert (file.role("second"), file.role("first")) == ("read", "read")
    file.clock.advance(LOOK_EVERY)
    assert (file.role("second"), file.role("first")) == ("read", None)


def test_a_token_replaced_twice_takes_the_last_two(file: File) -> None:
    for text in ("second", "third"):
        file.write(text)
        file.clock.advance(LOOK_EVERY)
        file.role("")
    assert [file.role(text) for text in ("first", "second", "third")] == [None, "read", "read"]


@pytest.mark.parametrize("text", [None, "", "the-admins-token"], ids=["gone", "empty", "another role's"])
def test_a_file_that_cannot_be_used_leaves_the_token_in_force(
    file: File, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if text is None:
        file.path.unlink()
    else:
        file.write(text)
    with caplog.at_level(logging.WARNING, "memwal.access"):
        for _ in range(3):
            file.clock.advance(LOOK_EVERY)
            assert file.role("first") == "read"
    assert len(caplog.records) == 1, "told once, not every second"
    assert "the token before stays in force" in caplog.text
    assert "the-admins" not in caplog.text
    file.write("second")
    file.clock.advance(LOOK_EVERY)
    assert file.role("second") == "read"


def test_a_file_that_can_be_read_again_is_read_again(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a chmod neither the time nor the size of the file changes."""
    file.write("second")

    def refuse(self: Path, **_: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        patched.setattr(Path, "read_bytes", refuse)
        file.clock.advance(LOOK_EVERY)
        assert (file.role("first"), file.role("second")) == ("read", None)
    file.clock.advance(LOOK_EVERY)
    assert file.role("second") == "read"


def test_two_tokens_may_change_places(tmp_path: Path) -> None:
    """One change of both files gives the readers' token to the writers, and a new token to the readers."""
    reader, writer, clock = tmp_path / "reader", tmp_path / "writer", FakeClock()
    reader.write_text("one")
    writer.write_text("two")
    found = Tokens(
        DaemonSettings(token="env:ADMIN", read_token=f"file:{reader}", write_token=f"file:{writer}"), ENV, clock
    )
    reader.write_text("three")
    writer.write_text("one")
    for path in (reader, writer):
        os.utime(path, ns=(1, 1))
    clock.advance(LOOK_EVERY)
    assert (role_of(found.grant(b"three")), role_of(found.grant(b"one")), role_of(found.grant(b"two"))) == (
        "read",
        "write",
        "write",
    )
    clock.advance(GRACE + LOOK_EVERY)
    assert (role_of(found.grant(b"three")), role_of(found.grant(b"one")), role_of(found.grant(b"two"))) == (
        "read",
        "write",
        None,
    )


def test_the_token_of_admins_is_read_once(tmp_path: Path) -> None:
    """Daemons send the token of admins to one another. A daemon that switched to a new token before the others would be
    cut off."""
    path, clock = tmp_path / "admin", FakeClock()
    path.write_text("first")
    found = Tokens(DaemonSettings(token=f"file:{path}"), {}, clock)
    path.write_text("second")
    os.utime(path, ns=(1, 1))
    for _ in range(3):
        clock.advance(GRACE)
        assert (role_of(found.grant(b"first")), role_of(found.grant(b"second"))) == ("admin", None)


MORE = [
    {"token": "env:ORDERS", "role": "write", "tables": ["orders", "t_*"]},
    {"token": "env:AUDIT", "role": "admin"},
]


def test_a_token_of_the_list_has_its_role_and_tables() -> None:
    environ = ENV | {"ORDERS": "the-orders-token", "AUDIT": "the-auditors-token"}
    found = Tokens(DaemonSettings.model_validate({"token": "env:ADMIN", "tokens": MORE}), environ, FakeClock())
    orders, audit = found.grant(b"the-orders-token"), found.grant(b"the-auditors-token")
    assert (orders, audit) == (Grant("write", ("orders", "t_*")), Grant("admin"))
    assert orders is not None
    assert [name for name in ("orders", "Orders", "orders2", "t_1", "at_1") if orders.covers(name)] == ["orders", "t_1"]
    assert not orders.covers(None), "the whole daemon"
    assert audit is not None
    assert audit.covers(None)


def test_a_token_of_the_list_that_another_setting_has_is_refused() -> None:
    with raises(Invalid):
        Tokens(
            DaemonSettings.model_validate({"token": "env:ADMIN", "tokens": MORE[:1]}), ENV | {"ORDERS": ENV["ADMIN"]}
        )


def test_a_token_that_moves_to_other_tables_has_those(tmp_path: Path) -> None:
    """The rights of the changed files apply at once, also for a token that was in another of them before."""
    files, clock = [tmp_path / "a", tmp_path / "b"], FakeClock()
    for file, text in zip(files, ("one", "two"), strict=True):
        file.write_text(text)
    entries = [{"token": f"file:{file}", "tables": [file.name]} for file in files]
    found = Tokens(DaemonSettings.model_validate({"token": "env:ADMIN", "tokens": entries}), ENV, clock)
    for number, (file, text) in enumerate(zip(files, ("three", "one"), strict=True)):
        file.write_text(text)
        os.utime(file, ns=(number, 1))
    clock.advance(LOOK_EVERY)
    assert [found.grant(each) for each in (b"one", b"two", b"three")] == [
        Grant("read", tuple(tables)) for tables in ("b", "b", "a")
    ]
