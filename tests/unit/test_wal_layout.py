"""Keys of objects are built and parsed in one module, and equal Lance's."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.wal import bucket_region, regions
from memwal.wal import layout as keys
from tests.messages import raises
from tests.support.memory_store import MemoryStore

NUMBERS = st.integers(min_value=1, max_value=2**64 - 1)
REGION = UUID("4a388480-a25b-59a8-b058-24217f980256")


def test_rev_is_the_binary_read_backwards() -> None:
    assert keys.rev(1) == "1" + "0" * 63
    assert keys.rev(6) == "011" + "0" * 61
    assert keys.rev(2**63) == "0" * 63 + "1"


@pytest.mark.parametrize("number", [-1, 2**64])
def test_rev_refuses_what_64_digits_cannot_hold(number: int) -> None:
    with raises(ValueError):
        keys.rev(number)


@pytest.mark.parametrize("text", ["", "0" * 63, "2" + "0" * 63, "0" * 65])
def test_parse_rev_refuses_other_text(text: str) -> None:
    with raises(ValueError):
        keys.parse_rev(text)


@given(NUMBERS)
def test_rev_round_trip(number: int) -> None:
    assert keys.parse_rev(keys.rev(number)) == number


@given(st.uuids(), NUMBERS, st.sampled_from(["lance", "arrow"]))
def test_entry_key_round_trip(region: UUID, position: int, suffix: str) -> None:
    key = keys.entry_key(region, position, suffix)
    assert keys.parse_entry_key(key) == (region, position, suffix)
    assert key.startswith(keys.wal_prefix(region))
    assert keys.parse_manifest_key(key) is None


@given(st.uuids(), NUMBERS)
def test_manifest_key_round_trip(region: UUID, version: int) -> None:
    key = keys.manifest_key(region, version)
    assert keys.parse_manifest_key(key) == (region, version)
    assert key.startswith(keys.manifest_prefix(region))
    assert keys.parse_entry_key(key) is None


@given(st.uuids(), st.integers(0, 2**32 - 1), NUMBERS)
def test_sst_dir_round_trip(region: UUID, token: int, generation: int) -> None:
    directory = keys.sst_key(region, keys.sst_name(f"{token:08x}", generation))
    assert keys.parse_sst_dir(directory) == (f"{token:08x}", generation)
    assert directory.startswith(keys.region_prefix(region))


def test_what_is_no_such_key_parses_to_none() -> None:
    assert keys.parse_manifest_key(keys.version_hint_key(REGION)) is None
    assert keys.parse_entry_key(keys.owner_key(REGION)) is None
    assert keys.parse_sst_dir("wal") is None
    assert keys.parse_sst_dir("0123456z_gen_1") is None
    assert keys.parse_sst_dir("01234567_gen_0") is None


def test_numbering_starts_at_one() -> None:
    for build in (
        keys.manifest_key,
        lambda r, n: keys.entry_key(r, n, "lance"),
        lambda r, n: keys.sst_name("0" * 8, n),
    ):
        with raises(ValueError):
            build(REGION, 0)


def test_sst_token_is_eight_hex_digits() -> None:
    with raises(ValueError):
        keys.sst_name("XYZ", 1)


def test_bucket_regions_are_lancedbs() -> None:
    assert bucket_region(0) == REGION
    assert len({bucket_region(n) for n in range(100)}) == 100


def test_regions_finds_ids_and_nothing_else() -> None:
    store = MemoryStore()
    for key in (
        keys.manifest_key(bucket_region(1), 1),
        keys.entry_key(bucket_region(0), 1, "lance"),
        keys.PROBE_PREFIX + "0" * 8,
        keys.staged_key("0" * 32),
        "_mem_wal/not-a-region/x",
        "data/1.lance",
    ):
        store.put(key, b"")
    assert regions(store) == sorted([bucket_region(0), bucket_region(1)])


@pytest.mark.parametrize("before", ["", "1/table.lance/", "/bucket/table.lance/"])
@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (keys.entry_key(REGION, 1, "lance"), "log"),
        (keys.wal_prefix(REGION), "log"),
        (keys.snapshot_prefix(REGION), "log"),
        (keys.manifest_key(REGION, 3), "manifest"),
        (keys.version_hint_key(REGION), "manifest"),
        (keys.sst_key(REGION, "0123abcd_gen_7", "data/x.lance"), "sst"),
        (keys.region_prefix(REGION), "sst"),
        (f"{keys.region_prefix(REGION)}commits/", "commit"),
        (keys.owner_key(REGION), "note"),
        (keys.fences_key(REGION), "note"),
        (keys.pruned_key(REGION), "note"),
        (keys.paused_key("commits"), "note"),
        (keys.paused_key("commits", 7), "note"),
        (keys.resumed_key("commits", 7), "note"),
        (keys.staged_key("ab" * 16), "staged"),
        (keys.STAGED_PREFIX, "staged"),
        (keys.load_key(REGION), "note"),
        (keys.loading_key("load"), "note"),
        (keys.PROBE_PREFIX + "0123abcd", "other"),
        (keys.ROOT, "other"),
        ("_versions/18446744073709551614.manifest", "base"),
        ("", "base"),
    ],
)
def test_every_key_has_a_kind(key: str, kind: str, before: str) -> None:
    assert keys.kind_of(before + key) == kind
