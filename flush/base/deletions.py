"""Check whether a file with the deletions of a fragment is whole. Pure.

A deletion file has no checksum, but a version's manifest records how many rows it deletes:

    ….arrow   Arrow IPC file of one column: uint32 offset of each row, no two the same
    ….bin     Roaring bitmap, little-endian: u32 12346, u32 number of containers; or u32 12347 + (number - 1) * 65536,
              then one bit for each container that is of runs. Per container u16 upper half of offsets, u16 rows - 1.
              Per container u32 position; beside containers of runs only where there are 4 or more. Per container:
              of runs: u16 number, then per run u16 first, u16 length - 1
              of up to 4,096 rows: u16 lower half of each offset
              of more: 65,536 bits

This detects a truncated file, and blocks of zeros, which remove rows or make two equal. Source: the Roaring bitmap
format specification; checked against files of pylance 14.0.2.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa

_WITHOUT_RUNS, _WITH_RUNS = 12346, 12347
_ARRAY_MAX = 4096
_BITS = 8192
"""Bytes of a container of bits."""


def is_whole(key: str, data: bytes, deleted: int) -> bool:
    """Return whether `data` is a whole deletion file with the key `key`.

    `deleted`: rows that it deletes, 0 if not recorded.
    """
    try:
        found = _rows_of_bitmap(data) if key.endswith(".bin") else _rows_of_arrow(data)
    except (ValueError, OSError, struct.error, pa.ArrowException):  # OSError: it cannot be decompressed
        return False
    return found == (deleted or found)


def _rows_of_arrow(data: bytes) -> int:
    offsets = pa.ipc.open_file(data).read_all().column(0)
    if offsets.null_count:
        raise ValueError("an offset is null")
    return len(np.unique(offsets.to_numpy()))


def _rows_of_bitmap(data: bytes) -> int:
    """Return the number of rows. Raises ValueError, struct.error."""
    (cookie,) = struct.unpack_from("<I", data)
    if cookie == _WITHOUT_RUNS:
        (number,), at = struct.unpack_from("<I", data, 4), 8
        of_runs = np.zeros(number, bool)
    elif cookie & 0xFFFF == _WITH_RUNS:
        number = (cookie >> 16) + 1
        flags = np.frombuffer(data, np.uint8, -(-number // 8), 4)
        of_runs, at = np.unpackbits(flags, bitorder="little")[:number].astype(bool), 4 + len(flags)
    else:
        raise ValueError(f"it begins with {cookie}")
    headers = np.frombuffer(data, "<u2", 2 * number, at)
    if len(np.unique(headers[::2])) != number:
        raise ValueError("two containers are of the same rows")
    sizes = headers[1::2].astype(np.int64) + 1
    at += 4 * number if of_runs.any() and number < 4 else 8 * number
    for size, is_of_runs in zip(sizes.tolist(), of_runs.tolist(), strict=True):
        found, length = _rows_of_container(data, at, size, is_of_runs)
        if found != size:
            raise ValueError(f"a container has {found} rows, {size} are recorded")
        at += length
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, not {at}")
    return int(sizes.sum())


def _rows_of_container(data: bytes, at: int, size: int, is_of_runs: bool) -> tuple[int, int]:
    """Return the number of rows in the container at `at`, and its length in bytes."""
    if is_of_runs:
        (runs,) = struct.unpack_from("<H", data, at)
        lengths = np.frombuffer(data, "<u2", 2 * runs, at + 2)[1::2]
        return int(lengths.astype(np.int64).sum()) + runs, 2 + 4 * runs
    if size <= _ARRAY_MAX:
        return len(np.unique(np.frombuffer(data, "<u2", size, at))), 2 * size
    return int(np.unpackbits(np.frombuffer(data, np.uint8, _BITS, at)).sum()), _BITS
