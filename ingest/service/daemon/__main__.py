"""A child daemon: `python -m memwal.ingest.service.daemon`, started by its parent (`daemon.child`)."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from contextlib import suppress
from typing import Any

from memwal.ingest.errors import to_wire
from memwal.ingest.own_process import own_process, without_pandas


def _say(answer: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the parent has ended: the lifeline ends this process
        sys.stdout.write(json.dumps(answer, default=str) + "\n")
        sys.stdout.flush()


def main() -> int:
    """Read the configuration, serve, and report an error to the parent; return the exit code."""
    from memwal.ingest.service.daemon.process import limit_arenas

    limit_arenas()
    without_pandas()
    from memwal.ingest.engine.table.replay_progress import Unhurried, in_words
    from memwal.ingest.errors import classify
    from memwal.ingest.service.daemon.serve import serve
    from memwal.ingest.service.ops.logs import silence_grpc
    from memwal.wal import SystemClock
    from memwal.wal.panics import as_exception

    silence_grpc()
    try:
        settings, take_over = pickle.loads(base64.b64decode(sys.stdin.readline()))  # noqa: S301 - the parent wrote it
        replaying = Unhurried(lambda *told: _say({"replaying": in_words(*told)}), SystemClock())
        return serve(
            settings,
            os.environ,
            lifeline=sys.stdin,
            ready=lambda endpoint: _say({"endpoint": endpoint}),
            on_replay=replaying,
            take_over=take_over,
        )
    except BaseException as error:  # noqa: BLE001 - the edge of this process
        found = classify(as_exception(error))
        _say(to_wire(found))
        return found.exit_code


if __name__ == "__main__":
    own_process(main)
