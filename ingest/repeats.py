"""Which writes a region has applied before: each token is applied once, whatever the table was resized to meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flush.resizing.carried import left_over, settle, with_exceptions
from ingest.admission import Admission
from ingest.errors import Invalid
from ingest.write_queue import Write
from wal.applied import NAMES_MAX, AppliedMap


class Repeats:
    """Tells the writes of one region that are repeats of what it has applied.

    Thread safety. The region's thread only.
    """

    def __init__(self, applied: Mapping[str, int]) -> None:
        """`applied`: the map with which the region was claimed; exceptions are made by a resize only."""
        self._half_applied = with_exceptions(applied)

    def set_aside(
        self, group: Sequence[Write], applied: AppliedMap, admission: Admission
    ) -> tuple[list[Write], AppliedMap]:
        """The writes of `group` that were not applied before, in order, and the applied map once they are.

        A write that a resize met half applied is cut down to the rows that are left of it.
        """
        fresh, after = [], applied.copy() if any(write.token for write in group) else applied
        for write in group:
            token = write.token
            if token is not None:
                repeated = after.get(token.producer, -1) >= token.sequence
                if repeated and not self._left_over(write, after, admission):
                    continue
                if token.producer in self._half_applied:
                    settle(after, self._half_applied, token.producer, token.sequence)
                else:
                    after[token.producer] = token.sequence
            fresh.append(write)
        return fresh, after

    def half_applied(self, producer: str, applied: Mapping[str, int]) -> bool:
        """Whether rows of the newest sequence of `producer` are left, which a resize met half applied."""
        return any(key in applied for key in self._half_applied.get(producer, ()))

    @staticmethod
    def refused(write: Write, applied: AppliedMap) -> bool:
        """Whether nobody can tell if `write` was applied before: its token's name was retired. Then it is answered."""
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
        try:
            admission.check(write.rows, deletes=write.deletes)
        except Exception:  # noqa: BLE001 - it is refused, with the reason, by whoever takes it
            return True
        left = left_over(applied, self._half_applied, token.producer, token.sequence, write.rows, route)
        if left.any() and not left.all():
            write.keep(left)
        return bool(left.any())
