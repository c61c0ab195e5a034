"""Steps that must not be interrupted, and faiss on the calling thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import faiss

T = TypeVar("T")


def uninterrupted(step: Callable[[], T]) -> T:
    """Run `step` to its end, even if the caller is interrupted meanwhile. Return or raise what `step` does.

    Python raises KeyboardInterrupt and the errors of signal handlers in the main thread between any two instructions.
    Therefore a step of the main thread runs in another thread, which costs 0.1 ms. `step` must take its locks inside.
    """
    if threading.current_thread() is not threading.main_thread():
        return step()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(step())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="memtable-step", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


class faiss_single_thread:  # noqa: N801 - a context, used like a function
    """A context that makes faiss run on the calling thread only.

    Training then adds numbers in one order, so it is reproducible, and region writers do not compete for the cores.
    OpenMP keeps this setting per calling thread, so it has no effect outside the block or in other threads.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        faiss.omp_set_num_threads(self._before)
