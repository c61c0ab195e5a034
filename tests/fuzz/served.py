"""Run the daemon of the fuzzer: `python -m tests.fuzz.served BYTES FAULT CONFIG` is `memwal serve CONFIG` with an
address space of at most BYTES and with the fault FAULT of `tests.fuzz.planted` in its code ("-": no fault).
"""

from __future__ import annotations

import resource
import sys
from contextlib import nullcontext


def main(size: str, fault: str, config: str) -> None:
    """Run the command. It ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (int(size), int(size)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from memwal.ingest.cli.app import command
    from tests.fuzz.planted import PLANTED

    sys.argv[1:] = ["serve", config]
    with nullcontext() if fault == "-" else PLANTED[fault]():
        command()


if __name__ == "__main__":
    main(*sys.argv[1:])
