"""Fetch the packages of peers into the user's cache, once per machine, without changing the project's environment.

1. peers.lock names each Python package that the environment lacks, with its version and the SHA-256 of its files.
2. pip installs them into a scratch directory, without dependencies beyond the lock.
3. The directory is renamed to its place; the name contains a hash of the lock and the version of Python.

`importable` appends the place to `sys.path`, after the project's own packages. A PySpark version other than the
project's, for a peer that needs it, gets a place of its own. Spark fetches jars itself (`spark.jars.packages`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LOCK = Path(__file__).with_name("peers.lock")
_PATIENCE = 900


class NotAvailable(Exception):
    """The packages of a peer are not available here."""


def cache() -> Path:
    """Return the directory of everything that peers need, shared by all checkouts of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memwal" / "peers"


def importable() -> None:
    """Make the peers' Python packages importable in this process; fetch them if the machine does not have them.

    Raises: NotAvailable.
    """
    at = str(packages())
    if at not in sys.path:
        sys.path.append(at)


def packages() -> Path:
    """Return the directory of the peers' Python packages. Raises: NotAvailable."""
    named = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    return _installed(
        f"packages-{named}-{sys.implementation.cache_tag}", ["--require-hashes", "-r", str(LOCK)], "20 MB"
    )


def spark(version: str) -> Path:
    """Return the directory of this version of PySpark. Raises: NotAvailable."""
    return _installed(f"pyspark-{version}", [f"pyspark=={version}"], "450 MB")


def _installed(name: str, wanted: Sequence[str], size: str) -> Path:
    """Return the directory `name` of the cache; one process fills it, others wait. Raises: NotAvailable."""
    place = cache() / name
    if place.exists():
        return place
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "fetching").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            print(f"bench: fetching {name}, once per machine: {size}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=cache(), prefix="fetch-") as scratch:
                _install(Path(scratch) / "found", wanted)
                (Path(scratch) / "found").replace(place)
    return place


def _install(target: Path, wanted: Sequence[str]) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    try:
        ran = subprocess.run(
            [*pip, "--target", str(target), *wanted], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotAvailable(f"pip did not end within {_PATIENCE} s: {' '.join(wanted)}") from error
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")] or [f"exit code {ran.returncode}"]
        raise NotAvailable(f"pip cannot install the packages of a peer: {said[-1]}")
