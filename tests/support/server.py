"""A server that tests start as a process."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self


class ServerProcess(ABC):
    """A server with its files in a directory; subclasses define `start`."""

    process: subprocess.Popen[bytes]

    @classmethod
    @abstractmethod
    def start(cls, directory: Path) -> Self:
        """Start a server and wait until it answers. Raises: RuntimeError."""

    @classmethod
    @contextmanager
    def started(cls, directory: Path) -> Iterator[Self]:
        """Run a server with its files below `directory` inside the context. Raises: RuntimeError."""
        server = cls.start(directory)
        try:
            yield server
        finally:
            server.stop()

    def stop(self) -> None:
        """Stop the server; its files stay. A second call does nothing."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
