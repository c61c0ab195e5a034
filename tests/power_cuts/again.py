"""A second power cut during the recovery from a first one: opening, going back, replay, claims, commits, collections.

The files that a first cut left are durable. `workloads.recovery` runs on them below strace, and its recording is cut
like any other, also a third time: the check knows what all runs have acknowledged.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.power_cuts.check import histories
from tests.power_cuts.cuts import State, sample
from tests.power_cuts.model import Recording
from tests.power_cuts.record import python, record
from tests.power_cuts.workloads import OPENED

_SAMPLED = 300
_MANIFEST = re.compile(r"^(?!.*_mem_wal/).*/_versions/[0-9]+\.manifest$")


def first_cuts(recording: Recording, seed: int, number: int) -> list[State]:
    """Return `number` states whose tables can be opened; half of them with a torn version, if there are enough.

    States with zeros in the base are left out, since they may be beyond recovery.
    """
    states = [state for state in sample(recording, seed, _SAMPLED) if state.lost and not state.zeroed]
    usable = [state for state in states if _tables(state)]
    random.Random(seed).shuffle(usable)
    torn = [state for state in usable if _has_torn_version(state)]
    others = [state for state in usable if not _has_torn_version(state)]
    half = (number + 1) // 2
    return [*torn[:half], *others, *torn[half:]][:number]


def _has_torn_version(state: State) -> bool:
    manifests = (data for path, data in state.tree.items() if _MANIFEST.search(path))
    return any(not (data or b"").endswith(b"LANC") for data in manifests)


def recorded_again(first: State, place: Path) -> Recording:
    """Record `recovery` after a first cut, in the empty directory `place`. Raises: NotRecorded."""
    turn = sum("cut" in mark for mark in first.marks)
    (place / OPENED).write_text(json.dumps({"turn": turn, "tables": _tables(first)}))
    command = python("tests.power_cuts.workloads", "recovery", str(place))
    return record(command, place, tree=first.tree, marks=[*first.marks, {"cut": str(first.cut)}])


def _tables(state: State) -> Sequence[Mapping[str, Any]]:
    """Return the tables whose creation was acknowledged, in the form that `recovery` reads."""
    found = []
    for name, history in histories(state.marks).items():
        if history.opened.done:
            resizes = [call for call in history.calls if call.do == "resize" and not call.done]
            to = resizes[-1].what["to"] if resizes else 0
            found.append({"name": name, "keyed": history.keyed, "kind": history.kind, "resize": to})
    return found
