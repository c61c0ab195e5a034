"""Read the registered modules: for each `Name.tla` a `Name.toml` lists the configurations that TLC checks.

title = "what the module models, in a line"
invariants = ["…"]            # hold in every state of every configuration
sanity = ["…"]                # invariants that must be violated: the model is not vacuous

[configurations.NAME]         # run by `make test`; with large = true by `make model` only
constants = {Name = "…"}      # in the syntax of a TLC configuration file
symmetry = "…"                # optional: a set of permutations
constraint = "…"              # optional: TLC does not continue from states that violate it
properties = ["…"]            # optional: temporal properties; TLC allows no symmetry beside them
specification = "Spec"        # the default
unused = ["…"]                # actions that this configuration never takes

[bugs.NAME]                   # NAME is the value of the constant Bug
expected = "…"                # the invariant or property that TLC must find violated
configuration = "…"           # the configuration whose constants it uses; `constants` override single ones
history = "…"                 # the real fault that the bug represents
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.model.tlc import HERE, Outcome, check

_DEFINED = re.compile(r"^(\w+)(?:\(.*?\))? ==", re.MULTILINE)
_DISJUNCT = re.compile(r"\\/\s+(?:\\E [^:]*:\s*)*(\w+)(?:\([^)]*\))?\s*$", re.MULTILINE)
_COMMENT = re.compile(r"\(\*.*?\*\)|\\\*[^\n]*", re.DOTALL)


@dataclass(frozen=True)
class Configuration:
    """One run of TLC on a module."""

    module: str
    name: str
    constants: Mapping[str, str]
    invariants: Sequence[str]
    steps: Sequence[str] = ()
    properties: Sequence[str] = ()
    symmetry: str = ""
    constraint: str = ""
    specification: str = "Spec"
    large: bool = False
    unused: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Return `Module.name`."""
        return f"{self.module}.{self.name}"

    def text(self) -> str:
        """Return the text of the configuration file.

        Deadlocks are not checked: a bounded model ends in states without a successor.
        """
        lines = [f"SPECIFICATION {self.specification}", "CHECK_DEADLOCK FALSE", "CONSTANTS"]
        lines += [f"  {name} = {value}" for name, value in self.constants.items()]
        lines += [f"INVARIANT {name}" for name in self.invariants]
        lines += [f"PROPERTY {name}" for name in [*self.steps, *self.properties]]
        lines += [f"SYMMETRY {self.symmetry}"] if self.symmetry else []
        lines += [f"CONSTRAINT {self.constraint}"] if self.constraint else []
        return "\n".join([*lines, ""])

    def check(
        self, *, workers: int = 1, coverage: bool = False, timeout: float = 600.0, stored: bool = False
    ) -> Outcome:
        """Run TLC; see `tlc.check`. Raises TlcFailed."""
        temporal = self.properties[0] if len(self.properties) == 1 else " or ".join(self.properties)
        return check(
            self.module,
            self.text(),
            temporal=temporal,
            workers=workers,
            coverage=coverage,
            timeout=timeout,
            stored=stored,
        )


@dataclass(frozen=True)
class Bug:
    """A planted bug: TLC must find `expected` violated in `configuration`."""

    name: str
    configuration: Configuration
    expected: str
    history: str


@dataclass(frozen=True)
class Module:
    """One registered module."""

    name: str
    title: str
    source: str
    configurations: Sequence[Configuration]
    bugs: Sequence[Bug]
    sanity: Sequence[Configuration] = field(default_factory=list)

    @property
    def actions(self) -> list[str]:
        """The steps of the program: the disjuncts of `Next`, each on its own line.

        The disjuncts of `Environment` (storage, crashes, time) are left out, since no code corresponds to them.
        """
        return [name for name in self.disjuncts("Next") if name != "Environment"]

    @property
    def all_actions(self) -> list[str]:
        """The steps of the program and of the environment."""
        return [*self.actions, *self.disjuncts("Environment")]

    def disjuncts(self, of: str) -> list[str]:
        """Return the names of the disjuncts of a definition, in order; an empty list if it does not exist."""
        source = _COMMENT.sub("", self.source)
        starts = [(match[1], match.start(), match.end()) for match in _DEFINED.finditer(source)]
        ends = [start for _, start, _ in starts[1:]] + [len(source)]
        for (name, _, begin), end in zip(starts, ends, strict=True):
            if name == of:
                return list(dict.fromkeys(_DISJUNCT.findall(source[begin:end])))
        return []


def modules() -> list[Module]:
    """Return every registered module, sorted by name."""
    return [_module(path) for path in sorted(HERE.glob("*.toml"))]


def _module(path: Path) -> Module:
    told, name = tomllib.loads(path.read_text(encoding="utf-8")), path.stem
    configurations = {key: _configuration(name, key, each, told) for key, each in told["configurations"].items()}
    first = next(iter(configurations.values()))
    sanity = [replace(first, name=each, invariants=[each], steps=[], properties=[]) for each in told.get("sanity", [])]
    return Module(
        name,
        told["title"],
        path.with_suffix(".tla").read_text(encoding="utf-8"),
        list(configurations.values()),
        [_bug(key, each, configurations) for key, each in told.get("bugs", {}).items()],
        sanity,
    )


def _configuration(module: str, name: str, told: Mapping[str, Any], around: Mapping[str, Any]) -> Configuration:
    return Configuration(
        module,
        name,
        **{"invariants": around["invariants"], "steps": around.get("steps", ()), **_with_bug(told, "none")},
    )


def _with_bug(told: Mapping[str, Any], bug: str) -> dict[str, Any]:
    return {**told, "constants": {**told["constants"], "Bug": f'"{bug}"'}}


def _bug(name: str, told: Mapping[str, Any], configurations: Mapping[str, Configuration]) -> Bug:
    base, expected = configurations[told["configuration"]], told["expected"]
    is_temporal = expected in base.properties
    planted = Configuration(
        base.module,
        name,
        {**base.constants, **told.get("constants", {}), "Bug": f'"{name}"'},
        [] if is_temporal else base.invariants,
        [] if is_temporal else base.steps,
        [expected] if is_temporal else [],
        base.symmetry,
        base.constraint,
        base.specification,
    )
    return Bug(name, planted, expected, " ".join(told["history"].split()))
