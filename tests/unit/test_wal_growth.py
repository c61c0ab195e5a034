"""The number of store requests per step must not grow with the age of a region."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from memwal.wal import (
    Claim,
    Corrupt,
    EntryHeader,
    ManifestStore,
    RegionManifest,
    WalCollector,
    read_tail,
)
from memwal.wal.fences import _encode
from memwal.wal.layout import entry_key, fences_key, manifest_key, version_hint_key, wal_prefix
from memwal.wal.probing import newest_from
from tests.log_rows import CODEC, rows
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds
from tests.support.log_world import REGION, LogWorld, put
from tests.support.memory_store import MemoryStore

IDS, CLOCK = SeededIds(), FakeClock()


class Counting(MemoryStore):
    """Counts requests as S3 does: a listing takes one request per thousand keys."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def get(self, key: str) -> bytes | None:
        self.requests["get"] += 1
        return super().get(key)

    def exists(self, key: str) -> bool:
        self.requests["head"] += 1
        return super().exists(key)

    def list_some(self, prefix: str, most: int) -> list[str]:
        self.requests["list"] += 1
        return sorted(super().list(prefix))[:most]  # by name, as S3 does

    def list(self, prefix: str) -> list[str]:
        found = super().list(prefix)
        self.requests["list"] += 1 + len(found) // 1000
        return found

    @property
    def total(self) -> int:
        return self.requests.total()


def aged(claims: int, tail: int = 3) -> Counting:
    """Return a region after `claims` claims (a sentinel and two manifest versions each) and `tail` more entries."""
    store = Counting()
    for version in range(1, 2 * claims):
        epoch = 1 + version // 2
        manifest = RegionManifest(version, epoch, REGION, last_seen=(version - 1) // 2, edit_id=f"{version:032x}")
        store.put(manifest_key(REGION, version), manifest.encode())
    store.put(version_hint_key(REGION), b'{"version":%d}' % (2 * claims - 1))
    for position in range(1, claims):
        header = EntryHeader(position + 1, 1, f"{position:032x}", {"loader": position}, sentinel=True)
        store.put(entry_key(REGION, position, "lance"), CODEC.encode(header, CODEC.no_rows))
    manifests = ManifestStore(store, REGION, ids=IDS, clock=CLOCK)
    manifests.edit_unowned(lambda found: replace(found, last_seen=claims - 1, replay_after=claims - 1))
    for position in range(claims, claims + tail):
        header = EntryHeader(claims, 1, f"{position:032x}", {"loader": position})
        store.put(entry_key(REGION, position, "lance"), CODEC.encode(header, rows(position)))
    store.requests.clear()
    return store


def take(store: MemoryStore) -> Claim:
    return LogWorld(store=store).claim(ids=IDS)


@pytest.mark.parametrize("newest", [1, 2, 3, 4, 5, 31, 32, 33, 1000, 100_000])
@pytest.mark.parametrize("start", [1, 2, 900])
def test_the_newest_of_numbers_without_a_gap_takes_two_probes_per_digit(start: int, newest: int) -> None:
    asked = []

    def exists(number: int) -> bool:
        asked.append(number)
        return number <= newest

    assert newest_from(exists, start) == max(start, newest)
    assert len(asked) <= 2 + 2 * max(newest - start, 0).bit_length()


@pytest.mark.parametrize("claims", [10, 3000])
def test_a_claim_costs_as_much_after_thousands_of_claims_as_after_ten(claims: int) -> None:
    store = aged(claims)
    claimed = take(store)
    assert claimed.next_position == claims + 4
    assert claimed.applied == {"loader": claims + 2}
    assert [entry.position for entry in claimed.entries] == [claims, claims + 1, claims + 2]
    assert store.requests["list"] == 1
    assert store.total < 45


def test_a_long_tail_behind_what_the_manifest_has_seen_is_found_by_few_probes() -> None:
    store = aged(1500, tail=700)
    claimed = take(store)
    assert (claimed.next_position, len(claimed.entries)) == (2201, 700)
    assert store.requests["head"] < 50
    put(LogWorld(store=store).writer(claimed), 1)


@pytest.mark.parametrize("lost", [range(1504, 1505), range(1501, 1530), range(1503, 1600)])
def test_a_hole_is_no_end_of_the_log_though_no_listing_shows_what_is_behind_it(lost: range) -> None:
    store = aged(1500, tail=400)
    LogWorld(store=store).delete(*lost)
    with raises(Corrupt):
        take(store)
    assert not store.exists(entry_key(REGION, lost[0], "lance"))  # a sentinel in the hole would hide the entries above


def test_a_reader_of_the_tail_lists_one_page() -> None:
    store = aged(3000)
    entries, applied = read_tail(store, REGION, CODEC, 2999, clock=CLOCK)
    assert ([entry.position for entry in entries], applied) == ([3000, 3001, 3002], {"loader": 3002})
    assert store.requests["list"] == 1
    assert store.total < 40


# ---- the newest manifest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hint",
    [
        None,
        b'{"version":1}',
        b'{"version":40}',
        b'{"version":9999}',
        b'{"version":0}',
        b'{"version":"x"}',
        b"[]",
        b"{",
        b"",
    ],
)
def test_a_hint_that_is_lost_or_wrong_costs_few_requests(hint: bytes | None) -> None:
    store = aged(300)
    store.delete(version_hint_key(REGION))
    if hint is not None:
        store.put(version_hint_key(REGION), hint)
    newest = ManifestStore(store, REGION, clock=CLOCK).latest()
    assert newest is not None
    assert newest.version == 600
    assert store.requests["list"] <= 2  # the second listing proves that the result of the first is still valid
    assert store.total < 40


