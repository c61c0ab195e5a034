"""SipHash-1-3 with the key 0, 0 over many byte strings at once.

Lance's bloom filters use it: it is Rust's `DefaultHasher`. Source: Aumasson and Bernstein, "SipHash: a fast short-input
PRF" (2012), with one compression and three finalisation rounds.

The code is vectorised over the strings, not along them: one NumPy step mixes word j of all strings that have one. The
strings are sorted by length, so unfinished strings are always a prefix and the work is proportional to the bytes. A
NumPy step costs the same for one string as for hundreds, so the last few unfinished strings are completed one by one,
and a small input is hashed one by one from the start.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Hashes = npt.NDArray[np.uint64]

_INITIAL = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_FINALISATION_ROUNDS = 3
_WORD = 8
_MASK = (1 << 64) - 1
_BLOCK = 16_384
"""Strings hashed at a time: their four words of state fit into the processor's cache."""
_FEW = 20
"""A NumPy step (30 µs) takes as long as one word of this many strings, one after the other (1.5 µs each)."""


def siphash13(strings: pa.BinaryArray) -> Hashes:
    """Return the hash of every string, uint64 in the order given. `strings`: pa.binary(), no nulls. Pure."""
    if len(strings) <= _FEW:
        return np.array([_hash_one(string) for string in strings.to_pylist()], dtype=np.uint64)
    starts, lengths, words = _layout(strings)
    blocks = [slice(at, at + _BLOCK) for at in range(0, len(strings), _BLOCK)]
    hashes = [_hashes(starts[block], lengths[block], words) for block in blocks]
    return np.concatenate(hashes) if hashes else np.empty(0, dtype=np.uint64)


def _hash_one(string: bytes) -> int:
    """Return the hash of one string."""
    whole = len(string) // _WORD * _WORD
    last = int.from_bytes(string[whole:], "little") | (len(string) & 0xFF) << 56
    a, b, c, d = _mix_one(_INITIAL, [*struct.unpack(f"<{whole // _WORD}Q", string[:whole]), last])
    a, b, c, d = _mix_one((a, b, c ^ 0xFF, d), [0] * _FINALISATION_ROUNDS)
    return a ^ b ^ c ^ d


def _hashes(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], words: Hashes) -> Hashes:
    """Return the hashes of the strings of one block."""
    whole = lengths // _WORD
    order = np.argsort(-whole, kind="stable")
    starts, lengths, whole = starts[order], lengths[order], whole[order]
    state = [np.full(len(starts), initial, dtype=np.uint64) for initial in _INITIAL]
    together = int(whole[_FEW]) if len(whole) > _FEW else 0
    for word in range(together):
        running = int(np.searchsorted(-whole, -word, side="left"))
        _mix([part[:running] for part in state], words[starts[:running] + word * _WORD])
    for row in range(int(np.searchsorted(-whole, -together, side="left"))):
        start = int(starts[row])
        rest = words[start + together * _WORD : start + int(whole[row]) * _WORD : _WORD]
        for part, value in zip(state, _mix_one([int(part[row]) for part in state], rest.tolist()), strict=True):
            part[row] = value
    _mix(state, _last_word(words, starts + whole * _WORD, lengths))
    state[2] ^= np.uint64(0xFF)
    for _ in range(_FINALISATION_ROUNDS):
        _round(state)
    hashes = np.empty(len(starts), dtype=np.uint64)
    hashes[order] = state[0] ^ state[1] ^ state[2] ^ state[3]
    return hashes


def _layout(strings: pa.BinaryArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Hashes]:
    """Return start and length of every string, and the bytes as one little-endian word *per byte offset*."""
    _, offsets_buffer, data = strings.buffers()
    stored = np.frombuffer(offsets_buffer, dtype=np.int32)
    offsets = stored[strings.offset : strings.offset + len(strings) + 1].astype(np.int64)
    begin, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    # One more word of zeros, so that the last word of the last string can be read whole.
    padded = np.zeros(end - begin + _WORD, dtype=np.uint8)
    if end > begin:
        padded[: end - begin] = np.frombuffer(data, dtype=np.uint8)[begin:end]
    words: Hashes = np.ndarray(shape=(end - begin + 1,), dtype="<u8", buffer=padded.data, strides=(1,))
    starts: npt.NDArray[np.int64] = offsets[:-1] - begin
    lengths: npt.NDArray[np.int64] = np.diff(offsets)
    return starts, lengths, words


def _last_word(words: Hashes, at: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Hashes:
    """Return the 0-7 bytes after the last whole word, with the length modulo 256 in the top byte."""
    left = (lengths % _WORD).astype(np.uint64)
    mask = (np.uint64(1) << (left * np.uint64(8))) - np.uint64(1)
    tail: Hashes = words[at] & mask
    return tail | ((lengths.astype(np.uint64) & np.uint64(0xFF)) << np.uint64(56))


def _mix_one(state: Sequence[int], words: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the state of one string after more of its words: `_mix` of each, in plain integers."""
    a, b, c, d = state
    for word in words:
        d ^= word
        a = (a + b) & _MASK
        b = (b << 13 & _MASK | b >> 51) ^ a
        a = a << 32 & _MASK | a >> 32
        c = (c + d) & _MASK
        d = (d << 16 & _MASK | d >> 48) ^ c
        c = (c + b) & _MASK
        b = (b << 17 & _MASK | b >> 47) ^ c
        c = c << 32 & _MASK | c >> 32
        a = (a + d) & _MASK
        d = (d << 21 & _MASK | d >> 43) ^ a
        a ^= word
    return a, b, c, d


def _mix(state: list[Hashes], message: Hashes) -> None:
    """Mix one message word into the state, in place."""
    state[3] ^= message
    _round(state)
    state[0] ^= message


def _round(state: list[Hashes]) -> None:
    """SipRound, in place."""
    a, b, c, d = state
    _half(a, b, c, d, 13, 16)
    _half(c, b, a, d, 17, 21)


def _half(a: Hashes, b: Hashes, c: Hashes, d: Hashes, turn_b: int, turn_d: int) -> None:
    """Half a SipRound. The reference's second half is the first with v0 and v2 exchanged."""
    a += b
    _turn(b, turn_b)
    b ^= a
    _turn(a, 32)
    c += d
    _turn(d, turn_d)
    d ^= c


def _turn(value: Hashes, bits: int) -> None:
    high = value >> np.uint64(64 - bits)
    value <<= np.uint64(bits)
    value |= high
