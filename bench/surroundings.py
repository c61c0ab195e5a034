"""The environment of a result: versions and the host, without anything that identifies the host."""

from __future__ import annotations

import os
import platform
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import psutil

_DISTRIBUTIONS = ("pylance", "pyarrow", "numpy", "faiss-cpu", "tantivy", "datafusion", "sortedcontainers")

_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
"""The version is read from the file, because the checkout also runs without being installed."""


def versions() -> dict[str, str]:
    """Return the versions of memwal, Python, and the distributions that do the work."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    ours = {"memwal": str(project["version"]), "python": platform.python_version()}
    return {**ours, **{name: version(name) for name in _DISTRIBUTIONS}}


def host() -> dict[str, str]:
    """Return cores, memory, machine type, system and kernel version; the rest of a release string can name a host."""
    kernel = re.match(r"[0-9.]+", platform.release())
    return {
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{round(psutil.virtual_memory().total / 2**30)} GiB",
        "machine": platform.machine(),
        "system": f"{platform.system()} {kernel[0].rstrip('.') if kernel else ''}".strip(),
    }
