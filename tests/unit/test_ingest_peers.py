"""How a daemon interprets the answers of its peers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.flight as flight
import pytest

from memwal.ingest import protocol
from memwal.ingest.engine.region.state import Backlog
from memwal.ingest.errors import Invalid
from memwal.ingest.service.daemon.balancer import Balancer
from memwal.ingest.service.daemon.peers import LOOK_AGAIN, Peer, refuse_other_protocols
from memwal.ingest.service.daemon.placement import REFUSALS, SILENCES, Answer, TableRegion
from memwal.ingest.service.rpc.credentials import Access
from memwal.wal import RegionManifest, Released, bucket_region
from tests.messages import raises
from tests.support.clock import FakeClock

REGION, OTHER = TableRegion("", bucket_region(0)), TableRegion("", bucket_region(1))
REFUSED = flight.FlightUnavailableError("failed to connect to all addresses; Connection refused")
RELEASED = Released(RegionManifest(version=3, writer_epoch=2, region_id=REGION.id, edit_id="a" * 32), position=17)


class Answering(Peer):
    """A peer without a network, which gives one answer or fails."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self.answer, self.asked, self.told = answer, list[dict[str, Any]](), list[tuple[Answer | None, bool]]()
        seen = lambda _, answer, refused: self.told.append((answer, refused))  # noqa: E731
        super().__init__("grpc://127.0.0.1:1", "grpc://127.0.0.1:2", "t", seen, Access())
        self.stop()
        self.told.clear()

    def _act(self, name: str, timeout: float, table: str = "", **request: Any) -> dict[str, Any]:
        self.asked.append({"act": name, **request} | ({"table_name": table} if table else {}))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def look_once(self) -> bool:
        """Look at the peer once, in this thread; return whether it may live."""
        return self._look()

    def understood(self, answer: dict[str, Any]) -> Answer | None:
        return self._understood(answer)

    def seen_by(self, seen: Callable[[Peer, Answer | None, bool], float]) -> None:
        self._seen = seen


class Deciding(Balancer):
    """A balancer of a daemon with one peer; the test makes its steps. Its claims only begin."""

    def __init__(self, peer: Answering, clock: FakeClock) -> None:
        super().__init__("grpc://127.0.0.1:2", [peer.endpoint], clock)
        self.begun = list[TableRegion]()
        self._peers[peer.endpoint] = peer
        peer.seen_by(self._seen)

    def answered(self, peer: Answering, answer: Answer) -> None:
        self._watch.answered(peer.endpoint, answer)

    def step(self) -> None:
        self._step()

    def _begin(self, region: TableRegion, *_: object) -> None:
        self.begun.append(region)


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (RELEASED.to_json(), RELEASED),
        (None, None),  # it ended after a failure of storage, or did not wait for the previous owner
        (True, None),  # a daemon of an earlier release reports only that it has ended
    ],
)
def test_an_owner_that_releases_a_region_tells_what_it_knows(ended: object, told: Released | None) -> None:
    peer = Answering({"epoch": 2, "ended": ended})
    assert peer.ask(REGION, read=16) == told
    assert peer.asked[-1] == {"act": "release", "region": str(REGION.id), "read": 16}


@pytest.mark.parametrize("damage", [lambda text: text[:-4] + "0000", lambda text: text[:7], lambda text: "no hex"])
def test_what_cannot_be_read_counts_as_not_told(damage: Callable[[str], str]) -> None:
    """The peer has already released the region, so the claim continues and reads storage."""
    told = RELEASED.to_json()
    assert Answering({"epoch": 2, "ended": told | {"manifest": damage(told["manifest"])}}).ask(REGION, read=0) is None
    assert Answering({"epoch": 2, "ended": told}).ask(OTHER, read=0) is None
    assert Answering({"epoch": 2}).ask(REGION, read=0) is None


REGIONS: dict[str, Any] = {
    "protocol": str(protocol.OURS),
    "table": "t",
    "regions": {str(REGION.id): 4},
    "claiming": [],
    "draining": False,
    "base_version": 7,
    "waiting": {"ssts": 1, "size": 2, "age": None},
}


