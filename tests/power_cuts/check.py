"""What must hold for every table after a power cut, given the workload's calls and acknowledgements.

 1. The table opens, if its creation was acknowledged; else it opens, is created, or is refused in one line. Opening
    goes back from torn versions of the base (`flush.base.torn`).
 2. `memwal verify --deep` has no finding, before the first write and at the end.
 3. Reads from storage at `durable`, `flushed` and `committed`, and of the new owner: a row that was acknowledged (for
    `flushed` and `committed`: before an acknowledged flush or commit began) has its value, or the value of a
    later call, acknowledged or not; no row whose delete was acknowledged comes back; no row occurs twice.
 4. The last call of every token is repeated: it was applied before, if it was acknowledged; in any case it is applied
    once.
 5. Another put, flush and commit work, the base has every row, and so does another owner.
 6. An acknowledged backup can be restored. One that was not acknowledged is complete, or is refused in one line and
    can be resumed; the same for a restore.

In the workloads at most one call at a time touches a key, so the calls on each key are ordered.
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
from memwal.flush.backup.record import BACKING_UP
from memwal.flush.base.create import RESTORING
from memwal.flush.base.table import BaseTable
from memwal.flush.base.torn import TORN
from memwal.flush.errors import FlushError
from memwal.flush.resizing.steps import resize
from memwal.flush.verification.runner import verify_table
from memwal.ingest.errors import MemWalError
from memwal.wal import SystemClock, SystemIds, open_store
from tests.backups import backed_up, restored
from tests.power_cuts.cuts import State
from tests.power_cuts.model import materialise
from tests.power_cuts.searches import unlike_searches
from tests.power_cuts.workloads import SETTINGS, open_table, row
from tests.support.garbage import collect
from tests.support.waits import as_only_process

_NEW = 1_000_000
"""Id of the row that the check itself puts."""
Rows = Mapping[int, int]


class Lost(AssertionError):
    """A table broke a promise; the text names the promise."""


@dataclass
class Call:
    """One call of the workload."""

    number: int
    do: str
    what: Mapping[str, Any]
    done: bool = False
    done_at: int = 0
    """Number of marks before the mark of its end."""
    begun_at: int = 0

    @property
    def writes(self) -> bool:
        """Whether the call puts or deletes rows."""
        return self.do in ("put", "delete")

    @property
    def rows(self) -> Mapping[int, int | None]:
        """The value of each id; None for a delete."""
        value = self.what["value"] if self.do == "put" else None
        return dict.fromkeys(self.what["ids"], value)


@dataclass
class History:
    """The calls on one table."""

    calls: list[Call] = field(default_factory=list)

    @property
    def opened(self) -> Call:
        """The call that created the table."""
        return next(call for call in self.calls if call.do in ("open", "restore"))

    @property
    def keyed(self) -> bool:
        """Whether the table has a key."""
        return bool(self.opened.what.get("keyed", True))

    @property
    def kind(self) -> Mapping[str, Any]:
        """Arguments of `open_table` for the table."""
        found: Mapping[str, Any] = self.opened.what.get("kind", {})
        return found

    def acknowledged(self, level: str) -> set[int]:
        """Return the numbers of the writes that a level must show."""
        if level == "durable":
            until = [c.begun_at for c in self.calls if c.do in ("flush", "close") and c.done]
            last = max(until, default=0)
            return {c.number for c in self.calls if c.writes and c.done and (c.what["durable"] or c.done_at < last)}
        flushed = [c for c in self.calls if c.do in ("flush", "resize") and c.done]
        if level == "committed":  # a commit includes what was flushed before it
            commit = max((c.begun_at for c in self.calls if c.do == "commit" and c.done), default=0)
            flushed = [c for c in flushed if c.do == "resize" or c.done_at < commit]
        last = max((c.begun_at for c in flushed), default=0)
        return {c.number for c in self.calls if c.writes and c.done and c.done_at < last}

    def possible(self, level: str) -> dict[int, set[int | None]]:
        """Return the values that each id may have at a level; None: the row may be missing."""
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
        if "cut" in mark:  # writes that were not durable then may be lost forever
            for history in found.values():
                durable = history.acknowledged("durable")
                for each in history.calls:
                    each.done = each.done and (not each.writes or each.number in durable)
        elif "done" in mark:
            calls[mark["done"]].done, calls[mark["done"]].done_at = True, place
        else:
            call = Call(mark["call"], mark["do"], mark, begun_at=place)
            calls[call.number] = call
            if call.do == "restore":
                earlier = found[call.what["source"]].calls
                backup = next(c for c in earlier if c.do == "backup" and c.what["to"] == call.what["backup"])
                found[mark["table"]] = History([call, *copied_calls(earlier, backup)])
            else:
                found.setdefault(mark["table"], History()).calls.append(call)
    return found


def copied_calls(calls: Sequence[Call], backup: Call) -> list[Call]:
    """Return the writes that a backup must contain."""
    return [call for call in calls if call.writes and call.done and call.done_at < backup.begun_at]


def check(state: State, place: Path) -> list[str]:
    """Write the files of a state to `place` and check its tables; return remarks. Raises: Lost."""
    place.mkdir()
    materialise(state.tree, place)
    try:
        remarks = []
        for name, history in histories(state.marks).items():
            with _told(name), as_only_process():
                table = _Table(place, name, history)
                remarks += table.finish_backups()
                remarks += table.check()
                table.check_backups()
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


@contextmanager
def _one_line() -> Iterator[list[str]]:
    """Yield a list that receives the error of the calls inside, which must be one line; empty if they succeed."""
    refused: list[str] = []
    try:
        yield refused
    except (MemWalError, FlushError) as error:
        if "\n" in str(error):
            raise Lost(f"refused in more than a line: {error}") from error
        refused.append(str(error))


@dataclass
class _Table:
    """One table after a cut."""

    place: Path
    name: str
    """Path below `place`."""
    history: History

    @property
    def uri(self) -> Path:
        return self.place / self.name

    def check(self) -> list[str]:
        """Check the table. Raises: Lost, and any error of a call that must succeed."""
        opened = self.history.opened
        if not opened.done:
            return self._restored_again() if opened.do == "restore" else self._begun_again()
        assert BaseTable.find(str(self.uri), to_write=True) is not None
        torn = any((self.uri / "_versions").glob(f"*{TORN}"))
        self.verify("after the cut")
        self.check_levels("after the cut")
        self._go_on()
        return ["went back from a torn version of the base"] if torn else []

    def _begun_again(self) -> list[str]:
        """Repeat a creation that was not acknowledged."""
        with _one_line() as refused, self._open() as table:
            table.put([self._row(_NEW, 1)])
        if refused:
            return [f"creation not acknowledged, opening refused: {refused[0].replace(str(self.uri), 'URI')}"]
        self.verify("after a creation begun again")
        return []

    def _restored_again(self) -> list[str]:
        """Check a restore that was not acknowledged: a table that opens is complete; else resume the restore."""
        with _one_line() as refused:
            self.check_levels("of a restore that was cut short")
        if refused or (self.uri / RESTORING).exists():
            restored(str(self.place / self.history.opened.what["backup"]), str(self.uri), resume=True)
            self.check_levels("of a restore that went on")
        self._go_on()
        return ["went on with a restore"] if refused else []

    def finish_backups(self) -> list[str]:
        """Restore backups that were not acknowledged: they are complete, or refused. Resume the refused ones."""
        remarks = []
        for call in self.history.calls:
            if call.do == "backup" and not call.done:
                with _one_line() as refused:
                    self._restore_a_copy(call.what["to"], self.history.calls)
                if refused or (self.place / call.what["to"] / BACKING_UP).exists():
                    BaseTable.find(str(self.uri), to_write=True)  # as the next owner does
                    backed_up(str(self.uri), str(self.place / call.what["to"]), resume=True)
                    self._restore_a_copy(call.what["to"], self.history.calls)
                remarks.append("went on with a backup" if refused else "restored a backup that was not acknowledged")
        return remarks

    def check_backups(self) -> None:
        """Restore the acknowledged backups."""
        for call in self.history.calls:
            if call.do == "backup" and call.done:
                self._restore_a_copy(call.what["to"], copied_calls(self.history.calls, call))

    def _restore_a_copy(self, backup: str, calls: Sequence[Call]) -> None:
        name = "restored-by-the-check"
        try:
            restored(str(self.place / backup), str(self.place / name))
            copy = _Table(self.place, name, History([self.history.opened, *(c for c in calls if c.writes)]))
            copy.check_levels("of a restored backup")
        finally:
            shutil.rmtree(self.place / name, ignore_errors=True)

    def verify(self, when: str) -> None:
        """Run `memwal verify --deep`."""
        if findings := verify_table(open_store(str(self.uri)), str(self.uri), deep=True).findings:
            raise Lost(f"verify --deep {when}: {'; '.join(map(str, findings))}")

    def check_levels(self, when: str) -> None:
        """Read from storage at every level."""
        with memwal.open(str(self.uri), read_only=True) as table:
            for level in ("durable", "flushed", "committed"):
                self._expect(rows := self._rows(table, level), level, f"{level} {when}")
                self._expect_found(table, rows, level, when)

    def _open(self, **more: Any) -> Any:
        return open_table(self.uri, key="id" if self.history.keyed else (), **self.history.kind, **more)

    def _row(self, id: int, value: int) -> dict[str, Any]:
        return row(id, value, vectors=self.history.kind.get("vectors", False))

    def _rows(self, table: Any, level: str) -> list[tuple[int, int]]:
        found = table.scan(level=level, columns=list(self._row(0, 0))).read_all().to_pylist()
        for each in found:
            if each != self._row(each["id"], each["n"]):
                raise Lost(f"a row that nobody put: {each}")
        return [(each["id"], each["n"]) for each in found]

    def _expect_found(self, table: Any, rows: Sequence[tuple[int, int]], level: str, when: str) -> None:
        if self.history.kind.get("indexed") and (wrong := unlike_searches(table, rows, level)):
            raise Lost(f"{level} {when}: {wrong}")

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
            table.put([self._row(_NEW, 1)], token="check:1")
            before = sorted(self._rows(table, "latest"))
            table.flush()
            table.commit()
            if (after := sorted(self._rows(table, "committed"))) != before or (_NEW, 1) not in after:
                raise Lost(f"committed after another put, flush and commit: {after}, latest before: {before}")
            self._expect_found(table, before, "latest", "after another put, flush and commit")
        with self._open() as table:
            if (after := sorted(self._rows(table, "latest"))) != before:
                raise Lost(f"latest of another owner: {after}, before: {before}")
        collect(str(self.uri), orphan=0.0)
        self.verify("at the end")

    def _finish_resize(self) -> None:
        """Open the table after an interrupted resize; if the error says to resize again, do so."""
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
        """Repeat a call with its token."""
        token = call.what["token"]
        if call.do == "put":
            receipt = table.put([self._row(id, call.what["value"]) for id in call.what["ids"]], token=token)
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
