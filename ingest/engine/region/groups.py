"""Build the groups of writes that become one WAL entry each; reject faulty writes.

Nothing is written before a group is ready, so a failure here goes to the callers and never ends the region. Steps for
the writes that have gathered:

1. As many writes as fit into one entry form a group (`entry_sized`). A write that its caller withdrew is left out; a
   write in the table's former columns is converted to the current ones.
2. Writes whose token was applied before are set aside (`Repeats`) and answered with the group. Each token is applied
   once, even if the table is resized in between.
3. The rows of the other writes are checked and copied together (`region.admission`). If they depend on stored
   rows, by the table's rules or because they lack columns, they are completed to whole rows (`region.resolve`).
   A delete with a condition is a group by itself: its keys are narrowed to those whose newest row passes
   (`Conditions`). If writes depend on stored rows, a write with expired rows is also a group by itself,
   because its keys have no row for the writes after it.
4. If step 3 rejects some writes, they get their error, and the others start again at step 2: their result may depend on
   rows of a rejected write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memwal.flush.resizing.applied_maps import exceptions_by_producer, left_over, settle
from memwal.ingest.engine.api.rows import size_bound
from memwal.ingest.engine.api.tokens import Ack, Token
from memwal.ingest.engine.region.admission import Admission, fitted
from memwal.ingest.engine.region.context import RegionContext
from memwal.ingest.engine.region.resolve import Conditions, Refused, Resolver, View
from memwal.ingest.engine.region.write_queue import Write
from memwal.ingest.errors import Invalid
from memwal.memtable import Checked
from memwal.wal.applied import NAMES_MAX, AppliedMap

_ack = lru_cache(maxsize=256)(Ack)  # most writes of a group get equal acks


@dataclass(frozen=True, slots=True)
class WriteGroup:
    """Writes that are logged, applied and answered together; the region owns the memory of their rows.

    `fresh`: the writes that were not applied before. `rows`: their rows. `skipped`: the number of rows left out of each
    of them, or empty if none was. `applied`: the region's applied map after the group; the same object as before if the
    group has no new token.
    """

    writes: Sequence[Write]
    fresh: Sequence[Write]
    rows: Checked | None
    applied: AppliedMap
    skipped: Sequence[int]

    @property
    def durable(self) -> bool:
        """Whether a caller waits until the group is on storage."""
        return any(write.durable for write in self.writes)

    def acknowledge(self, position: int) -> None:
        """Acknowledge every write. `position`: the entry that made them durable, 0 if they are not durable yet."""
        first_time = {id(write) for write in self.fresh} if len(self.fresh) < len(self.writes) else None
        skipped = dict(zip(map(id, self.fresh), self.skipped, strict=True)) if self.skipped else {}
        for write in self.writes:
            applied = first_time is None or id(write) in first_time
            newest = None if applied or write.token is None else self.applied.get(write.token.producer)
            given = write.rows.num_rows + write.repeated
            repeated = write.repeated if applied else given
            write.done.set_result(_ack(given, applied, position, skipped.get(id(write), 0), newest, repeated))

    def fail(self, error: Exception) -> None:
        """Fail every write with the error that kept the group out of the log."""
        _fail(self.writes, error)


class WriteGroups:
    """Build groups from the writes of one region, for one shape of the table and its rules.

    Thread safety. The region's thread only. Invariants. Every given write is in the group or has its answer, unless a
    method raises; then the region ends.
    """

    def __init__(self, context: RegionContext, repeats: Repeats, view: View) -> None:
        """`repeats`: belongs to the claim and outlives this object. `view`: captures the region's levels."""
        self._context, self._repeats, self._view = context, repeats, view
        self._admission = Admission(context)
        self._resolver = Resolver(context, self._admission)
        self._always = context.rules.upsert == "insert" or bool(context.rules.version)
        self._conditions = Conditions(context, self._admission)

    def runs(self, writes: Sequence[Write], size_max: int) -> Iterator[Sequence[Write]]:
        """Yield `writes` in runs that can become one group each; see `entry_sized`."""
        depend = len(writes) > 1 and self._depend(writes)
        return entry_sized(writes, size_max, self._is_alone if depend else _is_conditional)

    def _depend(self, writes: Sequence[Write]) -> bool:
        """Return whether the logged rows of `writes` depend on stored rows, by the table's rules or missing columns."""
        return self._always or any(map(self._admission.keeps_some, writes))

    def _is_alone(self, write: Write) -> bool:
        any_expired = self._context.any_expired
        return write.where is not None or (any_expired is not None and any_expired(write.rows))

    def group(self, gathered: Sequence[Write], applied: AppliedMap) -> WriteGroup | None:
        """Return the group of the writes that can be written, or None. `applied`: the region's applied map."""
        left = [write for write in gathered if write.take() and self._fits(write)]
        left = [write for write in left if not self._repeats.refused(write, applied)]
        while left:
            group = self._together(left, applied)
            if isinstance(group, WriteGroup):
                return group
            left = group
        return None

    def _fits(self, write: Write) -> bool:
        """Convert rows of a former shape of the table to the region's shape; return False if the write was rejected."""
        shape = self._context.shape
        if write.shape is None or shape is None or write.shape is shape:
            return True
        try:
            partly = self._admission.keeps and write.deletes is not True
            write.rows, write.shape = fitted(write.rows, write.shape, shape, partly=partly), shape
        except Exception as error:  # noqa: BLE001 - passed to the caller with the answer
            write.done.set_exception(error)
            return False
        return True

    def _together(self, writes: Sequence[Write], applied: AppliedMap) -> WriteGroup | list[Write]:
        """Return the group of all `writes`; if some were rejected, the list of the other, unanswered writes."""
        fresh, applied_then = self._repeats.set_aside(writes, applied, self._admission)
        skipped: Sequence[int] = ()
        try:
            rows = self._admission.gather(fresh) if fresh else None
        except Exception as error:  # noqa: BLE001 - passed to the faulty writes
            return self._without_faulty(writes, error)
        is_conditional = bool(fresh) and fresh[0].where is not None
        if rows is not None and rows.num_rows and (is_conditional or self._depend(fresh)):
            resolver = self._conditions if is_conditional else self._resolver
            _copied(fresh)  # the lookup may wait for storage
            try:
                rows, skipped = resolver.resolve(fresh, rows, self._view)
            except Refused as refused:
                return _without_refused(writes, fresh, rows, refused)
            except Exception as error:  # noqa: BLE001 - nothing was written: the callers get the error
                _fail(writes, error)
                return []
        _copied(writes)
        return WriteGroup(writes, fresh, rows, applied_then, skipped)

    def _without_faulty(self, writes: Sequence[Write], error: Exception) -> list[Write]:
        """Reject the faulty writes after the group failed with `error`; return the others."""
        passed = []
        for write in writes:
            try:
                self._admission.check(write.rows, deletes=write.deletes)
                passed.append(write)
            except Exception as fault:  # noqa: BLE001 - passed to the caller
                write.done.set_exception(fault)
        if len(passed) < len(writes):
            return passed
        _fail(passed, error)  # each write passes alone; for example, memory did not suffice for all
        return []


