"""Which writes a region has applied before: each token is applied once, whatever the table was resized to meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flush.carried import left_over, settled, with_exceptions
from ingest.admission import Admission
from ingest.write_queue import Write


class Repeats:
    """Tells the writes of one region that are repeats of what it has applied.

    Thread safety. The region's thread only.
    """

    def __init__(self, applied: Mapping[str, int]) -> None:
        """`applied`: the map with which the region was claimed; exceptions are made by a resize only."""
        self._half_applied = with_exceptions(applied)

    def set_aside(
        self, group: Sequence[Write], applied: Mapping[str, int], admission: Admission
    ) -> tuple[list[Write], dict[str, int]]:
        """The writes of `group` that were not applied before, in order, and the applied map once they are.

        A write that a resize met half applied is cut down to the rows that are left of it.
        """
        fresh, after = [], dict(applied)
        for write in group:
            token = write.token
            if token is not None:
                repeated = after.get(token.producer, -1) >= token.sequence
                if repeated and not self._left_over(write, after, admission):
                    continue
                if token.producer in self._half_applied:
                    after = settled(after, token.producer, token.sequence)
                else:
                    after[token.producer] = token.sequence
            fresh.append(write)
        return fresh, after

    def _left_over(self, write: Write, applied: Mapping[str, int], admission: Admission) -> bool:
        token, route = write.token, admission.context.route_into
        if token is None or token.producer not in self._half_applied or route is None:
            return False
        try:
            admission.check(write.rows, deletes=write.deletes)
        except Exception:  # noqa: BLE001 - it is refused, with the reason, by whoever takes it
            return True
        left = left_over(applied, token.producer, token.sequence, write.rows, route)
        if left.any() and not left.all():
            write.keep(left)
        return bool(left.any())
