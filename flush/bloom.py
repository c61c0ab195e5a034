"""The bloom filter of an SST: `bloom_filter.bin`.

    block 0 | block 1 | ...      a block is 8 little-endian u32; no header: the number of blocks is size / 32

A split-block bloom filter as in Parquet, with Parquet's salts, over SipHash-1-3 of the key's hash form
(flush.key_encoding). For a hash h: block (h >> 32) * blocks >> 32; in word i of it the bit (u32(h) * salt[i])
>> 27. Source: Apache Parquet, "Parquet Bloom Filter"; Lance's `ShardWriter`, byte for byte at 1,024 blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flush.key_encoding import hash_form
from flush.siphash import Hashes, siphash13

BLOOM_NAME = "bloom_filter.bin"
UPSTREAM_BLOCKS = 1024
"""What Lance's writer always uses: 32,768 bytes, whatever the number of keys."""
BITS_PER_KEY = 10
"""1.2 % false positives for a split-block filter. Lance's fixed size passes 68 % of absent keys at 100,000
keys.
"""

_BLOCK_BITS = 256
_WORDS = 8
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31],
    dtype=np.uint32,
)


def blocks_for(keys: int) -> int:
    """Blocks for a filter of `keys` keys: Lance's number, more where that would be too few."""
    return max(UPSTREAM_BLOCKS, -(-keys * BITS_PER_KEY // _BLOCK_BITS))


def bloom_bytes(keys: pa.Table, nblocks: int | None = None) -> bytes:
    """The filter over all rows of `keys` (the key columns, in key order, no nulls). `nblocks`: None for
    blocks_for(rows).

    Pure. Holds one byte per bit of the filter while it works.
    """
    blocks = blocks_for(keys.num_rows) if nblocks is None else nblocks
    bits = np.zeros(blocks * _BLOCK_BITS, dtype=np.uint8)
    if keys.num_rows:
        bits[_bit_positions(siphash13(hash_form(keys)), blocks)] = 1
    # Little-endian u32 words with bit 0 lowest are, byte by byte, just bits in little order.
    return np.packbits(bits, bitorder="little").tobytes()


def contains(data: bytes, keys: pa.Table) -> npt.NDArray[np.bool_]:
    """For each row of `keys` whether the filter may hold it (False: certainly not). Raises ValueError on a
    bad size.
    """
    if not data or len(data) % (_BLOCK_BITS // 8):
        raise ValueError(f"a bloom filter of {len(data)} bytes: its size must be a multiple of {_BLOCK_BITS // 8}")
    if not keys.num_rows:
        return np.zeros(0, dtype=bool)
    positions = _bit_positions(siphash13(hash_form(keys)), len(data) * 8 // _BLOCK_BITS)
    raw = np.frombuffer(data, dtype=np.uint8)
    found = (raw[positions >> 3] >> (positions & 7).astype(np.uint8)) & 1
    return np.asarray(found.all(axis=1), dtype=bool)


def _bit_positions(hashes: Hashes, blocks: int) -> npt.NDArray[np.int64]:
    """Positions of the 8 bits of every hash, int64 of shape (hashes, 8)."""
    block = ((hashes >> np.uint64(32)) * np.uint64(blocks)) >> np.uint64(32)
    low = hashes.astype(np.uint32)
    bit = (low[:, None] * _SALTS[None, :]) >> np.uint32(27)
    word = np.arange(_WORDS, dtype=np.int64) * 32
    return block.astype(np.int64)[:, None] * _BLOCK_BITS + word[None, :] + bit.astype(np.int64)
