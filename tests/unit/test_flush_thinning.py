"""Selection of the versions of the base table to keep: by age, then within a limit on their bytes."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from memwal.flush.base.version_files import Files, StoredVersion, stored_bytes
from memwal.flush.commits.thinning import (
    DAY,
    HOUR,
    VersionRules,
    kept_by_age,
    recent_versions,
    within_space,
)

NOW = 1_000 * DAY

AGES = st.lists(st.floats(0, 20 * DAY), min_size=1, max_size=60)
RULES = st.builds(
    VersionRules,
    age_min=st.sampled_from((0.0, 60.0, HOUR, DAY)),
    hourly=st.sampled_from((0.0, 3 * HOUR, DAY)),
    daily=st.sampled_from((0.0, 3 * DAY, 7 * DAY)),
    newest=st.integers(1, 12),
    space_max=st.sampled_from((0.0, 1.0, 1.5, 2.0, 10.0)),
)
TAGS = st.sets(st.integers(1, 60))


def history(ages: list[float]) -> list[StoredVersion]:
    written = sorted(NOW - age for age in ages)
    return [StoredVersion(number, seconds) for number, seconds in enumerate(written, 1)]


def minutely(days: float, every: float = 60.0) -> list[StoredVersion]:
    return history([every * n for n in range(int(days * DAY / every))])


@given(AGES, TAGS, RULES)
def test_young_tagged_and_newest_versions_stay(ages: list[float], tags: set[int], rules: VersionRules) -> None:
    versions = history(ages)
    kept = kept_by_age(versions, tags, rules, NOW)
    assert kept == sorted(set(kept))
    assert {each.version for each in versions if each.written > NOW - rules.age_min} <= set(kept)
    assert {each.version for each in versions[-rules.newest :]} <= set(kept)
    assert tags <= set(kept)


@given(AGES, RULES, st.floats(0, 1))
def test_the_version_that_was_the_newest_at_a_moment_of_the_last_hour_stays(
    ages: list[float], rules: VersionRules, share: float
) -> None:
    """A read that began at that moment may have the version open, however old the version was."""
    versions = history(ages)
    began = NOW - rules.age_min * share * 0.999
    open_then = [each.version for each in versions if each.written <= began]
    if open_then and rules.age_min:
        assert open_then[-1] in kept_by_age(versions, (), rules, NOW)


@given(AGES, RULES, st.floats(0, 10 * DAY))
def test_runs_in_between_change_no_choice_by_the_hour_and_by_the_day(
    ages: list[float], rules: VersionRules, later: float
) -> None:
    versions = history(ages)
    first = set(kept_by_age(versions, (), rules, NOW))
    thinned = [each for each in versions if each.version in first]
    assert set(kept_by_age(versions, (), rules, NOW + later)) <= set(kept_by_age(thinned, (), rules, NOW + later))


@given(AGES, RULES)
def test_no_hour_and_no_day_has_more_than_one_old_version(ages: list[float], rules: VersionRules) -> None:
    versions = history(ages)
    recent = recent_versions(versions, rules, NOW)
    old = [each for each in versions if each.version in kept_by_age(versions, (), rules, NOW)]
    old = [each for each in old if each.version not in recent]
    for period in (HOUR, DAY):
        limit = NOW - (rules.hourly if period == DAY else 0.0)
        buckets = [int(each.written // period) for each in old if each.written <= limit]
        assert len(buckets) == len(set(buckets))
    assert all(each.written > NOW - max(rules.hourly, rules.daily) for each in old)


def test_a_version_each_minute_for_ten_days() -> None:
    versions = minutely(10)
    kept = kept_by_age(versions, (), VersionRules(), NOW)
    ages = [NOW - each.written for each in versions if each.version in kept]
    assert sum(age < HOUR for age in ages) == 60
    assert sum(HOUR <= age < DAY for age in ages) in (23, 24, 25)
    assert sum(DAY <= age < 7 * DAY for age in ages) in (5, 6, 7)
    assert max(ages) < 7 * DAY


FILES = st.dictionaries(st.sampled_from([f"data/{n}" for n in range(20)]), st.integers(1, 100), max_size=8)


@given(AGES, TAGS, RULES, st.data())
def test_old_versions_have_no_more_bytes_than_the_bound(
    ages: list[float], tags: set[int], rules: VersionRules, data: st.DataObject
) -> None:
    versions = history(ages)
    numbers = {each.version for each in versions}
    tags &= numbers
    files: dict[int, Files] = {number: data.draw(FILES) for number in sorted(numbers)}
    kept = kept_by_age(versions, tags, rules, NOW)
    recent = recent_versions(versions, rules, NOW)
    left = within_space(kept, tags, recent, files.__getitem__, rules.space_max)
    assert set(left) <= set(kept)
    assert {*tags, *recent} <= set(left)
    removable, before = ([number for number in each if number not in {*tags, *recent}] for each in (left, kept))
    assert removable == before[len(before) - len(removable) :]
    if rules.space_max and removable:
        assert held(left, recent - tags, files) <= rules.space_max * stored_bytes([files[kept[-1]]])
    if not rules.space_max:
        assert left == kept


def held(left: list[int], recent: set[int], files: Mapping[int, Files]) -> int:
    """Return the bytes of the newest version, and of those that are not recent."""
    return stored_bytes([files[left[-1]], *(files[number] for number in left if number not in recent)])


def test_versions_that_share_their_files_cost_nothing() -> None:
    files: dict[int, Files] = {number: {"data/all": 100} for number in range(1, 41)}
    kept = list(range(1, 41))
    assert within_space(kept, (), {40}, files.__getitem__, 1.0) == kept


def test_the_oldest_go_first() -> None:
    files: dict[int, Files] = {number: {f"data/{number}": 100} for number in range(1, 6)}
    assert within_space([1, 2, 3, 4, 5], (), {5}, files.__getitem__, 3.0) == [3, 4, 5]
    assert within_space([1, 2, 3, 4, 5], {1}, {5}, files.__getitem__, 3.0) == [1, 4, 5]
    assert within_space([1, 2, 3, 4, 5], (), {4, 5}, files.__getitem__, 1.0) == [4, 5]
