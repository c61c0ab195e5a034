"""What a daemon makes of the answers of its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memwal.ingest.daemon.peers import Peer
from memwal.ingest.daemon.placement import Answer
from memwal.ingest.rpc import protocol
from memwal.ingest.rpc.credentials import Access
from memwal.wal import RegionManifest, Released, bucket_region

REGION, OTHER = bucket_region(0), bucket_region(1)
RELEASED = Released(RegionManifest(version=3, writer_epoch=2, region_id=REGION, edit_id="a" * 32), position=17)


class Answering(Peer):
    """Gives one answer, over no network."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer, self.asked = answer, list[dict[str, Any]]()
        super().__init__("grpc://127.0.0.1:1", "grpc://127.0.0.1:2", "t", lambda *_: None, Access())
        self.stop()

    def _act(self, name: str, timeout: float, **request: Any) -> dict[str, Any]:
        self.asked.append({"act": name, **request})
        return self.answer


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (RELEASED.to_json(), RELEASED),
        (None, None),  # it ended itself after a failure of storage, or had not waited for the owner before it
        (True, None),  # a daemon of an earlier release says only that it has ended
    ],
)
def test_an_owner_that_releases_a_region_tells_what_it_knows(ended: object, told: Released | None) -> None:
    peer = Answering({"epoch": 2, "ended": ended})
    assert peer.ask(REGION, read=16) == told
    assert peer.asked[-1] == {"act": "release", "region": str(REGION), "read": 16}


@pytest.mark.parametrize("damage", [lambda text: text[:-4] + "0000", lambda text: text[:7], lambda text: "no hex"])
def test_what_cannot_be_read_counts_as_not_told(damage: Callable[[str], str]) -> None:
    """The peer has released the region by then, so the claim goes on and asks storage."""
    told = RELEASED.to_json()
    assert Answering({"epoch": 2, "ended": told | {"manifest": damage(told["manifest"])}}).ask(REGION, read=0) is None
    assert Answering({"epoch": 2, "ended": told}).ask(OTHER, read=0) is None
    assert Answering({"epoch": 2}).ask(REGION, read=0) is None


REGIONS: dict[str, Any] = {
    "table": "t",
    "regions": {str(REGION): 4},
    "claiming": [],
    "draining": False,
    "base_version": 7,
    "waiting": {"ssts": 1, "size": 2, "age": None},
}


@pytest.mark.parametrize(("told", "refused"), [(None, False), ("1.2", False), ("1.3", True), ("2.0", True)])
def test_a_peer_of_another_protocol_lives_and_keeps_its_regions(
    told: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers who has what in every version, so nobody takes its regions for those of a dead daemon."""
    monkeypatch.setattr(protocol, "OURS", protocol.Version(1, 1))
    stated = REGIONS if told is None else REGIONS | {"protocol": told}
    peer = Answering(stated)
    later = stated | {"waiting": REGIONS["waiting"] | {"of_a_later_version": 1}, "of_a_later_version": {}}
    for answer in (stated, later):
        assert peer._understood(answer) == Answer({REGION: 4})
    assert (peer.refusal is not None, len(caplog.records)) == (refused, refused)
    assert ("until then it keeps its regions" in caplog.text) == refused
