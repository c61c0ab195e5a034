"""Which process wrote a note, and whether it still runs: told without a write, on the same machine only.

A process id alone is used again. Together with the boot of the machine, the pid namespace (a container has its own) and
the moment when the process began, it names one process for ever.
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
_NO_MACHINE = ("uninitialized",)  # as in images of containers
_ENDED = ("Z", "X")
"""States in /proc of a process that has ended and was not waited for yet."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one machine, as it is written into a note.

    Thread safety. Immutable.
    """

    host: str
    machine: str
    """/etc/machine-id; "" where there is none."""
    boot: str
    """Of the kernel; "" where it does not say (outside Linux)."""
    space: str
    """The pid namespace."""
    pid: int
    started: str
    """Clock ticks between the boot and the start of the process."""

    @classmethod
    def here(cls) -> Self:
        """This process."""
        return cls(*_here(os.getpid()))

    @classmethod
    def of(cls, noted: Any) -> Self | None:
        """That of a note; None where it names none."""
        try:
            host, machine, boot, space, started = (str(noted[each]) for each in _TEXTS)
            return cls(host, machine, boot, space, int(noted["pid"]), started)
        except (KeyError, TypeError, ValueError):
            return None

    def noted(self) -> Mapping[str, Any]:
        """What `of` reads."""
        return asdict(self)

    def runs(self, here: Process) -> bool | None:
        """Whether it runs now, as `here` can tell; None where it cannot: another machine, another container, or a
        process that the system does not show.

        A machine that was started again since has none of its processes left. Neither has a container that was: it
        keeps its host name, and gets another pid namespace. (Two containers of one pod, or of one machine's network,
        have one host name too: of these the one that opens a table later takes it over.)
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
        if began is None:  # not shown, as of other users where /proc is mounted with hidepid; or ended
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
    """When the process with this id began, as Linux counts it; "" where it has ended, None where it is not shown."""
    stat = _read(_PROC / str(pid) / "stat")
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    if not fields:
        return None
    return "" if fields[0] in _ENDED else fields[19]


def _answers(pid: int) -> bool:
    """Whether some process has this id."""
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
