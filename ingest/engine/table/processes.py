"""Identify the process that wrote a note, and check without a write whether it still runs on this machine.

Process ids are reused. Together with the boot id of the machine, the pid namespace (each container has its own) and
the start time of the process, an id identifies one process permanently.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

_PROC = Path("/proc")
_TEXTS = ("host", "machine", "boot", "space", "started")
_NO_MACHINE = ("uninitialized",)  # as in container images
_ENDED = ("Z", "X")
"""States in /proc of a process that has ended and whose parent has not waited for it."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one machine, as notes hold it.

    Thread safety. Immutable.
    """

    host: str
    machine: str
    """/etc/machine-id; "" if missing."""
    boot: str
    """Boot id of the kernel; "" outside Linux."""
    space: str
    """The pid namespace."""
    pid: int
    started: str
    """Clock ticks between the boot and the start of the process."""

    @classmethod
    def here(cls) -> Self:
        """Return this process."""
        return cls(*_here(os.getpid()))

    @classmethod
    def of(cls, noted: Any) -> Self | None:
        """Parse the process of a note; return None if it has none."""
        try:
            host, machine, boot, space, started = (str(noted[name]) for name in _TEXTS)
            return cls(host, machine, boot, space, int(noted["pid"]), started)
        except (KeyError, TypeError, ValueError):
            return None

    def noted(self) -> Mapping[str, Any]:
        """Return the form that `of` parses."""
        return asdict(self)

    def runs(self, here: Process) -> bool | None:
        """Return whether the process runs now; None if `here`, this process, cannot know.

        It cannot know about another machine or container, or about a process that the system hides. After a restart
        of the machine none of its old processes run. The same holds for a container: after a restart it has the same
        host name and another pid namespace. (Two containers of one pod, or on the host network of one machine, share
        their host name too: the container that opens a table later takes it over.)
        """
        if self.host != here.host and not (self.boot and self.boot == here.boot):
            return None
        if self.boot and self.boot != here.boot:
            return False if self.machine and self.machine == here.machine else None
        if self.space != here.space:
            return False if self.host == here.host else None
        if not self.boot:
            return _answers(self.pid)
        began = _running(self.pid)
        if began is None:  # ended, or hidden: /proc may be mounted with hidepid
            return None if _answers(self.pid) else False
        return began == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@cache
def _here(pid: int) -> tuple[str, str, str, str, int, str]:
    boot, space = _read(_PROC / "sys/kernel/random/boot_id"), ""
    with suppress(OSError):
        space = str((_PROC / "self/ns/pid").readlink())
    machine = _read(Path("/etc/machine-id"))
    return socket.gethostname(), "" if machine in _NO_MACHINE else machine, boot, space, pid, _running(pid) or ""


def _running(pid: int) -> str | None:
    """Return when the process with this id started, in clock ticks; "" if it has ended, None if it is hidden."""
    stat = _read(_PROC / str(pid) / "stat")
    fields = stat.rpartition(")")[2].split()  # the process name in brackets may contain any characters
    if not fields:
        return None
    return "" if fields[0] in _ENDED else fields[19]


def _answers(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
