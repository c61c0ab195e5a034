"""A second power cut, while what follows a first one runs: opening, going back, replay, claims, commits, collections.

The files that a first cut left are durable. `workloads.recovery` runs on them below strace, and its recording is cut
like any other: the check knows what both runs have acknowledged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.power_cuts.check import histories
from tests.power_cuts.cuts import State, sample
from tests.power_cuts.model import Recording
from tests.power_cuts.record import python, record
from tests.power_cuts.workloads import OPENED

_SAMPLED = 100


def first_cuts(recording: Recording, seed: int, number: int) -> list[State]:
    """Return `number` states after which a table can be opened, half of them with a torn base table if there are some.

    Without states with zeros in the base, which may be beyond recovery.
    """
    states = [state for state in sample(recording, seed, _SAMPLED) if state.lost and not state.zeroed]
    usable = [state for state in states if _tables(state)]
    random.Random(seed).shuffle(usable)
    of_base = [state for state in usable if any("/_versions/" in lost for lost in state.lost)]
    others = [state for state in usable if state not in of_base]
    return [*of_base[: number // 2], *others, *of_base[number // 2 :]][:number]


def recorded_again(first: State, place: Path) -> Recording:
    """Record `recovery` after a first cut, in the empty directory `place`. Raises NotRecorded."""
    (place / OPENED).write_text(json.dumps(_tables(first)))
    command = python("tests.power_cuts.workloads", "recovery", str(place))
    return record(command, place, tree=first.tree, marks=[*first.marks, {"cut": str(first.cut)}])


def _tables(state: State) -> Sequence[Mapping[str, Any]]:
    """Return the tables whose creation was acknowledged, as `recovery` opens them."""
    found = []
    for name, history in histories(state.marks).items():
        if history.opened.done:
            resizes = [call for call in history.calls if call.do == "resize" and not call.done]
            to = resizes[-1].what["to"] if resizes else 0
            found.append({"name": name, "keyed": history.keyed, "kind": history.kind, "resize": to})
    return found
