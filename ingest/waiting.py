"""Waiting for the regions that the rows of one call went to.

A caller that stops waiting takes back what no region has begun to write. What a region has begun it finishes, and the
caller is told that the outcome is unknown; it gets its memory back only when the region has its own copy of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ingest.errors import FencedError, Unavailable, UnknownOutcome, classify
from ingest.region_writer import RegionWriter
from ingest.write_queue import Ack, Write
from wal import Clock, OutcomeUnknown

_FOR_EVER = 1e12
"""Seconds; a larger whole number need not fit into a float."""
_COPYING = 0.001
"""Seconds between two looks at a copy that is being made; it takes less for most groups."""


def written(waiting: Sequence[tuple[RegionWriter, Write]], *, within: float | None, clock: Clock) -> dict[str, Ack]:
    """Submit each write to its region and return the regions' acks by region id.

    When one region fails the others are still waited for, so that nothing is in flight after. `within`: seconds
    after which the call is given up, None for as long as it takes.
    Raises: the error of a region when none applied its rows; UnknownOutcome when any did, or may yet.
    """
    until = None if within is None else clock.monotonic() + min(within, _FOR_EVER)
    try:
        for writer, write in waiting:
            writer.submit(write, None if until is None else max(0.0, until - clock.monotonic()))
        errors = [error for writer, write in waiting if (error := _error(writer, write, until, clock)) is not None]
    except BaseException:  # an interrupt: the caller's memory is the caller's again
        for _, write in waiting:
            _leave(write, clock)
        raise
    if errors:
        raise _of_several(errors, {to.name: write.done.result() for to, write in waiting if _is_acked(write)})
    return {writer.name: write.done.result() for writer, write in waiting}


def _is_acked(write: Write) -> bool:
    return write.done.done() and write.done.exception() is None


def _of_several(errors: Sequence[BaseException], acks: Mapping[str, Ack]) -> BaseException:
    """What a call is told whose regions answered differently: Unavailable promises that nothing was applied.

    Where the others surely applied nothing, the details hold the acks: who knows where rows go sends the rest again.
    """
    unknown = next((error for error in errors if isinstance(error, UnknownOutcome | OutcomeUnknown)), None)
    if unknown is not None or not acks:
        return unknown or errors[0]
    kinds = [classify(error) for error in errors]
    surely = all(isinstance(kind, Unavailable | FencedError) for kind in kinds)
    partly = UnknownOutcome(
        f"{len(acks)} of {len(acks) + len(errors)} regions applied their rows, the others did not: {errors[0]}; "
        "retry with the same token",
        kinds[0].details | (_in_details(acks) if surely else {}),
    )
    partly.__cause__ = errors[0]
    return partly


def _in_details(acks: Mapping[str, Ack]) -> dict[str, Any]:
    return {
        "positions": {region: ack.position for region, ack in acks.items()},
        "applied": any(ack.applied for ack in acks.values()),
        "skipped": sum(ack.skipped for ack in acks.values()),
        "regions": {region: asdict(ack.counts) for region, ack in acks.items()},
    }


def _error(writer: RegionWriter, write: Write, until: float | None, clock: Clock) -> BaseException | None:
    if until is None:
        return write.done.exception()
    try:
        return write.done.exception(until - clock.monotonic())
    except TimeoutError:
        if _leave(write, clock):
            return Unavailable(
                f"region {writer.name}: the write was not begun in time and was withdrawn; retry, or raise the timeout"
            )
        return UnknownOutcome(
            f"region {writer.name}: the write was begun but not known in time; it may be applied now or later; "
            "retry with the same token"
        )


def _leave(write: Write, clock: Clock) -> bool:
    """Withdraw a write; False where its region has begun with it, which then has its own copy on return."""
    if write.take():
        return True
    while not write.copied and not write.done.done():
        clock.sleep(_COPYING)
    return False
