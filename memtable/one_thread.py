"""faiss on the calling thread alone."""

from __future__ import annotations

import faiss


class one_thread:  # noqa: N801 - a context, used like a function
    """Within it faiss runs on the calling thread only.

    Training then adds in one order, so it is reproducible, and region writers do not fight over the cores. OpenMP keeps
    this number per calling thread, so nothing outside the block, and no other thread, sees it.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        faiss.omp_set_num_threads(self._before)
