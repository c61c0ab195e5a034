"""The vectorised SipHash-1-3, compared with a plain implementation string by string."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal.flush.base import siphash
from memwal.flush.base.siphash import siphash13

MASK = 2**64 - 1


def rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & MASK


def plain_round(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    a, c = (a + b) & MASK, (c + d) & MASK
    b, d = rotated(b, 13) ^ a, rotated(d, 16) ^ c
    a = rotated(a, 32)
    c, a = (c + b) & MASK, (a + d) & MASK
    b, d = rotated(b, 17) ^ c, rotated(d, 21) ^ a
    return a, b, rotated(c, 32), d


def plain(data: bytes) -> int:
    """The reference algorithm with key 0, 0."""
    state = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) % 256])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        a, b, c, d = plain_round(state[0], state[1], state[2], state[3] ^ word)
        state = (a ^ word, b, c, d)
    state = (state[0], state[1], state[2] ^ 0xFF, state[3])
    for _ in range(3):
        state = plain_round(*state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


@given(st.lists(st.binary(max_size=40), max_size=60))
def test_equals_the_reference_for_every_string(strings: list[bytes]) -> None:
    assert siphash13(pa.array(strings, pa.binary())).tolist() == [plain(each) for each in strings]


def test_a_slice_is_hashed_as_its_own_strings() -> None:
    strings = [b"one", b"two and a half", b"", b"three", b"x" * 300]
    assert siphash13(pa.array(strings, pa.binary()).slice(1, 4)).tolist() == [plain(each) for each in strings[1:]]


def test_few_long_strings_among_many_short_ones() -> None:
    """The hash processes all strings together first, then each long string alone. The lengths reach both phases at
    every step."""
    rng = np.random.default_rng(5)
    strings = [rng.bytes(int(n)) for n in (*rng.integers(0, 90, 200), *rng.integers(90, 4_000, 25), 8_000, 8_001)]
    assert siphash13(pa.array(strings, pa.binary())).tolist() == [plain(each) for each in strings]


def test_a_key_of_a_megabyte_does_not_hold_up_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """One NumPy step per word (131,072 steps) takes 13 s for this key, whatever the other keys are."""
    steps: list[int] = []
    mix = siphash._mix

    def counted(state: list[np.ndarray], message: np.ndarray) -> None:
        steps.append(len(message))
        mix(state, message)

    monkeypatch.setattr(siphash, "_mix", counted)
    keys = pa.array([*(str(n).encode() for n in range(20_000)), b"k" * (1 << 20)], pa.binary())
    siphash.siphash13(keys)
    assert 0 < len(steps) < 100
