"""Decide which rows a read may show, from the attempts per key and the batches that were applied.

Every attempt to write gets a number, which is the value that it writes, so a value that is read names its attempt.
Attempts on one region are in a total order, (epoch, order within the owner): a newer owner's attempts come after
all of an older one's, because of the fence.

    open      no answer yet, or none ever: the process was killed, the outcome is unknown, the writer was fenced
    volatile  acknowledged without durability; durable once anything after it of the same owner is
    acked     acknowledged and durable
    failed    acknowledged as not written: must never be seen

A read is right for a key if it shows an attempt that did not fail, and that is not older than the newest acked one
when the read began, nor than what the same reader saw before; either all rows of a write are visible or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Order = tuple[int, int]
NEVER: Order = (0, 0)
Floors = dict[int, Order]


class Wrong(AssertionError):
    """The system broke a promise."""


@dataclass(eq=False)
class Attempt:
    """One write on one region. `rows`: whether it deletes each key."""

    number: int
    region: int
    rows: Mapping[int, bool]
    token: tuple[str, int] | None
    order: Order = NEVER
    """(epoch, place) once an owner has accepted it."""
    state: str = "open"
    position: int = 0
    """Position of the entry that made it durable, if its writer learned it."""
    seen: bool = False
    answered: bool = False
    """Whether an owner has acknowledged it; a reader of storage may see it before that."""

    def __str__(self) -> str:
        what = ",".join(f"{key}{'-' if deletes else ''}" for key, deletes in self.rows.items())
        return f"#{self.number}({what}){'' if self.token is None else ' ' + '/'.join(map(str, self.token))}"


@dataclass(eq=False)
class Oracle:
    """All attempts of a run, and the reads that they allow."""

    region_of: dict[int, int]
    """The region of every key that may be written."""
    attempts: list[Attempt] = field(default_factory=list)
    durable: Floors = field(default_factory=dict)
    """For each key the newest attempt known to be durable; `flushed` and `committed`: known to be in SSTs, in the
    base."""
    flushed: Floors = field(default_factory=dict)
    committed: Floors = field(default_factory=dict)
    one_of: list[list[Attempt]] = field(default_factory=list)
    """Attempts of one token; one of them is durable, and no client knows which."""
    _places: int = 0
    _owners: dict[int, Order] = field(default_factory=dict)
    _by_key: dict[int, list[Attempt]] = field(default_factory=dict)

    def attempt(self, region: int, rows: Mapping[int, bool], token: tuple[str, int] | None = None) -> Attempt:
        """Return a new attempt; its number is the value of its rows."""
        made = Attempt(len(self.attempts) + 1, region, rows, token)
        self.attempts.append(made)
        for key in rows:
            self._by_key.setdefault(key, []).append(made)
        return made

    def taken(self, attempt: Attempt, epoch: int) -> None:
        """Record that the owner of `epoch` begins to work on it."""
        self._places += 1
        attempt.order = (epoch, self._places)

    def claimed(self, region: int, epoch: int) -> None:
        """Record a returned claim: attempts that an older owner accepts from now on cannot be acknowledged as
        durable."""
        self._owners[region] = max(self._owners.get(region, NEVER), self.now(epoch))

    def now(self, epoch: int) -> Order:
        """Return the place after everything that the owner of `epoch` has accepted so far."""
        return (epoch, self._places)

    # ---- answers -------------------------------------------------------------------------------------------------

    def acked(self, attempt: Attempt) -> None:
        """Record an attempt as durable, and with it everything that its owner has in memory before it."""
        epoch, place = self._owners.get(attempt.region, NEVER)
        if attempt.order[0] < epoch and attempt.order[1] > place:
            raise Wrong(f"{attempt} of epoch {attempt.order[0]} was acknowledged; epoch {epoch} had claimed before")
        attempt.answered = True
        self._move(attempt, "acked")
        self.all_durable(attempt.region, attempt.order)

    def all_durable(self, region: int, until: Order) -> None:
        """Record everything that this owner had acknowledged up to `until` as durable."""
        for each in self.attempts:
            of_this_owner = each.region == region and each.order[0] == until[0]
            if of_this_owner and each.order <= until and each.state == "volatile":
                self._move(each, "acked")

    def volatile(self, attempt: Attempt) -> None:
        """Record an acknowledgement in memory only."""
        attempt.answered = True
        self._move(attempt, "volatile")

    def failed(self, attempt: Attempt) -> None:
        """Record the owner's answer that nothing was written."""
        if attempt.seen:
            raise Wrong(f"{attempt} was answered with 'nothing written', but a reader saw it")
        self._move(attempt, "failed")

    def repeated(self, attempt: Attempt) -> None:
        """Record the answer that the token was applied before: an earlier attempt must have been applied."""
        self._move(attempt, "failed")
        earlier = [each for each in self._same_token(attempt) if each.state != "failed" and each.order != NEVER]
        if not earlier:
            raise Wrong(f"{attempt} was answered with 'applied before', but no attempt of its token can have been")
        if not any(each.state == "acked" for each in earlier):
            self.one_of.append(earlier)

    def first(self, attempt: Attempt) -> None:
        """Record the answer that the token is applied now: no other attempt of it is, or ever will be."""
        for each in self._same_token(attempt):
            if each.state in ("acked", "volatile"):
                raise Wrong(f"{attempt} was applied, and {each} of the same token before it")
            if each.order < attempt.order and each.order != NEVER:
                self.failed(each)

    # ---- reads ---------------------------------------------------------------------------------------------------

    def check(self, who: str, rows: Iterable[tuple[int, int]], floors: Floors, *, durable: bool = True) -> Floors:
        """Check a read of all keys, (key, value) pairs, against `floors`; return the floors that it proves for the
        next one.

        `durable`: the rows are on storage, so no later read may miss them.
        """
        shown: dict[int, Attempt] = {}
        for key, value in rows:
            if key in shown:
                raise Wrong(f"{who}: key {key} came twice")
            shown[key] = self._shown(who, key, value)
        proved = {key: self._checked(who, key, shown.get(key), floors.get(key, NEVER)) for key in self.region_of}
        for attempt in shown.values():
            self._check_whole(who, attempt, shown, durable=durable)
        return {key: order for key, order in proved.items() if order != NEVER}

    def check_one_of(self, who: str, rows: Iterable[tuple[int, int]], groups: Iterable[Sequence[Attempt]]) -> None:
        """Check that a read of everything durable shows one attempt of each group, or a later one."""
        shown = {key: self._shown(who, key, value) for key, value in rows}
        for group in groups:
            if not any(self._covered(attempt, shown) for attempt in group):
                raise Wrong(f"{who}: told that one of {', '.join(map(str, group))} was applied, but none is there")

    def _covered(self, attempt: Attempt, shown: Mapping[int, Attempt]) -> bool:
        for key, deletes in attempt.rows.items():
            if key in shown:
                if shown[key].order < attempt.order:
                    return False
            elif not deletes and not self._deleted_after(key, attempt):
                return False
        return True

    def raise_floor(self, floors: Floors, region: int, until: Order) -> None:
        """Raise `floors` to everything acked on `region` up to `until`."""
        for each in self.attempts:
            if each.region == region and each.state == "acked" and each.order <= until:
                self._raise(floors, each)

    def raise_floor_at(self, floors: Floors, region: int, position: int) -> None:
        """Raise `floors` to everything acked on `region` at a WAL position up to `position`."""
        for each in self.attempts:
            if each.region == region and each.state == "acked" and 0 < each.position <= position:
                self._raise(floors, each)

    def _shown(self, who: str, key: int, value: int) -> Attempt:
        if not 1 <= value <= len(self.attempts):
            raise Wrong(f"{who}: key {key} has the value {value}, which nobody wrote")
        attempt = self.attempts[value - 1]
        if attempt.rows.get(key) is not False:
            raise Wrong(f"{who}: key {key} shows {attempt}, which did not put it")
        if attempt.state == "failed":
            raise Wrong(f"{who}: key {key} shows {attempt}, which was answered with 'nothing written'")
        return attempt

    def _checked(self, who: str, key: int, shown: Attempt | None, floor: Order) -> Order:
        if shown is not None:
            if shown.order < floor:
                raise Wrong(f"{who}: key {key} shows {shown}, older than {self._at(floor)}")
            return shown.order
        if floor == NEVER:
            return NEVER
        deletes = [each.order for each in self._of(key) if each.rows[key] and each.order >= floor]
        if not deletes:
            raise Wrong(f"{who}: key {key} is missing; it was {self._at(floor)}, and nobody deleted it since")
        return min(deletes)

    def _check_whole(self, who: str, attempt: Attempt, shown: Mapping[int, Attempt], *, durable: bool) -> None:
        """Check that all rows of a visible write are visible, or newer ones."""
        attempt.seen = True
        if durable and attempt.state in ("open", "volatile"):
            self._move(attempt, "acked")
        for key, deletes in attempt.rows.items():
            other = shown.get(key)
            if other is not None and other.order < attempt.order:
                raise Wrong(f"{who}: {attempt} is visible in part: key {key} shows {other}")
            if other is None and not deletes and not self._deleted_after(key, attempt):
                raise Wrong(f"{who}: {attempt} is visible in part: key {key} is missing")

    def _deleted_after(self, key: int, attempt: Attempt) -> bool:
        return any(each.rows[key] and each.order > attempt.order for each in self._of(key))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _of(self, key: int) -> Iterable[Attempt]:
        return (each for each in self._by_key.get(key, ()) if each.state != "failed" and each.order != NEVER)

    def _same_token(self, attempt: Attempt) -> list[Attempt]:
        return [
            each
            for each in self.attempts
            if each is not attempt
            and each.token is not None
            and (each.region, each.token) == (attempt.region, attempt.token)
        ]

    def _move(self, attempt: Attempt, state: str) -> None:
        attempt.state = state
        if state == "acked":
            self._raise(self.durable, attempt)

    @staticmethod
    def _raise(floors: Floors, attempt: Attempt) -> None:
        for key in attempt.rows:
            floors[key] = max(floors.get(key, NEVER), attempt.order)

    def _at(self, order: Order) -> str:
        found = next((str(each) for each in self.attempts if each.order == order), "?")
        return f"{found} of epoch {order[0]}"
