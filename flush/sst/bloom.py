"""The bloom filter of an SST: `bloom_filter.bin`.

    block 0 | block 1 | ...      a block is 8 little-endian u32; no header: the number of blocks is size / 32

A split-block bloom filter as in Parquet, with Parquet's salts, over SipHash-1-3 of the key's hash form
(flush.sst.key_encoding). A hash h sets, in block (h >> 32) * blocks >> 32, one bit of each word i: (u32(h) * salt[i])
>> 27. Source: Apache Parquet, "Parquet Bloom Filter"; Lance's `ShardWriter`, byte for byte at 1,024 blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memwal.flush.base.siphash import Hashes, siphash13
from memwal.flush.sst.key_encoding import hash_form

BLOOM_NAME = "bloom_filter.bin"
UPSTREAM_BLOCKS = 1024
"""Blocks that Lance's writer always uses: 32,768 bytes, for any number of keys. Its reader accepts any number."""
BITS_PER_KEY = 10
"""1.2 % false positives for a split-block filter. At 100,000 keys Lance's fixed size passes 68 % of absent keys."""
_BITS_OF_FEW_KEYS = 32
"""Below 8,192 keys: fewer than 0.01 % false positives. 1,000 keys take 4 KB."""

_BLOCK_BITS = 256
_WORD_BITS = 32
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31],
    dtype=np.uint32,
)


def blocks_for(keys: int) -> int:
    """Return the blocks for a filter of `keys` keys: as many as Lance's, fewer for few keys, more for many."""
    few, many = (-(-keys * bits // _BLOCK_BITS) for bits in (_BITS_OF_FEW_KEYS, BITS_PER_KEY))
    return max(1, min(few, UPSTREAM_BLOCKS), many)


def bloom_bytes(keys: pa.Table, nblocks: int | None = None) -> bytes:
    """Return the filter over all rows of `keys` (the key columns, in key order, no nulls).

    `nblocks`: None for blocks_for(rows). Pure. Holds one byte of memory per bit of the filter.
    """
    blocks = blocks_for(keys.num_rows) if nblocks is None else nblocks
    bits = np.zeros(blocks * _BLOCK_BITS, dtype=np.uint8)
    if keys.num_rows:
        for positions in _bit_positions(siphash13(hash_form(keys)), blocks):
            bits[positions] = 1
    # The bytes of little-endian u32 words, bit 0 lowest, are the bits in little order.
    return np.packbits(bits, bitorder="little").tobytes()


def contains(data: bytes, keys: pa.Table) -> npt.NDArray[np.bool_]:
    """Return for each row of `keys` whether the filter may hold it (False: certainly not).

    Raises ValueError for a bad size of `data`.
    """
    if not data or len(data) % (_BLOCK_BITS // 8):
        raise ValueError(f"a bloom filter of {len(data)} bytes: its size must be a multiple of {_BLOCK_BITS // 8}")
    if not keys.num_rows:
        return np.zeros(0, dtype=bool)
    raw, held = np.frombuffer(data, dtype=np.uint8), np.ones(keys.num_rows, dtype=bool)
    for positions in _bit_positions(siphash13(hash_form(keys)), len(data) * 8 // _BLOCK_BITS):
        held &= (raw[positions >> 3] >> (positions & 7).astype(np.uint8)) & 1 == 1
    return held


def _bit_positions(hashes: Hashes, blocks: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield for each of the 8 words the bit position of every hash: int64 of shape (hashes,)."""
    block = ((hashes >> np.uint64(32)) * np.uint64(blocks)) >> np.uint64(32)
    first, low = block.astype(np.int64) * _BLOCK_BITS, hashes.astype(np.uint32)
    for word, salt in enumerate(_SALTS):
        yield first + ((low * salt) >> np.uint32(27)) + word * _WORD_BITS
