"""What must be true of every table after a power cut, given what the workload had called and what was acknowledged.

 1. The table opens, if its creation was acknowledged; else it opens, is created, or is refused in one line. Opening
    goes back from versions of the base that are torn (`flush.base.torn`).
 2. `memwal verify --deep` has no finding, before anything is written and at the end.
 3. Reads from storage at `durable`, `flushed` and `committed`, and of the new owner: a row that was acknowledged (for
    `flushed` and `committed`: before an acknowledged flush or commit began) is there with its value, or with that of a
    later call, acknowledged or not; nothing that was acknowledged as deleted comes back; no row is there twice.
 4. Of every token the last call again: applied before, if it was acknowledged; in any case applied once.
 5. Another put, flush and commit work, the base has it all, and so does another owner.
 6. An acknowledged backup can be restored.

One call touches a key at a time in the workloads, so the calls have an order for each key.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import memwal
from memwal.flush.base.table import BaseTable
from memwal.flush.base.torn import TORN
from memwal.flush.resizing.steps import resize
from memwal.flush.verification.runner import verify_table
from memwal.ingest.errors import MemWalError
from memwal.wal import SystemClock, SystemIds, open_store
from tests.backups import restored
from tests.power_cuts.cuts import State, materialise
from tests.power_cuts.workloads import SETTINGS, open_table, row

_NEW = 1_000_000
"""Id of the row that the check itself puts."""
Rows = Mapping[int, int]


class Lost(AssertionError):
    """A table broke a promise; the text says which."""


@dataclass
class Call:
    """One call of the workload."""

    number: int
    do: str
    what: Mapping[str, Any]
    done: bool = False
    done_at: int = 0
    """Number of marks before that of its end."""
    begun_at: int = 0

    @property
    def writes(self) -> bool:
        """Whether it puts or deletes rows."""
        return self.do in ("put", "delete")

    @property
    def rows(self) -> Mapping[int, int | None]:
        """Id -> value, None for a delete."""
        value = self.what["value"] if self.do == "put" else None
        return dict.fromkeys(self.what["ids"], value)


@dataclass
class History:
    """The calls on one table."""

    calls: list[Call] = field(default_factory=list)

    @property
    def opened(self) -> Call:
        """The call that created it."""
        return next(call for call in self.calls if call.do in ("open", "restore"))

    @property
    def keyed(self) -> bool:
        """Whether it has a key."""
        return bool(self.opened.what.get("keyed", True))

    def acknowledged(self, level: str) -> set[int]:
        """Return the numbers of the writes that must be there at a level."""
        if level == "durable":
            until = [c.begun_at for c in self.calls if c.do in ("flush", "close") and c.done]
            last = max(until, default=0)
            return {c.number for c in self.calls if c.writes and c.done and (c.what["durable"] or c.done_at < last)}
        flushed = [c for c in self.calls if c.do in ("flush", "resize") and c.done]
        if level == "committed":  # a commit takes what was flushed before
            commit = max((c.begun_at for c in self.calls if c.do == "commit" and c.done), default=0)
            flushed = [c for c in flushed if c.do == "resize" or c.done_at < commit]
        last = max((c.begun_at for c in flushed), default=0)
        return {c.number for c in self.calls if c.writes and c.done and c.done_at < last}

    def possible(self, level: str) -> dict[int, set[int | None]]:
        """Return for each id the values that it may have at a level; None: it is not there."""
        must = self.acknowledged(level)
        found: dict[int, set[int | None]] = {}
        for call in self.calls:
            for id, value in call.rows.items() if call.writes else ():
                before = found.get(id, {None})
                found[id] = {value} if call.number in must else before | {value}
        return found

    def last_with_token(self) -> list[Call]:
        """Return the last call of each producer."""
        last: dict[str, Call] = {}
        for call in self.calls:
            if call.writes and call.what["token"]:
                last[call.what["token"].partition(":")[0]] = call
        return list(last.values())


def histories(marks: Sequence[Mapping[str, Any]]) -> dict[str, History]:
    """Return the calls per table, by its path below the disk."""
    calls: dict[int, Call] = {}
    found: dict[str, History] = {}
    for place, mark in enumerate(marks, 1):
        if "done" in mark:
            calls[mark["done"]].done, calls[mark["done"]].done_at = True, place
        else:
            call = Call(mark["call"], mark["do"], mark, begun_at=place)
            calls[call.number] = call
            if call.do == "restore":
                earlier = found[call.what["source"]].calls
                backup = next(c for c in earlier if c.do == "backup" and c.what["to"] == call.what["backup"])
                copied = [c for c in earlier if c.writes and c.done and c.done_at < backup.begun_at]
                found[mark["table"]] = History([call, *copied])
            else:
                found.setdefault(mark["table"], History()).calls.append(call)
    return found


def check(state: State, place: Path) -> list[str]:
    """Check the tables of a state, whose files are written to `place` for that; return remarks. Raises Lost."""
    materialise(state.tree, place)
    try:
        remarks = []
        for name, history in histories(state.marks).items():
            with _told(name):
                remarks += _Table(place / name, history).check()
                _check_backups(place, history)
        return remarks
    finally:
        shutil.rmtree(place)


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except Lost as error:
        raise Lost(f"{name}: {error}") from error
    except Exception as error:
        raise Lost(f"{name}: {type(error).__name__}: {error}") from error


def _check_backups(place: Path, history: History) -> None:
    for call in history.calls:
        if call.do == "backup" and call.done:
            to = place / "restored-by-the-check"
            restored(str(place / call.what["to"]), str(to))
            copied = [c for c in history.calls if c.writes and c.done and c.done_at < call.begun_at]
            _Table(to, History([history.opened, *copied])).check_levels("of a restored backup")


@dataclass
class _Table:
    """One table after a cut."""

    uri: Path
    history: History

    def check(self) -> list[str]:
        """Check it. Raises Lost, and whatever a call raises that must work."""
        opened = self.history.opened
        if not opened.done:
            return self._begun_again()
        assert BaseTable.find(str(self.uri), to_write=True) is not None
        torn = any((self.uri / "_versions").glob(f"*{TORN}"))
        self.verify("after the cut")
        self.check_levels("after the cut")
        self._go_on()
        return ["went back from a torn version of the base"] if torn else []

    def _begun_again(self) -> list[str]:
        """A creation that was not acknowledged. A restore is not begun again here."""
        if self.history.opened.do == "restore":
            return []
        try:
            table = self._open()
        except MemWalError as error:
            if "\n" in str(error):
                raise Lost(f"opening says more than a line: {error}") from error
            return [f"creation not acknowledged, opening refused: {str(error).replace(str(self.uri), 'URI')}"]
        with table:
            table.put([row(_NEW, 1)])
        self.verify("after a creation begun again")
        return []

    def verify(self, when: str) -> None:
        """`memwal verify --deep`."""
        if findings := verify_table(open_store(str(self.uri)), str(self.uri), deep=True).findings:
            raise Lost(f"verify --deep {when}: {'; '.join(map(str, findings))}")

    def check_levels(self, when: str) -> None:
        """Read from storage, at every level."""
        with memwal.open(str(self.uri), read_only=True) as table:
            for level in ("durable", "flushed", "committed"):
                self._expect(self._rows(table, level), level, f"{level} {when}")

    def _open(self, **more: Any) -> Any:
        opened = self.history.opened.what
        key, indexed = "id" if self.history.keyed else (), opened.get("indexed", False)
        return open_table(self.uri, key=key, regions=opened.get("regions", 2), indexed=indexed, **more)

    def _rows(self, table: Any, level: str) -> list[tuple[int, int]]:
        found = table.scan(level=level, columns=["id", "v", "n"]).read_all().to_pylist()
        for each in found:
            if each != row(each["id"], each["n"]):
                raise Lost(f"a row that nobody put: {each}")
        return [(each["id"], each["n"]) for each in found]

    def _expect(self, rows: Sequence[tuple[int, int]], level: str, when: str) -> None:
        found, possible = dict(rows), self.history.possible(level)
        twice = [id for id, times in Counter(id for id, _ in rows).items() if times > 1]
        if twice:
            raise Lost(f"{when}: ids {twice} are there more than once")
        for id, values in possible.items():
            if found.get(id) not in values:
                raise Lost(f"{when}: id {id} is {found.get(id)}, may be {sorted(values, key=str)}")
        if unknown := found.keys() - possible.keys():
            raise Lost(f"{when}: ids {sorted(unknown)} were never put")

    def _go_on(self) -> None:
        self._finish_resize()
        with self._open() as table:
            self._expect(self._rows(table, "latest"), "durable", "latest of the next owner")
            for call in self.history.last_with_token():
                self._again(table, call)
            table.put([row(_NEW, 1)], token="check:1")
            before = sorted(self._rows(table, "latest"))
            table.flush()
            table.commit()
            if (after := sorted(self._rows(table, "committed"))) != before or (_NEW, 1) not in after:
                raise Lost(f"committed after another put, flush and commit: {after}, latest before: {before}")
        with self._open() as table:
            if (after := sorted(self._rows(table, "latest"))) != before:
                raise Lost(f"latest of another owner: {after}, before: {before}")
        self.verify("at the end")

    def _finish_resize(self) -> None:
        """Open the table after a resize that was cut short; where that says to resize again, do so."""
        begun = [call for call in self.history.calls if call.do == "resize" and not call.done]
        if not begun:
            return
        try:
            self._open(wal={**SETTINGS["wal"], "retry_budget": "500ms", "put_timeout": "500ms"}).close()
        except memwal.Unavailable as error:
            if "run `memwal regions resize`" not in str(error):
                raise
            uri, to = str(self.uri), begun[-1].what["to"]
            resize(uri, {}, open_store(uri), to, clock=SystemClock(), ids=SystemIds())

    def _again(self, table: Any, call: Call) -> None:
        """Call again with the token."""
        token = call.what["token"]
        if call.do == "put":
            receipt = table.put([row(id, call.what["value"]) for id in call.what["ids"]], token=token)
        else:
            receipt = table.delete(call.what["ids"], token=token)
        acknowledged = call.number in self.history.acknowledged("durable")
        if acknowledged and receipt.applied:
            raise Lost(f"token {token} was acknowledged, and is applied again: {receipt}")
        later = {id for other in self.history.calls if other.writes and other.number > call.number for id in other.rows}
        rows = self._rows(table, "latest")
        times = Counter(id for id, _ in rows)
        for id, value in call.rows.items():
            if id not in later and (dict(rows).get(id) != value or times[id] > 1):
                raise Lost(f"token {token} again: id {id} is {dict(rows).get(id)}, {times[id]} times, not {value}")
