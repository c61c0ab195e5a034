"""Steps that must not stop half-way, called by readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def shielded(step: Callable[[], T]) -> T:
    """What `step` returns or raises; once begun it runs to its end, even if the caller is interrupted meanwhile.

    Python raises KeyboardInterrupt, and what other signals raise, in the main thread between any two instructions. So
    there the step runs in a thread of its own: 0.1 ms. Its locks must be taken inside of it.
    """
    if threading.current_thread() is not threading.main_thread():
        return step()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(step())
        except BaseException as error:  # noqa: BLE001 - raised where it was called
            failed.append(error)

    thread = threading.Thread(target=run, name="memtable-step", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
