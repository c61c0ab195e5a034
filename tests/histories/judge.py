"""Check with Porcupine, in a program of its own (`judge/`), that recorded histories are linearizable.

`python -m tests.histories.judge FILE...` judges the files of one history, and builds the program if necessary
(`make porcupine`); exit code 0 if the history is linearizable.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.go_program import GoProgramOfOurs

JUDGE = GoProgramOfOurs(
    title="the judge of histories (Porcupine)",
    target="porcupine",
    module="github.com/anishathalye/porcupine",
    package="memwal/judge",
    version="v1.3.1",
    checksum="h1:fBZ4/NGNPnIDdd6xNtrNk9/GiEQ0L4FO5+scINN+t0E=",
    minutes=1,
    sources=Path(__file__).with_name("judge"),
)
TIMEOUT = 60.0
"""Longest search of one key or region, in seconds."""


class NotLinearizable(AssertionError):
    """A history breaks a promise, or the check did not finish in time."""


@dataclass(frozen=True)
class Part:
    """Porcupine's verdict on one key or region: Ok, Illegal, or Unknown if the search took too long.

    `unknown`: number of operations without a known outcome that took part in the search; `left_out`: number of those
    that no read noticed. `why`: how far an order of the operations reaches, and the operations before. `html`: a
    picture of it.
    """

    partition: str
    verdict: str
    operations: int
    reads: dict[str, int]
    unknown: int
    left_out: int
    seconds: float
    why: str = ""
    html: str = ""

    def __str__(self) -> str:
        what = {"Illegal": "is not linearizable", "Unknown": "was not decided in time", "Ok": "is linearizable"}
        shown = f"; see {self.html}" if self.html else ""
        return f"{self.partition} {what[self.verdict]}: {self.operations} operations; {self.why or 'ok'}{shown}"


@dataclass(frozen=True)
class Judgement:
    """The verdicts on all keys and regions of a history."""

    parts: Sequence[Part] = field(default_factory=tuple)

    @property
    def wrong(self) -> list[Part]:
        """The parts that are not linearizable, or not decided."""
        return [part for part in self.parts if part.verdict != "Ok"]

    @property
    def operations(self) -> int:
        """Number of operations of the history; an operation on several regions counts once for each."""
        return sum(part.operations for part in self._regions)

    def __str__(self) -> str:
        largest = max((part.operations for part in self.parts), default=0)
        reads = {
            level: sum(part.reads.get(level, 0) for part in self._regions) for level in ("latest", "durable", "stored")
        }
        shown = ", ".join(f"{count:,} {level}" for level, count in reads.items())
        return (
            f"{self.operations:,} operations ({shown} reads), "
            f"{sum(part.unknown for part in self._regions)} unknown and ordered, "
            f"{sum(part.left_out for part in self._regions)} unknown that nobody noticed; {len(self.parts)} "
            f"keys and regions, the largest of {largest:,} operations, judged in "
            f"{sum(part.seconds for part in self.parts):.2f} s"
        )

    @property
    def _regions(self) -> list[Part]:
        return [part for part in self.parts if ", key" not in part.partition]


def judge(
    files: Iterable[Path], *, pictures: Path | None = None, timeout: float = TIMEOUT, order_all: bool = False
) -> Judgement:
    """Judge the files of one history.

    `pictures`: a directory for an HTML file of each wrong part. `order_all`: include unknown operations that no read
    noticed, which takes long and gives the same verdicts.

    Raises: RuntimeError if the program is not built; ValueError if the files are not a history.
    """
    if not JUDGE.path.exists():
        raise RuntimeError(f"{JUDGE.path} is not built; run `make porcupine`")
    words = [str(JUDGE.path), "-timeout", f"{timeout}s", *(["-html", str(pictures)] if pictures else [])]
    words += ["-all"] if order_all else []
    ran = subprocess.run([*words, *map(str, files)], capture_output=True, text=True)
    if ran.returncode not in (0, 1, 3):
        raise ValueError(ran.stderr.strip())
    return Judgement([Part(**json.loads(line)) for line in ran.stdout.splitlines()])


def expect_linearizable(files: Iterable[Path], *, pictures: Path | None = None, timeout: float = TIMEOUT) -> Judgement:
    """Judge the files as `judge` does. Raises: NotLinearizable unless every part is linearizable."""
    judged = judge(files, pictures=pictures, timeout=timeout)
    if judged.wrong:
        raise NotLinearizable("\n".join(map(str, judged.wrong)))
    return judged


def main() -> int:
    """Build the program, then judge the files of the arguments; see the module."""
    JUDGE.build()
    if not sys.argv[1:]:
        return 0
    judged = judge(map(Path, sys.argv[1:]), pictures=Path.cwd())
    for part in judged.wrong:
        print(part)
    print(judged)
    return 1 if judged.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