def _is_conditional(write: Write) -> bool:
    return write.where is not None


def entry_sized(
    writes: Sequence[Write], size_max: int, alone: Callable[[Write], bool] = _is_conditional
) -> Iterator[Sequence[Write]]:
    """Yield runs of `writes` that fit into one entry of `size_max` bytes, or consist of one larger write.

    `alone`: returns whether a write must be a run by itself, such as one with a condition: its result depends on the
    writes before it.
    """
    if len(writes) == 1:
        yield writes
        return
    run: list[Write] = []
    size, closed = 0, False
    for write in writes:
        more, closes = size_bound(write.rows), alone(write)
        if run and (size + more > size_max or closes or closed):
            yield run
            run, size = [], 0
        run.append(write)
        size, closed = size + more, closes
    if run:
        yield run


def _without_refused(
    writes: Sequence[Write], fresh: Sequence[Write], checked: Checked, refused: Refused
) -> list[Write]:
    """Answer the rejected writes of `fresh`; return the other `writes`, with the region's copy of their rows."""
    start = 0
    for number, write in enumerate(fresh):
        rows = write.rows.num_rows
        # A caller that has stopped waiting may change its memory, so the write must refer to the copy.
        write.rows = checked.rows.slice(start, rows).select(write.rows.column_names)
        start += rows
        if number in refused.errors:
            write.done.set_exception(refused.errors[number])
    return [write for write in writes if not write.done.done()]


