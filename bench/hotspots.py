"""Sample where memwal's own threads spend the time of a benchmark. The profiler has no dependencies.

cProfile is not used because it sees one thread only (since Python 3.12 it refuses a second), and a put runs in the
threads of the caller, the region and the flusher. Sampling is accurate enough: a function that takes a tenth of the
time is in a tenth of the samples. A limit: a call into C that holds the interpreter's lock delays the sample to its
end, so it is counted at the calling line or at the next line.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import memwal
from bench.benchmark import Benchmark, Watch
from bench.rounds import emptied

EVERY = 0.0005
"""Seconds between two samples."""
LEAST_SECONDS = {"smoke": 0.05, "full": 3.0}
"""Rounds are repeated until this many seconds were sampled; 1 % of three seconds is some tens of samples."""
TOP = 15
"""Lines of each list."""
_PACKAGE = Path(memwal.__file__).parent
_WAITING = {("threading.py", name) for name in ("wait", "wait_for", "join", "_wait_for_tstate_lock")}


class SamplingWatch(Watch):
    """A watch that samples every thread while it runs.

    Thread safety. Like Watch.

    Invariants. `samples` counts points in time; `lines` and `functions` count threads that were executing them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0
        self.threads: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()
        self.functions: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Like Watch.timed, with sampling inside the block."""
        done = threading.Event()
        sampler = threading.Thread(target=self._sample_until, args=(done,), name="sampler")
        before = sys.getswitchinterval()
        sys.setswitchinterval(EVERY / 5)  # otherwise the sampler would run only every 5 ms
        sampler.start()
        try:
            with super().timed():
                yield
        finally:
            done.set()
            sampler.join()
            sys.setswitchinterval(before)

    def _sample_until(self, done: threading.Event) -> None:
        while not done.wait(EVERY):
            self.samples += 1
            names = {each.ident: each.name for each in threading.enumerate()}
            for ident, frame in sys._current_frames().items():  # noqa: SLF001 - the documented way to do this
                if ident != threading.get_ident():
                    self._count(_group(names.get(ident, "?")), frame)

    def _count(self, thread: str, leaf: FrameType) -> None:
        if (Path(leaf.f_code.co_filename).name, leaf.f_code.co_name) in _WAITING:
            return
        self.threads[thread] += 1
        seen: set[tuple[str, str]] = set()
        frame: FrameType | None = leaf
        while frame is not None:
            if (place := _ours(frame)) is not None:
                if not seen:
                    self.lines[thread, f"{place}:{frame.f_lineno}"] += 1
                seen.add((thread, place))
            frame = frame.f_back
        self.functions.update(seen)


def profile(benchmark: Benchmark, at: Path, *, smoke: bool) -> str:
    """Run memwal's rounds of `benchmark` and return the time by thread, function and line as text."""
    contender = next(each for each in benchmark.contenders(benchmark.values(smoke=smoke)) if each.side == "memwal")
    watch = SamplingWatch()
    try:
        contender.prepare(emptied(at / "prepared"))
        while watch.seconds < LEAST_SECONDS["smoke" if smoke else "full"] or not watch.samples:
            contender.round(emptied(at / "round"), watch)
    finally:
        contender.close()
    emptied(at)
    return _text(benchmark, watch)


def _text(benchmark: Benchmark, watch: SamplingWatch) -> str:
    lines = [f"{benchmark.name}: {benchmark.title}", f"{watch.seconds:.2f} s watched, {watch.samples} samples", ""]
    lines += [f"{_share(count, watch)}  thread {thread} at work" for thread, count in watch.threads.most_common()]
    for title, counted in (("with everything it calls", watch.functions), ("own time, by line", watch.lines)):
        lines += ["", f"{title}, share of the watched time:"]
        lines += [
            f"{_share(count, watch)}  {thread:<10} {place}" for (thread, place), count in counted.most_common(TOP)
        ]
    return "\n".join(lines)


def _share(count: int, watch: SamplingWatch) -> str:
    return f"{100 * count / watch.samples:5.1f} %"


def _group(thread: str) -> str:
    """Return a thread's name without its number, so that thirty-two callers share a line."""
    return "caller" if thread == "MainThread" else thread.rstrip("0123456789").rstrip("-_ ")


def _ours(frame: FrameType) -> str | None:
    """Return `package/module.py function` for a frame of memwal.

    Return None for libraries: their time counts for the caller.
    """
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(_PACKAGE):
        return None
    return f"{path.relative_to(_PACKAGE)} {frame.f_code.co_qualname}"
