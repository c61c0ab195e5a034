"""`flush.verification`: a table is clean at every stage of its life, and each kind of damage gives one finding that
names it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest

import memwal
from memwal.flush import BaseTable, resize
from memwal.flush.commits.plan import plan_key
from memwal.flush.resizing.routing import Decision, decide, routing_key
from memwal.flush.verification.finding import Finding, View, take_view
from memwal.flush.verification.runner import verify_table
from memwal.wal import Corrupt, ObjectStore, SystemClock, WalOptions, claim, open_store, read_tail
from memwal.wal.layout import (
    entry_key,
    manifest_key,
    manifest_prefix,
    sst_key,
)
from tests.damaged_table import SCHEMA, SETTINGS, Damaged, cut, flip, found_in, grow, opened, rows, verify
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds

# ---- clean ---------------------------------------------------------------------------------------------------------


def test_a_table_is_clean_at_every_stage_of_its_life(tmp_path: Path) -> None:
    uri, seen = str(tmp_path / "table"), []
    for stage in grow(uri):
        found = verify(uri)
        assert found.findings == (), stage
        seen.append((stage, found.ssts))
    assert dict(seen)["flushed twice"] == 4


def test_a_table_of_arrow_format_is_clean_whoever_wrote_to_it(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    base = BaseTable.create(uri, SCHEMA, ["id"], 1, (), wal_format="arrow")
    for version in (1, 2):
        with base.dataset.mem_wal_writer(str(base.regions[0])) as writer:
            for ids in ([1, 2, 3], [2, 5]):
                writer.put(pa.Table.from_pylist(rows(ids, version), schema=base.schema))
    assert verify(uri).findings == ()
    table = opened(uri)
    table.put(rows([7, 8], 3))
    table.flush()
    table.put(rows([2], 4))
    assert verify(uri).ssts == 3
    assert verify(uri).findings == ()
    table.commit()
    table.close()
    assert verify(uri).findings == ()


def test_a_table_without_rows_in_one_region_is_clean(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    BaseTable.create(uri, SCHEMA, ["id"], 3, ())
    assert verify(uri).findings == ()


def test_what_is_done_meanwhile_is_no_damage(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    table = opened(uri)
    table.put(rows(range(20), 0))
    ended, failed = threading.Event(), []

    def work() -> None:
        try:
            for number in range(12):
                table.put(rows(range(number, number + 20), number))
                table.delete([number])
                table.flush()
                if number % 3 == 2:
                    table.commit()
        except BaseException as error:  # noqa: BLE001 - the test's own thread
            failed.append(error)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    rounds = 0
    while not ended.is_set():
        assert verify(uri).findings == ()
        rounds += 1
    worker.join()
    table.close()
    assert failed == []
    assert rounds >= 3


def test_only_what_is_found_again_on_a_table_at_rest_is_reported(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[View] = []

    def unsteady(view: View) -> Iterator[Finding]:
        asked.append(view)
        if len(asked) == 1:
            yield Finding("index", "passing", "1 is wrong", "wait")
        yield Finding("index", "lasting", f"{len(asked)} are wrong", "mend it")

    monkeypatch.setattr("memwal.flush.verification.base.check_indexes", unsteady)
    found = verify(str(grown), deep=False).findings
    assert [str(each) for each in found] == ["lasting: 2 are wrong; mend it"]
    assert asked[0] is not asked[1]


Damage = Callable[[Damaged], tuple[str, str]]
"""Damages a table; returns the check that must find it, and the place of the finding."""

# ---- damaged -------------------------------------------------------------------------------------------------------


def _foreign_copy(damaged: Damaged) -> str:
    source = damaged.entry(damaged.positions[-1])
    target = source.with_suffix(".arrow")
    target.write_bytes(source.read_bytes())
    return str(target.relative_to(damaged.uri))


def _entry_after_the_sentinel(damaged: Damaged) -> int:
    return damaged.positions[damaged.positions.index(damaged.sentinel) + 1]


def manifests_gone(d: Damaged) -> tuple[str, str]:
    shutil.rmtree(d.file(manifest_prefix(d.region)))
    return "manifest", manifest_prefix(d.region)


def cursor_goes_back(d: Damaged) -> tuple[str, str]:
    d.rewrite_manifests(lambda m: replace(m, replay_after=m.replay_after - 1), newest=True)
    return "succession", manifest_key(d.region, d.manifest.version)


def generation_dropped(d: Damaged) -> tuple[str, str]:
    d.rewrite_manifests(lambda m: replace(m, ssts=m.ssts[1:]), newest=True)
    return "generations", manifest_prefix(d.region)


def hole(d: Damaged) -> tuple[str, str]:
    position = _entry_after_the_sentinel(d)
    assert d.manifest.replay_after < position < d.positions[-1]
    d.entry(position).unlink()
    return "hole", entry_key(d.region, position, d.suffix)


def end_of_the_log_lost(d: Damaged) -> tuple[str, str]:
    sentinel = d.sentinel
    for position in d.positions:
        if position >= sentinel:
            d.entry(position).unlink()
    return "hole", entry_key(d.region, sentinel, d.suffix)


def entry_of_another_format(d: Damaged) -> tuple[str, str]:
    return "entry", _foreign_copy(d)


def epoch_goes_back(d: Damaged) -> tuple[str, str]:
    d.reentry(d.positions[-1], writer_epoch=1)
    return "epoch", entry_key(d.region, d.positions[-1], d.suffix)


def epoch_never_claimed(d: Damaged) -> tuple[str, str]:
    d.reentry(d.positions[-1], writer_epoch=9)
    return "epoch", entry_key(d.region, d.positions[-1], d.suffix)


def entry_of_another_log(d: Damaged) -> tuple[str, str]:
    d.reentry(d.positions[-1], log_id="0" * 32)
    return "log", entry_key(d.region, d.positions[-1], d.suffix)


def entry_of_another_log_far_behind(d: Damaged) -> tuple[str, str]:
    last, far = d.positions[-1], d.positions[-1] + 50
    kept = d.entry(last).read_bytes()
    d.reentry(last, log_id="0" * 32)
    d.entry(last).rename(d.entry(far))
    d.entry(last).write_bytes(kept)
    return "log", entry_key(d.region, far, d.suffix)


def no_sentinel(d: Damaged) -> tuple[str, str]:
    position = d.sentinel
    d.reentry(position, sentinel=False)
    return "sentinel", entry_key(d.region, position, d.suffix)


def sst_that_does_not_open(d: Damaged) -> tuple[str, str]:
    for manifest in d.file(sst_key(d.region, d.sst.path)).glob("_versions/*.manifest"):
        manifest.unlink()
    return "sst", sst_key(d.region, d.sst.path, "_versions")


def sst_index_gone(d: Damaged) -> tuple[str, str]:
    directory = d.file(sst_key(d.region, d.sst.path))
    lance.dataset(str(directory)).create_scalar_index("id", "BTREE", name="one_more")
    (segment,) = (i.segments[0].uuid for i in lance.dataset(str(directory)).describe_indices() if i.name == "one_more")
    shutil.rmtree(directory / "_indices" / segment)
    return "sst index", sst_key(d.region, d.sst.path, f"_indices/{segment}")


def _at(check: str, key: Callable[[Damaged], str], damage: Callable[[Path], Any]) -> Damage:
    """Return a damage of one object, which the check `check` must find at its key."""

    def damaged_object(d: Damaged) -> tuple[str, str]:
        damage(d.file(found := key(d)))
        return check, found

    return damaged_object


def _version(d: Damaged) -> str:
    return manifest_key(d.region, 2)


def _newest_version(d: Damaged) -> str:
    return manifest_key(d.region, d.manifest.version)


def _newest_entry(d: Damaged) -> str:
    return entry_key(d.region, d.positions[-1], d.suffix)


def _sst(d: Damaged) -> str:
    return f"{sst_key(d.region, d.sst.path)}/"


def _of_sst(pattern: str) -> Callable[[Damaged], str]:
    return lambda d: str(d.sst_file(pattern).relative_to(d.uri))


def _of_base(pattern: str) -> Callable[[Damaged], str]:
    return lambda d: str(d.base_file(pattern).relative_to(d.uri))


def progress_beyond_what_was_published(d: Damaged) -> tuple[str, str]:
    d.mark(d.region, 9)
    return "marker", manifest_prefix(d.region)


def progress_of_an_unknown_region(d: Damaged) -> tuple[str, str]:
    d.mark(UUID(int=7), 1)
    return "marker", f"_mem_wal/{UUID(int=7)}/"


def region_of_nobody(d: Damaged) -> tuple[str, str]:
    stranger, clock = UUID(int=7), FakeClock()
    claim(d.store, stranger, spec_id=1, codec=d.base.codec, ids=SeededIds(), clock=clock)
    return "region", manifest_prefix(stranger)


def decision_without_seals(d: Damaged) -> tuple[str, str]:
    """Write the decision of a resize without sealing the regions, as a copy of files beside a resize may have it."""
    decide(d.store, Decision(2, 3, {}, "a resize"), clock=FakeClock(), options=WalOptions())
    return "routing", routing_key(2)


def unreadable_decision(d: Damaged) -> tuple[str, str]:
    d.file(routing_key(2)).parent.mkdir()
    d.file(routing_key(2)).write_bytes(b"{}")
    return "routing", routing_key(2)


def unreadable_plan(d: Damaged) -> tuple[str, str]:
    d.file(plan_key(d.region, 1)).write_bytes(b"{}")
    return "plan", plan_key(d.region, 1)


def overlapping_plan(d: Damaged) -> tuple[str, str]:
    for first in (4, 5):
        d.file(plan_key(d.region, first)).write_bytes(json.dumps({"first": first, "last": 6}).encode())
    return "plan", plan_key(d.region, 5)


def half_a_commit(d: Damaged) -> tuple[str, str]:
    d.file(plan_key(d.region, 1)).write_bytes(b'{"first": 1, "last": 3}')
    return "plan", plan_key(d.region, 1)


def _base_index(d: Damaged) -> str:
    segment = next(index.segments[-1] for index in d.base.dataset.describe_indices() if index.name == "name_idx")
    return f"_indices/{segment.uuid}"


def base_index_file(directory: Path) -> Path:
    return directory / "page_data.lance"


def index_dropped(d: Damaged) -> tuple[str, str]:
    d.base.dataset.drop_index("name_idx")
    return "index", "index name_idx"


SHALLOW: dict[str, Damage] = {
    "missing version": _at("manifest", _version, Path.unlink),
    "damaged version": _at("manifest", _version, lambda file: flip(file, 40)),
    "damaged newest version": _at("manifest", _newest_version, cut),
    "manifests gone": manifests_gone,
    "cursor goes back": cursor_goes_back,
    "generation dropped": generation_dropped,
    "hole": hole,
    "end of the log lost": end_of_the_log_lost,
    "damaged entry": _at("entry", _newest_entry, lambda file: flip(file, 30)),
    "entry of another format": entry_of_another_format,
    "epoch goes back": epoch_goes_back,
    "epoch never claimed": epoch_never_claimed,
    "entry of another log": entry_of_another_log,
    "entry of another log far behind": entry_of_another_log_far_behind,
    "no sentinel": no_sentinel,
    "SST gone": _at("sst", _sst, shutil.rmtree),
    "SST index gone": sst_index_gone,
    "SST that does not open": sst_that_does_not_open,
    "bloom filter gone": _at("bloom", _of_sst("bloom_filter.bin"), Path.unlink),
    "bloom filter cut": _at("bloom", _of_sst("bloom_filter.bin"), cut),
    "data gone": _at("data", _of_sst("data/*.lance"), Path.unlink),
    "data cut": _at("data", _of_sst("data/*.lance"), cut),
    "sidecar gone": _at("sidecar", _of_sst("_pk_index/page_data.lance"), Path.unlink),
    "sidecar cut": _at("sidecar", _of_sst("_pk_index/page_data.lance"), cut),
    "lookup gone": _at("sidecar", _of_sst("_pk_index/page_lookup.lance"), Path.unlink),
    "lookup cut": _at("sidecar", _of_sst("_pk_index/page_lookup.lance"), cut),
    "base data gone": _at("base file", _of_base("data/*.lance"), Path.unlink),
    "base data cut": _at("base file", _of_base("data/*.lance"), cut),
    "base index gone": _at("base file", _base_index, shutil.rmtree),
    "base index cut": _at("base file", _base_index, lambda directory: cut(base_index_file(directory))),
    "base index file gone": _at("base file", _base_index, lambda directory: base_index_file(directory).unlink()),
    "progress beyond what was published": progress_beyond_what_was_published,
    "progress of an unknown region": progress_of_an_unknown_region,
    "region of nobody": region_of_nobody,
    "decision without seals": decision_without_seals,
    "unreadable decision": unreadable_decision,
    "unreadable plan": unreadable_plan,
    "overlapping plan": overlapping_plan,
    "half a commit": half_a_commit,
    "index dropped": index_dropped,
}


@pytest.mark.parametrize("damage", SHALLOW.values(), ids=SHALLOW)
def test_damage_is_found_without_reading_rows(damaged: Damaged, damage: Damage) -> None:
    expected = damage(damaged)
    assert found_in(damaged, deep=False) == [expected]
    assert found_in(damaged, deep=True) == [expected]


def test_an_index_file_that_cannot_be_read_is_found(damaged: Damaged) -> None:
    """The file has its full size: queries that use it fail, and only reading it detects the damage."""
    file = base_index_file(damaged.file(_base_index(damaged)))
    file.write_bytes(bytes(file.stat().st_size))
    assert found_in(damaged, deep=False) == []
    assert found_in(damaged, deep=True) == [("base file", str(file.relative_to(damaged.uri)))]


def test_a_decision_without_seals_is_not_carried_out_and_can_be_deleted(damaged: Damaged) -> None:
    decision_without_seals(damaged)
    (finding,) = verify(damaged.uri, deep=False).findings
    assert "routing version 2 is decided, but 2 regions take writes by an older one" in str(finding)
    assert str(finding).endswith("; delete this object")
    resized = partial(resize, damaged.uri, {}, damaged.store, 3, clock=SystemClock(), ids=SeededIds())
    with raises(Corrupt):
        resized()
    assert BaseTable.open(damaged.uri).routing_version == 1
    damaged.file(finding.where).unlink()
    assert found_in(damaged) == []
    assert resized().regions == 3
    assert found_in(damaged) == []


def test_a_clone_misses_no_file_of_the_table_it_was_made_from(damaged: Damaged, tmp_path: Path) -> None:
    dataset = lance.dataset(damaged.uri)
    dataset.shallow_clone(str(tmp_path / "clone"), dataset.version)
    memwal.open(str(tmp_path / "clone"), settings=SETTINGS).close()
    clone = str(tmp_path / "clone")
    assert verify_table(open_store(clone), clone, deep=True).findings == ()


def test_a_deletion_file_of_the_base_is_missed(damaged: Damaged) -> None:
    damaged.base.dataset.delete("id = 7")
    damaged.base_file("_deletions/*").unlink()
    ((check, where),) = found_in(damaged, deep=False)
    assert check == "base file"
    assert where.startswith("_deletions/")


def test_counts_that_do_not_hold_are_found_in_data_and_sidecar(damaged: Damaged) -> None:
    damaged.recount(99)
    assert [check for check, _ in found_in(damaged)] == ["data", "sidecar"]


def test_an_index_on_another_column_is_found(damaged: Damaged) -> None:
    damaged.base.dataset.drop_index("name_idx")
    damaged.base.dataset.create_scalar_index("id", "BTREE", name="name_idx")
    assert found_in(damaged, deep=False) == [("index", "index name_idx")]


def test_a_collected_log_makes_no_statement(damaged: Damaged) -> None:
    damaged.collect()
    assert found_in(damaged) == []


def test_verifying_writes_nothing(damaged: Damaged, tree: Callable[[Path], dict[str, int]]) -> None:
    before = tree(Path(damaged.uri))
    verify(damaged.uri)
    assert tree(Path(damaged.uri)) == before


def test_a_view_is_of_one_moment(damaged: Damaged) -> None:
    store: ObjectStore = damaged.store
    view = take_view(store, damaged.uri)
    assert view.versions == take_view(store, damaged.uri).versions
    damaged.base.dataset.delete("id = 7")
    assert view.versions != take_view(store, damaged.uri).versions
    assert read_tail(store, damaged.region, damaged.base.codec, view.manifests[damaged.region].replay_after)[0]
