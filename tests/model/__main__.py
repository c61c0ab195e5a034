"""Check every configuration of every module with TLC, and print a table: `python -m tests.model` (`make model`).

`--small`: only those of `make test`. `--bug NAME`: the counterexample of a planted bug. `--list`: what can be run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tests.model.modules import Bug, Configuration, modules
from tests.model.tlc import JARS, TlcFailed

_ROW = "{:<34} {:>12} {:>12} {:>6} {:>8}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a property does not hold, or TLC does not find a planted bug."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODULE[.CONFIGURATION]", help="check these only")
    parser.add_argument("--small", action="store_true", help="only the configurations that `make test` checks")
    parser.add_argument("--bug", metavar="NAME", help="show the counterexample of this planted bug")
    parser.add_argument("--list", action="store_true", help="list configurations and planted bugs")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads of TLC")
    parser.add_argument("--minutes", type=float, default=30.0, help="the longest that one configuration may take")
    asked = parser.parse_args(arguments)
    registered = modules()
    bugs = {bug.name: bug for module in registered for bug in module.bugs}
    wanted = [each for module in registered for each in module.configurations]
    if asked.list:
        return _list(wanted, list(bugs.values()))
    JARS.fetch()
    if asked.bug is not None:
        if asked.bug not in bugs:
            parser.error(f"no planted bug is called {asked.bug}; there are: {', '.join(bugs)}")
        return _show(bugs[asked.bug])
    wanted = [each for each in wanted if not (asked.small and each.large)]
    if asked.names:
        wanted = [each for each in wanted if each.title in asked.names or each.module in asked.names]
    return _check(wanted, asked.workers, 60 * asked.minutes)


def _list(configurations: Sequence[Configuration], bugs: Sequence[Bug]) -> int:
    for each in configurations:
        print(f"{each.title}{' (large)' if each.large else ''}")
    for bug in bugs:
        print(f"--bug {bug.name}: violates {bug.configuration.module}!{bug.expected}. {bug.history}")
    return 0


def _show(bug: Bug) -> int:
    outcome = bug.configuration.check()
    print(f"{bug.name}: {bug.history}\n\n{outcome.told()}" if outcome.violated else f"{bug.name} was not found")
    return 0 if outcome.violated == bug.expected else 1


def _check(configurations: Sequence[Configuration], workers: int, timeout: float) -> int:
    failed = 0
    print(_ROW.format("configuration", "states", "distinct", "depth", "seconds", "verdict"))
    for each in configurations:
        try:
            outcome = each.check(workers=workers, timeout=timeout)
        except TlcFailed as error:
            failed += 1
            print(f"{each.title}: {error}", flush=True)
            continue
        failed += bool(outcome.violated)
        counts = f"{outcome.states:,}", f"{outcome.distinct:,}", outcome.depth, f"{outcome.seconds:.0f}"
        print(_ROW.format(each.title, *counts, "violated" if outcome.violated else "holds"), flush=True)
        if outcome.violated:
            print(outcome.told())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
