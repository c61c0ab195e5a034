"""Start a child daemon for a configuration, print its endpoint, and wait to be killed.

    parent.py CONFIG

One line out, JSON: {"pid", "endpoint"}. The input line `stop` stops the child in order and prints its exit code.
"""

from __future__ import annotations

import json
import os
import sys

from memwal.ingest.service.daemon.child import start_child
from memwal.ingest.settings.load import load


def main() -> None:
    """Run the program; see the module."""
    child = start_child(load(sys.argv[1], os.environ))
    print(json.dumps({"pid": child.pid, "endpoint": child.endpoint}), flush=True)
    if sys.stdin.readline().strip() == "stop":
        print(json.dumps({"code": child.stop()}), flush=True)


if __name__ == "__main__":
    main()