def _copied(writes: Sequence[Write]) -> None:
    for write in writes:
        write.copied = True


def _fail(writes: Sequence[Write], error: Exception) -> None:
    for write in writes:
        write.done.set_exception(error)


class Repeats:
    """Detect writes that repeat a token the region has applied.

    Thread safety. The region's thread only.
    """

    def __init__(self, applied: Mapping[str, int]) -> None:
        """`applied`: the map at the time of the claim; only a resize adds exceptions (half-applied tokens)."""
        self._half_applied = exceptions_by_producer(applied)

    def set_aside(
        self, group: Sequence[Write], applied: AppliedMap, admission: Admission
    ) -> tuple[list[Write], AppliedMap]:
        """Return the writes of `group` that were not applied before, in order, and the applied map after them.

        The map is `applied` itself if they have no new token. A write that was half applied at a resize is reduced to
        the rows that were not applied. A write with a condition leaves the map unchanged.
        """
        fresh, after = [], applied
        for write in group:
            token = write.token
            if token is not None:
                repeated = after.get(token.producer, -1) >= token.sequence
                if repeated and not self._left_over(write, after, admission):
                    continue
                if write.where is None:
                    after = applied.copy() if after is applied else after
                    self._record(token, after)
            fresh.append(write)
        return fresh, after

    def half_applied(self, producer: str, applied: Mapping[str, int]) -> bool:
        """Return whether the rest of the newest sequence of `producer`, half applied at a resize, is missing."""
        return any(key in applied for key in self._half_applied.get(producer, ()))

    def _record(self, token: Token, applied: AppliedMap) -> None:
        if token.producer in self._half_applied:
            settle(applied, self._half_applied, token.producer, token.sequence)
        else:
            applied[token.producer] = token.sequence

    @staticmethod
    def refused(write: Write, applied: AppliedMap) -> bool:
        """Reject `write` if its producer was retired, because repeats are unknown; return whether it was rejected."""
        token = write.token
        if token is None or not applied.is_retired(token.producer):
            return False
        write.done.set_exception(
            Invalid(
                f"token '{token.producer}:{token.sequence}': the region keeps the last {NAMES_MAX:,} names and retired "
                f"{token.producer!r}, so it cannot tell a retry from a new write; look whether the rows are there, and "
                "take a new name"
            )
        )
        return True

    def _left_over(self, write: Write, applied: Mapping[str, int], admission: Admission) -> bool:
        token, route = write.token, admission.context.route_into
        if token is None or token.producer not in self._half_applied or route is None:
            return False
        if not write.rows.num_rows:  # it announces that no rows follow
            return token.sequence == applied.get(token.producer) and self.half_applied(token.producer, applied)
        try:
            admission.check(write.rows, deletes=write.deletes)
        except Exception:  # noqa: BLE001 - `_together` rejects it, with the reason
            return True
        left = left_over(applied, self._half_applied, token.producer, token.sequence, write.rows, route)
        if left.any() and not left.all():
            write.keep(left)
        return bool(left.any())