@pytest.mark.parametrize("versions", [2, 300])
def test_the_newest_version_costs_three_requests_and_one_that_is_known_two(versions: int) -> None:
    store = aged(versions)
    manifests = ManifestStore(store, REGION, clock=CLOCK)
    known = manifests.latest()
    assert (store.requests, known and known.version) == (Counter(get=2, head=1), 2 * versions)
    store.requests.clear()
    assert manifests.latest(known) == known
    assert store.requests == Counter(get=1, head=1)


def test_a_claim_is_known_by_what_every_version_of_its_epoch_carries() -> None:
    store = aged(10)
    claimed = take(store)
    manifests = ManifestStore(store, REGION, ids=IDS, clock=CLOCK)
    assert claimed.guard.claimed is not None
    pruned = manifests.edit_unowned(lambda found: replace(found, replay_after=found.last_seen))
    assert pruned.claim_id == claimed.guard.claimed[1]
    store.requests.clear()
    assert manifests.owned(claimed.guard) == pruned
    assert store.total == 3
    another = take(store)
    assert another.manifest.claim_id not in ("", pruned.claim_id)


# ---- fences ----------------------------------------------------------------------------------------------------------


def collect(store: MemoryStore) -> int:
    return WalCollector(store, REGION, CODEC, CLOCK, workers=1).collect(-1.0).fences


def test_a_new_process_does_not_read_the_fences_that_another_found() -> None:
    store = aged(2000)
    assert collect(store) == 1999  # of epochs 2 to 2000
    assert store.requests["get"] > 1998
    store.requests.clear()
    assert collect(store) == 1999
    assert store.requests["get"] < 12
    take(store)
    ManifestStore(store, REGION, ids=IDS, clock=CLOCK).edit_unowned(lambda found: replace(found, replay_after=2003))
    store.requests.clear()
    assert collect(store) == 1999
    assert store.requests["get"] < 20


@pytest.mark.parametrize("damage", ["of another log", "flipped", "cut", "no JSON"])
def test_what_is_remembered_wrongly_costs_reads_and_no_fence(damage: str) -> None:
    store, key = aged(200), fences_key(REGION)
    assert collect(store) == 199
    data = store.get(key)
    assert data is not None
    if damage == "of another log":
        shifted = dict.fromkeys(range(1, 200), 1)
        data = _encode(shifted, "f" * 32)
    damaged = {"flipped": data.replace(b"199", b"198", 1), "cut": data[:-9], "no JSON": b"\xff"}.get(damage, data)
    store.put(key, damaged)
    before = len(store.list(wal_prefix(REGION)))
    assert collect(store) == 199
    assert len(store.list(wal_prefix(REGION))) == before
    assert store.get(key) == (data if damage != "of another log" else store.get(key))
