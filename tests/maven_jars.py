"""Download jars from Maven Central for the tests into the user's cache, once per machine.

Steps: (1) Ivy, which PySpark contains, downloads each jar of the lock file from Maven Central and needs only Java;
(2) the SHA-256 of every jar is compared with the lock file; (3) only then are the jars moved into the cache.

A line of a lock file: the part that needs the jar, its Maven coordinates, its SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn
from xml.sax.saxutils import quoteattr


class Jar(NamedTuple):
    """One jar of a lock file. `digest`: its SHA-256 in hex."""

    part: str
    group: str
    artifact: str
    version: str
    digest: str

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.artifact}-{self.version}.jar"


@dataclass(frozen=True)
class MavenJars:
    """The jars of one lock file.

    Thread safety. Any number of processes may call `fetch`; one downloads, the others wait for it.
    """

    title: str
    """Name of the jars in messages."""
    target: str
    """The make target that downloads them, and their directory in the cache."""
    lock: Path
    size: str
    """Size of the download, for messages."""

    @property
    def cache(self) -> Path:
        """The directory of the jars, shared by all checkouts of this user; its name has a hash of the lock file."""
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memwal" / self.target
        return root / hashlib.sha256(self.lock.read_bytes()).hexdigest()[:12]

    def locked(self) -> list[Jar]:
        """Return the jars of the lock file, in its order."""
        lines = self.lock.read_text(encoding="utf-8").splitlines()
        split = [line.split() for line in lines if line and not line.startswith("#")]
        parts = [(part, coordinates.split(":"), digest) for part, coordinates, digest in split]
        return [Jar(part, group, artifact, version, digest) for part, (group, artifact, version), digest in parts]

    def jars(self, part: str) -> list[Path]:
        """Return the jars of a part; they may not exist yet."""
        return [self.cache / part / jar.file for jar in self.locked() if jar.part == part]

    def fetch(self) -> Path:
        """Download the jars into the cache unless they exist. Raises: SystemExit with one line if that fails."""
        if self.cache.exists():
            return self.cache
        self.cache.parent.mkdir(parents=True, exist_ok=True)
        with (self.cache.parent / "fetching").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.cache.exists():
                return self.cache
            say(f"fetching {self.title}, once per machine: {self.size}")
            with tempfile.TemporaryDirectory(dir=self.cache.parent, prefix="fetch-") as scratch:
                self._fetch_into(Path(scratch)).replace(self.cache)
            say(f"fetched {self.title}")
        return self.cache

    def _fetch_into(self, scratch: Path) -> Path:
        found, locked = scratch / "found", self.locked()
        settings = scratch / "settings.xml"
        settings.write_text(_IVY_SETTINGS, encoding="utf-8")
        for part in dict.fromkeys(jar.part for jar in locked):
            ivy = scratch / f"{part}.xml"
            ivy.write_text(_ivy_file(jar for jar in locked if jar.part == part), encoding="utf-8")
            self._run(
                [
                    *(java(), f"-Divy.default.ivy.user.dir={scratch}", "-jar", str(self._ivy())),
                    *("-settings", str(settings), "-cache", str(scratch / "cache"), "-ivy", str(ivy), "-error"),
                    *("-retrieve", str(found / part / "[artifact]-[revision].[ext]")),
                ]
            )
        for jar in locked:
            path = found / jar.part / jar.file
            if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != jar.digest:
                self._fail(f"{jar.file} has not the SHA-256 {jar.digest}; do not use it, and report it")
        return found

    def _ivy(self) -> Path:
        if (jars := pyspark_jars()) is None:
            self._fail("PySpark is not installed; run `make install`")
        return next(jars.glob("ivy-*.jar"))

    def _run(self, command: list[str]) -> None:
        try:
            ran = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            self._fail(f"{command[0]}: {error.strerror}")
        if ran.returncode:
            said = [line.strip() for line in (ran.stderr + ran.stdout).splitlines() if line.strip(" :\t")]
            self._fail(f"Ivy: exit code {ran.returncode}: {' | '.join(said)[:400]}")

    def _fail(self, text: str) -> NoReturn:
        raise SystemExit(
            f"memwal: {self.title} cannot be fetched: {text}; run `make {self.target}` where Maven Central is in reach"
        )


# Without poms: the lock file names every jar, so nothing is resolved. Ivy's default root is Maven Central.
_IVY_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""


def _ivy_file(wanted: Iterable[Jar]) -> str:
    dependencies = "".join(
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)} "
        'transitive="false"/>\n'
        for jar in wanted
    )
    info = '<info organisation="memwal" module="tests"/>'
    return f'<ivy-module version="2.0">{info}<dependencies>\n{dependencies}</dependencies></ivy-module>\n'


def pyspark_jars() -> Path | None:
    """Return the directory of PySpark's jars; None if PySpark is not installed."""
    spec = find_spec("pyspark")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "jars"


def java() -> str:
    """Return the Java that Spark uses too: JAVA_HOME's, else the PATH's."""
    home = os.environ.get("JAVA_HOME", "")
    return str(Path(home) / "bin" / "java") if home else "java"


def say(text: str) -> None:
    """Print one line to standard error."""
    print(f"memwal: {text}", file=sys.stderr, flush=True)
