"""TLC checks the models of `tests/model`: the invariants hold, each planted bug is found, and no model is vacuous.

The models do not depend on the product: TLC runs if a model or its configuration has changed, or with `--long`.
"""

from __future__ import annotations

import pytest

from tests.conftest import extent
from tests.model.modules import Bug, Configuration, Module, modules
from tests.model.tlc import TlcFailed, check

MODULES = modules()
SMALL = [each for module in MODULES for each in module.configurations if not each.large]
BUGS = [bug for module in MODULES for bug in module.bugs]
SANITY = [each for module in MODULES for each in module.sanity]
STORED = extent(True, False)
UNUSED = {module.name: module.all_actions for module in MODULES}


@pytest.mark.parametrize("configuration", SMALL, ids=lambda each: each.title)
def test_what_a_module_promises_holds_and_each_of_its_actions_is_taken(configuration: Configuration) -> None:
    outcome = configuration.check(coverage=True, stored=STORED)
    assert outcome.violated == "", outcome.told()
    idle = [name for name in UNUSED[configuration.module] if not outcome.actions.get(name)]
    assert idle == list(configuration.unused)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.configuration.module}.{bug.name}")
def test_a_planted_bug_is_found(bug: Bug) -> None:
    outcome = bug.configuration.check(stored=STORED)
    assert outcome.violated == bug.expected, outcome.told()
    assert len(outcome.trace) > 1


@pytest.mark.parametrize("configuration", SANITY, ids=lambda each: each.title)
def test_a_module_does_what_it_is_about(configuration: Configuration) -> None:
    assert configuration.check(stored=STORED).violated == configuration.invariants[0]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_a_module_has_bugs_and_says_what_they_are(module: Module) -> None:
    assert module.bugs
    assert module.sanity
    assert all(bug.history for bug in module.bugs)


def test_a_module_that_tlc_cannot_read_is_no_verdict() -> None:
    with pytest.raises(TlcFailed, match="no verdict"):
        check("Absent", "SPECIFICATION Spec\n")
