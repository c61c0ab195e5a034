"""Run the soak: `python -m tests.soak --minutes 60 --seed 1` prints a line a minute and a table at the end.

See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("LANCE_LOG", "critical")

from tests.chaos import LONGEST
from tests.conftest import ROOT
from tests.kafka_server import KafkaServer
from tests.s3_place import on_s3
from tests.soak.bars import MIB, Series, verdicts
from tests.soak.ending import finish, told
from tests.soak.hand import Hand
from tests.soak.journal import last, lines
from tests.soak.samples import files_below, files_by_kind, requests_by_kind
from tests.soak.scene import Scene
from tests.soak.trends import Verdict

_EVERY = 5.0
"""Seconds between two samples of the processes; files and requests are counted at every third sample."""


class Soak:
    """One run: samples, progress, and the problems at its end."""

    def __init__(self, scene: Scene, hand: Hand, say: Callable[[str], None]) -> None:
        self.scene, self.hand, self.say = scene, hand, say
        self.series, self.began = Series(), 0.0
        self._epochs: dict[str, int] = {}
        self._counted, self._asked = 0.0, Counter[str]()
        self.failed: Counter[str] = Counter()

    def run(self, seconds: float) -> list[str]:
        """Run everything; return the problems, a line each."""
        self._begin()
        minute, number = 1, 0
        while (at := time.monotonic() - self.began) < seconds:
            self.scene.look()
            self.series.samples += self.scene.samples(at)
            if number % 3 == 0:
                self._count(at)
            if at >= 60 * minute:
                self.say(self._line(minute))
                minute += 1
            number += 1
            time.sleep(_EVERY)
        self.hand.stop(self.scene.look)
        wrong = [*finish(self.scene), *self.hand.wrong, *self._noted()]
        return wrong + [verdict.broken for verdict in self.verdicts() if verdict.broken]

    def verdicts(self) -> list[Verdict]:
        """Judge every series by its bar."""
        return list(verdicts(self.series, self.hand.done.total()))

    def as_json(self, wrong: list[str]) -> dict[str, Any]:
        """Return all measurements, findings and deeds."""
        series = self.series
        return {
            "wrong": wrong,
            "verdicts": [asdict(verdict) for verdict in self.verdicts()],
            "deeds": self.hand.log,
            "failed_requests": self.failed,
            "samples": [asdict(sample) for sample in series.samples],
            "files": series.files,
            "requests_per_minute": series.requests,
        }

    def _begin(self) -> None:
        """Start everything and wait until rows come through; the time of the run starts then."""
        scene = self.scene
        ran = scene.command("init", str(scene.config))
        if ran.returncode:
            raise SystemExit(f"memwal init: {ran.stderr.strip()}")
        for each in (*scene.daemons, scene.clients["feed"]):
            each.look()
        feed = scene.journal("feed")
        self._wait(lambda: last(feed, "position") is not None)  # the feed delivers every change from here on
        scene.stream.start()
        self._wait(lambda: bool(scene.run.executors()) and any(line.get("changes") for line in lines(feed)))
        assert scene.place.proxy is not None
        scene.place.proxy.take()
        self.began = time.monotonic()
        self.hand.start()

    def _wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + LONGEST
        while not condition():
            self.scene.look()
            if time.monotonic() > until:
                raise SystemExit(f"nothing came through in {LONGEST:.0f} s; see the logs in {self.scene.directory}")
            time.sleep(0.5)

    def _count(self, at: float) -> None:
        """Count files by kind, and requests since the last count."""
        scene = self.scene
        assert scene.place.proxy is not None
        files = files_by_kind(scene.objects)
        self._epochs.update({name: max(epoch, self._epochs.get(name, 0)) for name, epoch in scene.epochs().items()})
        files["entries beyond fences"] = files["entries"] - sum(self._epochs.values())
        uploads = scene.objects.parent / ".minio.sys" / "multipart"
        files["unfinished uploads"] = files_below(uploads)
        files["checkpoint files"] = files_below(scene.checkpoint)
        files["temporary files"] = files_below(scene.temporary)
        self.series.files.append((at, files))
        requests = scene.place.proxy.take()
        self.failed.update(each.fault for each in requests if each.fault)
        asked = requests_by_kind(requests)
        minutes = (at - self._counted) / 60
        if self.series.files[:-1]:
            per_minute = Counter({kind: round(number / minutes) for kind, number in asked.items()})
            self.series.requests.append((at, per_minute))
        self._counted = at
        self._asked = self.series.requests[-1][1] if self.series.requests else asked

    def _line(self, minute: int) -> str:
        scene, stream, files = self.scene, self.scene.stream, self.series.files[-1][1]
        if stream.failed is not None:
            raise stream.failed
        newest = {sample.name: sample for sample in self.series.samples[-12:]}
        daemons = [newest[name] for name in ("daemon 0", "daemon 1") if name in newest]
        state, changes, _ = told(scene.journal("feed"))
        behind = sum(state.get(id) != version for id, version in stream.state.copy().items())
        acked = sum(last(scene.journal(name), "acked") or 0 for name in scene.writers)
        memory = " + ".join(f"{each.memory // MIB}" for each in daemons)
        parts = (
            f"{minute:>3} min: {stream.produced:,} records, {acked:,} puts acked, {changes:,} changes told",
            f"{behind} keys behind",
            f"{len(self.hand.log)} deeds, now {self.hand.log[-1][1] if self.hand.log else 'none'}",
            f"daemons {memory} MiB, {sum(each.threads for each in daemons)} threads",
            f"{sum(each.descriptors for each in daemons)} descriptors",
            f"{sum(number for kind, number in files.items() if 'fences' not in kind):,} files",
            f"{self._asked.total():,} requests a minute",
        )
        return ", ".join(parts)

    def _noted(self) -> list[str]:
        """Return the problems that clients noted, and the processes that ended on their own."""
        noted = [
            line["wrong"] for name in self.scene.clients for line in lines(self.scene.journal(name)) if "wrong" in line
        ]
        for name, kept in self.scene.kept().items():
            if any(kept.ends):
                said = kept.log.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
                noted.append(f"{name} ended by itself with {kept.ends}, at last: {said[-500:]}")
        return noted


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it is disturbed (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="decides rows, deeds and their moments (%(default)s)")
    parser.add_argument("--kills-every", type=float, default=60.0, help="seconds between two deeds (%(default)s)")
    parser.add_argument("--s3-faults", type=float, default=3.0, help="per cent of requests that fail (%(default)s)")
    parser.add_argument("--rate", type=float, default=60.0, help="records per second (%(default)s)")
    parser.add_argument("--json", type=Path, help="where all samples are written")
    parser.add_argument("--keep", type=Path, help="directory for everything, which is kept")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if there is a problem."""
    options = options_of(arguments)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes that were started
    with ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memwal-soak-")))
        directory.mkdir(parents=True, exist_ok=True)
        kafka = stack.enter_context(KafkaServer.started(directory / "kafka"))
        soak, wrong = soaked(directory, kafka, options)
    show(soak.verdicts(), soak.hand.done, soak.failed)
    for line in wrong:
        print(f"WRONG: {line}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(soak.as_json(wrong)))
    return 1 if wrong else 0


def soaked(directory: Path, kafka: KafkaServer, options: argparse.Namespace) -> tuple[Soak, list[str]]:
    """Run the soak below `directory`; return the run and its problems."""
    with on_s3(directory) as place, ExitStack() as stack:
        share, seconds = options.s3_faults / 100, 60 * options.minutes
        if share:
            place.hurt(share)
        scene = Scene(directory, kafka, place, options.rate, options.seed)
        stack.callback(scene.close)
        hand = Hand(scene, seconds, options.kills_every, share, options.seed)
        soak = Soak(scene, hand, lambda line: print(line, flush=True))
        return soak, soak.run(seconds)


def show(found: Sequence[Verdict], done: Counter[str], failed: Counter[str]) -> None:
    """Print the table of a run."""
    print(f"{'what':<58} {'level':>8} {'growth':>8} {'allowed':>8} {'highest':>8} {'s':>6}")
    for each in found:
        grown = f"{each.grown:>8.1f} {each.allowed:>8.1f}" if each.judged else f"{'-':>8} {'-':>8}"
        print(f"{each.name:<58} {each.level:>8.1f} {grown} {each.highest:>8.1f} {each.seconds:>6.0f} {each.picture}")
    print(f"deeds: {dict(done)}")
    print(f"failed requests: {dict(failed)}")


if __name__ == "__main__":
    sys.exit(main())
