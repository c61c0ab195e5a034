"""What a result depends on besides the code: versions and the host, without anything that names it."""

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
"""Read, not asked for: the checkout runs without being installed."""


def versions() -> dict[str, str]:
    """memwal, the distributions that do the work, and Python."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    ours = {"memwal": str(project["version"]), "python": platform.python_version()}
    return {**ours, **{name: version(name) for name in _DISTRIBUTIONS}}


def host() -> dict[str, str]:
    """Cores, memory, system, and the number of its kernel (the rest of a release string can name a machine)."""
    kernel = re.match(r"[0-9.]+", platform.release())
    return {
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{round(psutil.virtual_memory().total / 2**30)} GiB",
        "machine": platform.machine(),
        "system": f"{platform.system()} {kernel[0].rstrip('.') if kernel else ''}".strip(),
    }
