"""The terms of an index within some edits of a word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

MAX_SIMILAR = 1024
"""Terms that one fuzzy word stands for, in one index; if there are more, the first in byte order, as in Lance. Lance's
default of 50 would often omit the closest ones: several hundred English words are within two edits of four letters.
"""


class Terms:
    """The distinct terms of an index.

    Thread safety. Immutable; any thread. Cost: 0.1 µs per term of about the word's length, for one edit or two.
    """

    def __init__(self, terms: Sequence[str]) -> None:
        self._terms = pa.array(terms, pa.large_string())
        self._lengths: npt.NDArray[np.int32] = pc.utf8_length(self._terms).to_numpy().astype(np.int32)

    @property
    def bytes(self) -> int:
        """Bytes of the terms and their lengths."""
        return int(self._terms.nbytes + self._lengths.nbytes)

    def similar(self, word: str, edits: int) -> list[str]:
        """Return the terms within `edits` of `word`, in byte order, at most MAX_SIMILAR."""
        near = np.flatnonzero(np.abs(self._lengths - len(word)) <= edits)
        candidates: list[str] = self._terms.take(pa.array(near)).to_pylist()
        if not candidates:
            return []
        within = distances(word, candidates, self._lengths[near], edits) <= edits
        # Python orders strings by code points, which is the order of their UTF-8 bytes.
        return sorted(candidates[at] for at in np.flatnonzero(within))[:MAX_SIMILAR]


def distances(word: str, terms: Sequence[str], lengths: npt.NDArray[np.int32], edits: int) -> npt.NDArray[np.int32]:
    """Return Levenshtein distances (int32 [terms]) up to `edits`, a larger number for terms further away.

    An edit inserts, deletes or replaces one code point; two swapped neighbours are two edits, as in Lance. `lengths`:
    of the terms, in code points, each within `edits` of the word's.

    Computes the rows of the dynamic programme (Wagner and Fischer 1974) for all terms at once, and of each row only the
    diagonals that `edits` allows (Ukkonen 1985).
    """
    wide = len(word) + edits
    letters = np.array(terms, dtype=f"U{wide}").view(np.uint32).reshape(len(terms), wide).T
    far = np.full(len(terms), edits + 1, np.int32)
    # At `edits + shift`: the distance of the first i letters of the word from the first i + shift of each term.
    row = [far if shift < 0 else np.full(len(terms), shift, np.int32) for shift in range(-edits, edits + 1)]
    for i, letter in enumerate(word, 1):
        above, row = [*row, far], []
        for at in range(2 * edits + 1):
            j = i + at - edits
            if j < 1:
                row.append(far if j < 0 else np.full(len(terms), i, np.int32))
                continue
            best = np.minimum(above[at] + (letters[j - 1] != ord(letter)), above[at + 1] + 1)
            row.append(np.minimum(best, row[-1] + 1) if row else best)
    return np.choose(lengths - len(word) + edits, row)
