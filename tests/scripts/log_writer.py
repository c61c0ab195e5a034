"""Claim a region's log below ROOT and append one row after another, until done or fenced.

    log_writer.py ROOT FIRST COUNT

Lines out: "claimed EPOCH", "acked ID" after each entry, then "fenced" or "done". Ids are FIRST, FIRST+1, …
"""

from __future__ import annotations

import sys

import pyarrow as pa

from memwal.wal import Fenced, LanceCodec, SystemClock, SystemIds, WalAppender, bucket_region, claim, open_store

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("_tombstone", pa.bool_(), nullable=False)])


def main() -> None:
    """Run the program; see the module."""
    store, first, count = open_store(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    region, codec, ids, clock = bucket_region(0), LanceCodec(SCHEMA), SystemIds(), SystemClock()
    claimed = claim(store, region, spec_id=1, codec=codec, ids=ids, clock=clock)
    print(f"claimed {claimed.guard.epoch}", flush=True)
    log = WalAppender(store, region, claimed.guard, codec, claimed.next_position, ids, clock)
    try:
        for id in range(first, first + count):
            log.append(pa.table({"id": [id], "_tombstone": [False]}, schema=SCHEMA), generation=1, applied={})
            print(f"acked {id}", flush=True)
    except Fenced:
        print("fenced", flush=True)
    else:
        print("done", flush=True)


if __name__ == "__main__":
    main()