@pytest.mark.parametrize(("told", "refused"), [(None, False), ("1.2", False), ("1.3", True), ("2.0", True)])
def test_a_peer_of_another_protocol_lives_and_keeps_its_regions(
    told: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer reports its regions in every version of the protocol, so no daemon takes them for regions of a dead
    daemon."""
    monkeypatch.setattr(protocol, "OURS", protocol.Version(1, 1))
    stated = REGIONS | {"protocol": told}
    peer = Answering(stated)
    later = stated | {"waiting": REGIONS["waiting"] | {"of_a_later_version": 1}, "of_a_later_version": {}}
    for answer in (stated, later):
        assert peer.understood(answer) == Answer({REGION: 4})
    assert (peer.refusal is not None, len(caplog.records)) == (refused, refused)
    assert ("until then it keeps its regions" in caplog.text) == refused


GUARANTEED = {name: REGIONS[name] for name in ("table", "regions", "claiming", "draining")}


@pytest.mark.parametrize(
    "answer",
    [
        GUARANTEED | {"protocol": "9.0"},
        GUARANTEED | {"protocol": "9.0", "waiting": {"ssts": 1}, "base_version": "seven"},
        GUARANTEED | {"protocol": "two"},
        GUARANTEED | {"protocol": [2, 0]},
    ],
)
def test_of_a_peer_of_another_protocol_only_that_is_read_which_never_changes(answer: dict[str, Any]) -> None:
    """Otherwise the peer would count as silent, and other daemons would take its regions while it lives."""
    peer = Answering(REGIONS)
    assert peer.look_once()
    assert peer.backlogs == {"": (Backlog(1, 2, None), 7)}
    peer.answer = answer
    assert peer.look_once()
    assert peer.told == [(Answer({REGION: 4}), False)] * 2
    assert peer.refusal is not None
    assert peer.backlogs == {}


def error_of_daemon(reason: str) -> Exception:
    return flight.FlightServerError(
        "no", json.dumps({"kind": "invalid", "message": "no", "details": {"reason": reason}})
    )


@pytest.mark.parametrize(
    ("error", "denies", "ended"),
    [
        (flight.FlightUnauthenticatedError("no"), True, False),
        (flight.FlightUnavailableError("SSL: certificate verify failed"), True, False),
        (error_of_daemon("unauthenticated"), True, False),
        (error_of_daemon("role"), True, False),
        (error_of_daemon("disagree"), False, False),
        (flight.FlightServerError("no", b"not JSON"), False, False),
        (REFUSED, False, True),
        (flight.FlightTimedOutError("deadline"), False, False),
        (ValueError("not this table"), False, False),
    ],
)
def test_a_peer_that_denies_us_lives_and_says_so_once(
    error: Exception, denies: bool, ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Answering(error)
    for _ in range(3):
        assert peer.look_once() is not ended
    assert peer.told == [(None, ended)] * 3
    assert (peer.denies, peer.refusal is not None) == (denies, denies)
    assert len(caplog.records) == (not isinstance(error, flight.FlightTimedOutError) and not ended)
    assert ("while it does not let us in it keeps its regions" in caplog.text) == denies
    if denies:
        peer.answer = REGIONS
        assert peer.look_once()
        assert (peer.denies, peer.refusal) == (False, None)


def test_the_regions_of_a_peer_that_denies_us_are_not_claimed() -> None:
    peer = Answering(flight.FlightUnauthenticatedError("no"))
    balancer = Deciding(peer, FakeClock())
    balancer.answered(peer, Answer({REGION: 4}))
    for _ in range(2 * SILENCES):
        assert peer.look_once()
    assert balancer.served_elsewhere(REGION) == (peer.endpoint, 4)
    peer.answer = REFUSED
    for _ in range(REFUSALS):
        assert not peer.look_once()
    assert balancer.served_elsewhere(REGION) is None


def test_a_peer_is_checked_when_another_process_asks_for_its_region() -> None:
    """A client whose call failed asks the other daemons: its daemon may have ended. Many clients cause few checks."""
    peer, clock = Answering(REGIONS), FakeClock()
    balancer = Deciding(peer, clock)
    looks = list[float]()
    peer.look = lambda: looks.append(clock.monotonic())  # type: ignore[method-assign]
    assert peer.look_once()
    for _ in range(10):
        clock.advance(LOOK_AGAIN / 4)
        assert not balancer.belongs(REGION)
    assert len(looks) == 6
    assert peer.look_once()
    assert not balancer.belongs(REGION)
    assert len(looks) == 6
    balancer.belongs(OTHER)  # no peer has it
    assert len(looks) == 6


def test_a_fleet_begins_one_claim_after_the_other() -> None:
    """The calls that wait for the regions of an ended daemon claim them; other claims would take their time."""
    peer, regions = Answering(REFUSED), {TableRegion(f"t{number}", REGION.id): 1 for number in range(5)}
    balancer = Deciding(peer, FakeClock())
    balancer.open = pytest.fail
    balancer.answered(peer, Answer(regions))
    for _ in range(REFUSALS):
        assert not peer.look_once()
    balancer.step()
    assert balancer.begun == sorted(regions)[:1]
    assert all(balancer.belongs(region) for region in regions)


class Stating(flight.FlightServerBase):
    """A server that gives a fixed answer to each call, as a daemon would."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.answer = answer

    def do_exchange(self, _context: Any, _descriptor: Any, _reader: Any, writer: Any) -> None:
        writer.write_metadata(json.dumps(self.answer).encode())


@contextmanager
def stating(**answer: Any) -> Iterator[str]:
    """Return the endpoint of a daemon with these answers."""
    with Stating(REGIONS | answer) as server:
        yield f"grpc://127.0.0.1:{server.port}"


@pytest.mark.parametrize("stated", ["9.0", "nine"])
def test_a_daemon_of_another_table_at_a_port_that_is_used_again_ends_nobody(stated: str) -> None:
    with stating(protocol=stated) as ours, stating(protocol=stated, table="other") as others, stating() as known:
        refuse_other_protocols([others, known], Access(), "t")
        with raises(Invalid):
            refuse_other_protocols([others, ours], Access(), "t")
