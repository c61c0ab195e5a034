"""The log `memwal.access`: actions of admins, and calls that a caller's role does not permit."""

from __future__ import annotations

import logging

from memwal.ingest.service.rpc.roles import Role, permits
from memwal.wal import Clock

_LOG = logging.getLogger("memwal.access")


class AccessLog:
    """Writes the log.

    Thread safety. Any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._refused = clock, float("-inf")

    def admin(self, call: str, peer: str) -> None:
        """Log an action of an admin. `peer`: the caller's address."""
        _LOG.info("admin: %s by %s", call, peer, extra={"event": "admin", "call": call, "peer": peer})

    def refusal(self, role: Role | None, wanted: Role, call: str, peer: str) -> str | None:
        """Return why `role` does not permit `call`, which needs `wanted`; None if it does.

        Logs a rejection at most once a second, so that callers cannot fill the log.
        """
        if role is not None and permits(role, wanted):
            return None
        now = self._clock.monotonic()
        if now - self._refused >= 1.0:
            self._refused = now
            fields = {"event": "refused", "call": call, "role": role, "peer": peer}
            _LOG.warning("refused: %s by %s, whose token has the role %s", call, peer, role, extra=fields)
        return f"the token has the role {role!r}, and {call} needs {wanted!r}; use a token with that role"
