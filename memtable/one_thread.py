"""faiss on the calling thread alone."""

from __future__ import annotations

import faiss


class one_thread:  # noqa: N801 - a context, used like a function
    """A context in which faiss runs on the calling thread only.

    Training then adds numbers in one order, so it is reproducible, and region writers do not compete for the cores.
    OpenMP keeps this setting per calling thread, so it has no effect outside the block or in other threads.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        faiss.omp_set_num_threads(self._before)
