"""What clients of a table may read, whoever answers: every write and read with the moments at which it began and ended.

A moment is a number that rises with every question. Of two writes of a key one is surely older if it was settled before
the other began: acknowledged, or refused; a write without an answer is never settled, except by a newer number under
the name of its token. A read is wrong if it shows a write that was refused, or one that is surely older than another
one that was known to be durable before the read began, by its acknowledgement or because a reader had seen it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tests.simulation.oracle import Wrong


@dataclass(eq=False)
class Op:
    """One put or delete of a client; its number is the value of its rows."""

    number: int
    client: str
    rows: Mapping[int, bool]
    """Per key whether it deletes."""
    token: tuple[str, int] | None
    durable: bool
    began: int
    settled: int | None = None
    """From when on it cannot take effect any more, if it has not."""
    known: dict[int, int] = field(default_factory=dict)
    """By key, from when on it was known to be durable."""
    failed: bool = False

    def __str__(self) -> str:
        what = ",".join(f"{key}{'-' if deletes else ''}" for key, deletes in self.rows.items())
        return f"#{self.number}({what}){'' if self.token is None else ' ' + '/'.join(map(str, self.token))}"


@dataclass(eq=False)
class Ledger:
    """The writes of all clients. One thread."""

    region_of: Mapping[int, int]
    """Of the keys of clients, the regions; a write is visible in a region as a whole. Empty where regions change."""
    ops: list[Op] = field(default_factory=list)
    moments: int = 0
    reads: int = 0
    _of_key: dict[int, list[Op]] = field(default_factory=dict)

    def moment(self) -> int:
        """Now."""
        self.moments += 1
        return self.moments

    def begin(self, client: str, rows: Mapping[int, bool], token: tuple[str, int] | None, *, durable: bool) -> Op:
        """A client sends a write."""
        op = Op(len(self.ops) + 1, client, rows, token, durable, self.moment())
        self.ops.append(op)
        for key in rows:
            self._of_key.setdefault(key, []).append(op)
        return op

    def acked(self, op: Op) -> None:
        """The client has its receipt."""
        op.settled = self.moment()
        if op.durable:
            self._is_known(op, op.rows)

    def refused(self, op: Op) -> None:
        """The client was told that nothing was written. Raises: Wrong if a reader saw it."""
        op.settled, op.failed = self.moment(), True
        if op.known:
            raise Wrong(f"{op} was refused, but a reader saw it")

    def read(self, who: str, began: int, rows: Iterable[tuple[int, int]], keys: Iterable[int], *, level: str) -> None:
        """Check a read of `keys` that began at `began` and shows `rows`. Raises: Wrong."""
        self.reads += 1
        shown: dict[int, Op] = {}
        for key, value in rows:
            if key in shown:
                raise Wrong(f"{who}: key {key} came twice")
            shown[key] = self._shown(who, key, value)
        stale, asked = level in ("flushed", "committed"), set(keys)
        for key in asked:
            if not stale:
                self._check(who, key, shown.get(key), began)
        for op in dict.fromkeys(shown.values()):
            self._check_whole(who, op, shown, asked)
        for key, op in shown.items():
            if op.durable or level != "latest":
                region = self.region_of.get(key, key)
                self._is_known(op, [each for each in op.rows if self.region_of.get(each, each) == region])

    def _is_known(self, op: Op, keys: Iterable[int]) -> None:
        now = self.moment()
        for key in keys:
            op.known.setdefault(key, now)

    def _shown(self, who: str, key: int, value: int) -> Op:
        if not 1 <= value <= len(self.ops):
            raise Wrong(f"{who}: key {key} has the value {value}, which nobody wrote")
        op = self.ops[value - 1]
        if op.rows.get(key) is not False:
            raise Wrong(f"{who}: key {key} shows {op}, which did not put it")
        if op.failed:
            raise Wrong(f"{who}: key {key} shows {op}, which was refused")
        return op

    def _check(self, who: str, key: int, shown: Op | None, began: int) -> None:
        ops = self._of_key.get(key, ())
        due = [op for op in ops if op.known.get(key, began) < began]
        if shown is not None:
            if (newer := _newer(shown, due)) is not None:
                raise Wrong(f"{who}: key {key} shows {shown}, though {newer} was known before the read began")
        elif due and not any(op.rows[key] and not op.failed and _newer(op, due) is None for op in ops):
            raise Wrong(f"{who}: key {key} is missing, though {due[-1]} was known before the read began")

    def _check_whole(self, who: str, op: Op, shown: Mapping[int, Op], asked: Collection[int]) -> None:
        visible = {self.region_of.get(key) for key in op.rows if shown.get(key) is op}
        for key, deletes in op.rows.items():
            if key not in asked or key not in self.region_of or self.region_of[key] not in visible:
                continue
            other = shown.get(key)
            if other is not None and other is not op and _before(other, op):
                raise Wrong(f"{who}: {op} is visible in part: key {key} shows {other}")
            if (
                other is None
                and not deletes
                and not any(each.rows[key] and not each.failed and not _before(each, op) for each in self._of_key[key])
            ):
                raise Wrong(f"{who}: {op} is visible in part: key {key} is missing")


def _newer(op: Op, due: Iterable[Op]) -> Op | None:
    return next((other for other in due if other is not op and _before(op, other)), None)


def _before(op: Op, other: Op) -> bool:
    """Whether `op` is surely older."""
    if op.settled is not None and op.settled < other.began:
        return True
    named = op.token is not None and other.token is not None and op.token[0] == other.token[0]
    return bool(named and op.token[1] < other.token[1])  # type: ignore[index]
