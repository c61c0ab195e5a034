"""The bloom filter has no false negatives, few false positives, and a size that depends on the number of keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from memwal.flush.sst.bloom import UPSTREAM_BLOCKS, bloom_bytes, contains
from tests.messages import raises


def keys(first: int, count: int) -> pa.Table:
    return pa.table({"k": [f"key-{i}" for i in range(first, first + count)], "n": range(first, first + count)})


def test_holds_every_key_put_in() -> None:
    assert contains(bloom_bytes(keys(0, 5_000)), keys(0, 5_000)).all()


def test_passes_few_absent_keys_even_when_there_are_many() -> None:
    data = bloom_bytes(keys(0, 100_000))
    assert contains(data, keys(1_000_000, 20_000)).mean() < 0.03


def test_is_as_large_as_lances_between_few_keys_and_many() -> None:
    assert len(bloom_bytes(keys(0, 10))) == 64
    assert len(bloom_bytes(keys(0, 1_000))) == 4_000
    assert len(bloom_bytes(keys(0, 20_000))) == UPSTREAM_BLOCKS * 32
    assert len(bloom_bytes(keys(0, 100_000))) > UPSTREAM_BLOCKS * 32


@pytest.mark.parametrize("count", [1, 10, 100, 1_000])
def test_passes_hardly_any_absent_key_where_there_are_few(count: int) -> None:
    assert contains(bloom_bytes(keys(0, count)), keys(1_000_000, 20_000)).mean() < 0.002


def test_an_empty_filter_holds_nothing() -> None:
    assert not contains(bloom_bytes(keys(0, 0)), keys(0, 100)).any()
    assert contains(bloom_bytes(keys(0, 3)), keys(0, 0)).shape == (0,)


def test_refuses_bytes_that_are_no_filter() -> None:
    with raises(ValueError):
        contains(bytes(33), keys(0, 1))


def test_order_of_the_keys_does_not_matter() -> None:
    shuffled = keys(0, 1000).take(pa.array(np.random.default_rng(1).permutation(1000)))
    assert bloom_bytes(shuffled) == bloom_bytes(keys(0, 1000))
