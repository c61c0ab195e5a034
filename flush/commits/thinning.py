"""Select the versions of the base table to keep: all recent ones, then fewer with age, within a bound on their bytes.

    all       versions that were the newest at some time in the last `age_min` seconds: a reader may have them open
    hourly    of older versions, the last of each hour, for `hourly` seconds
    daily     of older versions, the last of each day, for `daily` seconds
    always    the newest `newest` versions, tagged versions, and those that the caller protects

The bound applies last: the oldest hourly and daily versions are removed until the newest version and all versions older
than `age_min` together have at most `space_max` times the bytes of the newest version. The bound never removes versions
of the last `age_min` seconds or versions that are always kept.

Hours and days begin at full hours and days of Unix time. The version kept for an hour is therefore the same in every
later run, and the last version of a day is also the last of an hour. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memwal.flush.base.version_files import Files, StoredVersion, stored_bytes

HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class VersionRules:
    """Ages in seconds. `space_max`: a factor on the bytes of the newest version; 0 = unlimited."""

    age_min: float = HOUR
    hourly: float = DAY
    daily: float = 7 * DAY
    newest: int = 10
    space_max: float = 2.0


def kept_by_age(
    versions: Sequence[StoredVersion], protected: Collection[int], rules: VersionRules, now: float
) -> list[int]:
    """Return the numbers of the versions to keep, ascending, before the bound on bytes.

    `versions`: ascending. `protected`: version numbers that are always kept. `now`: Unix seconds.
    """
    recent = {*recent_versions(versions, rules, now), *protected}
    last_of: dict[tuple[float, int], int] = {}
    for each in versions:
        for period, kept_for in ((HOUR, rules.hourly), (DAY, rules.daily)):
            if each.written > now - kept_for:
                last_of[period, int(each.written // period)] = each.version
    return sorted(recent | set(last_of.values()))


def recent_versions(versions: Sequence[StoredVersion], rules: VersionRules, now: float) -> set[int]:
    """Return the newest `rules.newest` of `versions`, and those that were the newest within `rules.age_min` seconds."""
    newest = {each.version for each in versions[max(len(versions) - rules.newest, 0) :]}
    young = {each.version for each, by in pairwise(versions) if by.written > now - rules.age_min}
    return newest | young | {each.version for each in versions[-1:]}


def within_space(
    kept: Sequence[int],
    protected: Collection[int],
    recent: Collection[int],
    files: Callable[[int], Files],
    space_max: float,
) -> list[int]:
    """Return the numbers in `kept`, ascending, without the oldest ones that exceed `space_max`.

    `recent`, `protected`: version numbers that are always kept; of `recent`, only the newest version's bytes count.
    `files`: returns the files of a version.
    """
    removable = [version for version in kept if version not in protected and version not in recent]
    if not space_max or not removable:
        return list(kept)
    newest = files(kept[-1])
    bound = space_max * stored_bytes([newest])
    held = {version: files(version) for version in kept if version not in recent or version in protected}
    for version in removable:
        if stored_bytes([newest, *held.values()]) <= bound:
            break
        del held[version]
    return sorted({*recent, *held} & set(kept))
