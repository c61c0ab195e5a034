"""The number of malloc arenas that a daemon allows in its process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import environment

_PROGRAM = """
import ctypes, os, sys, tempfile, threading, types
from memwal.ingest.cli.app import main

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p

def arenas():
    with tempfile.NamedTemporaryFile() as told:
        stream = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return told.read().count(b"<heap nr=")

def served(*_, **__):
    threads = 4 * os.cpu_count() + 10
    allocated = threading.Barrier(threads + 1)
    def allocate():
        libc.malloc(2000)
        allocated.wait()
    for _ in range(threads):
        threading.Thread(target=allocate).start()
    allocated.wait()
    print(arenas())
    return 1

sys.modules["memwal.ingest.service.daemon.serve"] = types.SimpleNamespace(serve=served)
main()
"""
"""Prints how many arenas a daemon has when more threads than the limit have allocated memory."""

if sys.platform == "linux":  # only glibc has arenas
    PROCESSORS = len(os.sched_getaffinity(0))

    @pytest.mark.parametrize(
        ("chosen", "arenas"),
        [
            ({}, 2 * PROCESSORS),
            ({"MALLOC_ARENA_MAX": "7"}, 7),
            ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=9"}, 9),
        ],
    )
    def test_a_daemon_has_two_arenas_for_each_processor_unless_the_user_chose(
        small_config: Callable[..., Path], chosen: dict[str, str], arenas: int
    ) -> None:
        env = environment({"MALLOC_ARENA_MAX": None, "GLIBC_TUNABLES": None, **chosen})
        words = [sys.executable, "-c", _PROGRAM, "serve", str(small_config())]
        ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=90)
        assert (ran.stdout, ran.stderr) == (f"{arenas}\n", "")
