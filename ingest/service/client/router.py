"""Find the daemon that owns each region, and redirect calls that reached the wrong daemon.

1. The client asks every known daemon, in parallel, for its regions (operation "regions"). Daemons may fail to answer.
2. If two daemons claim a region, the higher epoch wins. The answers are kept until a call fails because of them.
3. After that failure (`client.retry`) the client asks again, once for all calls that failed together, and
   repeats the call until its deadline. If the daemon that rejected it names the owner, the client first calls that
   one, at once.

Correctness does not depend on these answers: a daemon rejects regions that it does not own, and the epoch fences one
that is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from memwal.ingest.caller import carried
from memwal.ingest.errors import (
    DRAINING,
    MISFIT,
    NO_TABLE,
    NOT_OWNER,
    PROTOCOL,
    UNAUTHENTICATED,
    Invalid,
    MemWalError,
    Unavailable,
)
from memwal.ingest.refusals import expect_routing, wrong_table
from memwal.ingest.service.client.retry import Attempts, wait_unless_moved
from memwal.ingest.service.rpc.connection import Connection
from memwal.ingest.threads import start
from memwal.wal import Clock, Ids, SystemClock, SystemIds, WalError, named

T = TypeVar("T")

PROBE_TIMEOUT = 1.0
"""Seconds for a daemon's answer to "regions". A live daemon answers in milliseconds, even under load."""
DESCRIBE_TIMEOUT = 10.0
"""Seconds for each of several daemons to describe the table. The first description is enough."""
_DECIDED = (UNAUTHENTICATED, NO_TABLE, MISFIT)
"""Reasons of a daemon's rejection that another daemon would repeat."""
AT_ONCE = 32
"""Maximum parallel calls of one client, in addition to the callers' own threads."""


class Owner(NamedTuple):
    """The owner of a region, by its own answer."""

    endpoint: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call to a daemon about `regions`, which it owned by its last answer."""

    to: Connection
    regions: Sequence[str]
    make: Callable[[], T]


def endpoints_of(location: str | Sequence[str]) -> tuple[str, ...]:
    """Return the distinct addresses in `location`, a list or a comma-separated string. Raises: Invalid."""
    listed = location.split(",") if isinstance(location, str) else list(location)
    endpoints = tuple(dict.fromkeys(str(each).strip() for each in listed if str(each).strip()))
    if not endpoints:
        raise Invalid(f"{location!r} names no daemon; write grpc://host:port")
    return endpoints


def believed(answers: Iterable[tuple[str, Mapping[str, Any]]], table: str | None) -> dict[str, Owner]:
    """Return the owners by region from answers to "regions" by endpoint. The highest epoch wins; among equal epochs,
    the first answer.

    A region without an owner maps to the daemon that is claiming it, with epoch 0: calls there wait for the claim.
    Answers for another `table` are ignored, since ports are reused.
    """
    owners: dict[str, Owner] = {}
    for endpoint, answer in answers:
        if table is not None and answer.get("table", table) != table:
            continue
        for region, epoch in (dict.fromkeys(answer.get("claiming", ()), 0) | answer["regions"]).items():
            if region not in owners or owners[region].epoch < epoch:
                owners[region] = Owner(endpoint, epoch)
    return owners


class Router:
    """The daemons of one table and the regions they own, by their last answers.

    Thread safety. Every method from any thread.
    Invariants. `sole` is set exactly while one daemon owns every region or is the only known daemon, so that a call
    needs no lookup by region.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        connect: Callable[[str], Connection],
        clock: Clock | None = None,
        ids: Ids | None = None,
        find: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        """Create connections to `endpoints`.

        `connect`: creates a connection, which connects on first use. `find`: returns further endpoints if the known
        daemons do not own every region; without it no others are searched. Raises: Invalid for a malformed address.
        """
        self.clock, self.ids = clock or SystemClock(), ids or SystemIds()
        self._connect, self._find = connect, find
        self._changing, self._asking = threading.Lock(), threading.Lock()
        self._connections = {endpoint: connect(endpoint) for endpoint in endpoints}
        self._pool = ThreadPoolExecutor(AT_ONCE, "router")
        self._owners: dict[str, Owner] = {}
        self._processes: dict[str, str] = {}
        """By endpoint, the process that answered there last."""
        self.rounds = 0
        """How often the daemons were asked; see `learn`."""
        self._followed: dict[str, int] = {}
        self.regions: tuple[str, ...] = ()
        """The region of bucket n, at index n."""
        self.routing = 1
        """Version of the routing of rows to these regions. (model: Resize!Route)"""
        self.table: str | None = None
        """The table's address."""
        self.id: str | None = None
        """The table's id, which calls carry."""
        self.sole: Connection | None = None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints of all known daemons."""
        return tuple(self._connections)

    @property
    def alone(self) -> bool:
        """Whether the table has one daemon only, so no other daemon can take over its regions."""
        return len(self._connections) == 1 and self._find is None

    def connection(self, endpoint: str) -> Connection:
        """Return the connection to `endpoint`, shared by all calls."""
        with self._changing:
            if endpoint not in self._connections:
                self._connections[endpoint] = self._connect(endpoint)
            connection = self._connections[endpoint]
            connection.table = self.id
            return connection

    def describe(self, request: Mapping[str, Any], patience: float | None) -> dict[str, Any]:
        """Return the description of the table from the first daemon that answers, and apply it to this router.

        Later descriptions are dropped, so that one call never mixes the regions of two routings.
        Raises: if no daemon answers, the error of a daemon that rejects this client, else the last error.
        """
        connections = list(self._connections.values())
        if len(connections) == 1:
            return self._described(connections[0], self._description(connections[0], request, patience))
        within = DESCRIBE_TIMEOUT if patience is None else patience
        asked = {self._pool.submit(self._description, each, request, within): each for each in connections}
        errors = list[BaseException]()
        for answered in as_completed(asked):
            try:
                return self._described(asked[answered], answered.result())
            except Exception as failed:  # noqa: BLE001 - raised below if no other daemon answers
                errors.append(failed)
        for error in errors:  # errors of stopped daemons carry no information
            if self._speaks_otherwise(error) or getattr(error, "details", {}).get("reason") in _DECIDED:
                raise error
        error = errors[-1]
        raise Unavailable(f"no daemon answers at {', '.join(self.endpoints)}: {error}", getattr(error, "details", {}))

    def owners(self, regions: Iterable[str]) -> dict[str, list[str]]:
        """Return `regions` by the endpoint of their owner. Raises: Unavailable for a region without a known owner."""
        found: dict[str, list[str]] = {}
        owners = self._owners
        for region in regions:
            if region not in owners:
                raise Unavailable(
                    f"{named(region)}: no daemon at {', '.join(self.endpoints)} says that it owns it; retry with the "
                    "same token",
                    {"reason": NOT_OWNER, "region": region, "owner": None},
                )
            found.setdefault(owners[region].endpoint, []).append(region)
        return found

    def owner(self, region: str) -> Connection:
        """Return the connection to the owner of `region`. Raises: errors of `owners`."""
        return self.sole or self.connection(next(iter(self.owners([region]))))

    def answers(self, calls: Sequence[Call[T]], grace: float = 0.0) -> list[T | MemWalError]:
        """Return the result or the error of each call.

        A long call is abandoned if another daemon has claimed its regions (`client.retry.wait_unless_moved`,
        with the same `grace`): the called daemon hangs, or its work has no effect.
        """
        if self.alone:
            return self.in_parallel([call.make for call in calls])
        watches = [self.watch(call.to.endpoint, call.regions) for call in calls]
        started = [start("call", carried(call.make)) for call in calls]
        return [_settled(partial(wait_unless_moved, *each, grace)) for each in zip(started, watches, strict=True)]

    def watch(self, endpoint: str, regions: Iterable[str]) -> Callable[[], bool]:
        """Return a check whether a daemon other than `endpoint` has claimed one of `regions` since now, with a higher
        epoch.

        If the router knows no claim of this kind, the check asks the other daemons and applies their answers.
        """
        since = {region: self._owners[region] for region in regions if region in self._owners}

        def newer(owners: Mapping[str, Owner]) -> bool:
            found = ((owners[region], owner) for region, owner in since.items() if region in owners)
            return any(other.endpoint != endpoint and other.epoch > owner.epoch for other, owner in found)

        return lambda: newer(self._owners) or newer(self._heard_beside(endpoint))

    def _heard_beside(self, endpoint: str) -> Mapping[str, Owner]:
        """Ask all daemons except `endpoint` for their regions, apply the newer claims, and return the answers."""
        others = [(at, each) for at, each in list(self._connections.items()) if at != endpoint]
        answers = self.in_parallel([partial(each.act, "regions", None, PROBE_TIMEOUT) for _, each in others])
        told = zip((at for at, _ in others), answers, strict=True)
        heard = believed([(at, answer) for at, answer in told if not isinstance(answer, MemWalError)], self.table)
        known = self._owners
        newer = {each: at for each, at in heard.items() if each not in known or at.epoch > known[each].epoch}
        self.believe(known | newer)
        return heard

    def epochs(self) -> dict[str, int]:
        """Return the epoch of each region whose owner is known."""
        return {region: owner.epoch for region, owner in self._owners.items() if owner.epoch}

    def believe(self, owners: dict[str, Owner]) -> None:
        """Replace the owners of all regions. An owner with epoch 0 keeps the epoch that is known of its region."""
        with self._changing:
            known = self._owners
            self._owners = {
                region: owner if owner.epoch else Owner(owner.endpoint, known[region].epoch if region in known else 0)
                for region, owner in owners.items()
            }
            holders = {owners[region].endpoint if region in owners else None for region in self.regions}
            only = holders.pop() if len(holders) == 1 else None
            if self.alone:  # its own error says what is wrong
                only = next(iter(self._connections))
            self.sole = None if only is None else self._connections[only]

    def learn(self, seen: int) -> None:
        """Ask every daemon for its regions, unless they were asked since `rounds` was `seen`."""
        with self._asking:
            if self.rounds == seen:
                self._ask()

    def before_next(self, attempts: Attempts, error: MemWalError, seen: int) -> None:
        """Return when a failed call may be repeated. `seen`: `rounds` before the call.

        Raises: `error` if it may not be repeated; errors of `Attempts.ended`.
        """
        processes = dict(self._processes)
        if attempts.left and self.rounds == seen and self._follow(error):
            return
        if attempts.after(error, alone=self.alone):
            self.learn(seen)
            lost = error.details.get("ended", ())
            attempts.ended([each for each in lost if self._has_ended(each, processes.get(each))], error)
            if not attempts.left:  # asking used the remaining time
                raise error

    def _has_ended(self, endpoint: str, process: str | None) -> bool:
        """Return whether `process`, a daemon that listened at `endpoint`, has ended; False if unknown."""
        try:
            answer = self.connection(endpoint).act("regions", None, PROBE_TIMEOUT)
        except MemWalError as error:
            return bool(error.details.get("not_reached"))
        return process is not None and answer["process"] != process

    def asked(self) -> dict[str, Mapping[str, Any]]:
        """Ask every daemon and return the answers by endpoint."""
        with self._asking:
            return self._ask()

    def in_parallel(self, calls: Sequence[Callable[[], T]]) -> list[T | MemWalError]:
        """Run calls in parallel, the first in this thread. Return the result or error of each."""
        others: list[Future[T]] = [self._pool.submit(carried(call)) for call in calls[1:]]
        return [_settled(call) for call in (*calls[:1], *(other.result for other in others))]

    def close(self) -> None:
        """Close every connection; the daemons keep running."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._connections.values()):
            connection.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _ask(self) -> dict[str, Mapping[str, Any]]:
        """Ask the known daemons; if a region has no owner, also those that `find` returns."""
        answers = self._answers(list(self._connections))
        owners = believed(answers.items(), self.table)
        if self._find is not None and not (answers and all(region in owners for region in self.regions)):
            unknown = list[str]()
            with suppress(WalError, MemWalError, OSError):  # daemons cannot serve without storage
                unknown += [endpoint for endpoint in self._find() if endpoint not in self._connections]
            answers |= self._answers(unknown)
        self._take_over(answers)
        self.rounds += 1
        return answers

    def _answers(self, endpoints: Iterable[str]) -> dict[str, Mapping[str, Any]]:
        """Return the answers of `endpoints`, once all have answered or failed, or every region has a new claim."""
        asked = {
            self._pool.submit(self.connection(each).act, "regions", None, PROBE_TIMEOUT): each for each in endpoints
        }
        before, answers = self._owners, dict[str, Mapping[str, Any]]()
        for answered in as_completed(asked):
            if (error := answered.exception()) is not None:
                if self._speaks_otherwise(error):
                    raise error  # a later answer cannot differ
                continue
            answer = answered.result()
            if self.table in (None, answer.get("table", self.table)):  # ports are reused
                answers[asked[answered]] = answer
            owners = believed(answers.items(), self.table)
            if all(  # every region has a new claim, so missing answers can add nothing
                region in owners and (region not in before or owners[region].epoch > before[region].epoch)
                for region in self.regions
            ):
                break
        return answers

    def _speaks_otherwise(self, error: BaseException) -> bool:
        """Return whether the versions of the protocol prevent calls between this process and a daemon of this table."""
        if not isinstance(error, MemWalError) or error.details.get("reason") != PROTOCOL:
            return False
        return self.table is None or error.details.get("table", self.table) == self.table

    def _follow(self, error: MemWalError) -> bool:
        """Apply the owner that a rejection names, once per region and round. Return whether this was done.

        Not if it names an unknown daemon, or an older claim than the router knows. The claim's epoch is kept, so that
        `watch` notices the next claim if the named daemon does not answer.
        """
        if not isinstance(error, Unavailable) or error.details.get("reason") not in (NOT_OWNER, DRAINING):
            return False
        told = error.details
        region, owner, epoch = str(told.get("region")), str(told.get("owner")), int(told.get("epoch", 0))
        known = self._owners.get(region)
        if known is None or owner not in self._connections or 0 < epoch < known.epoch:
            return False
        if self._followed.get(region) == self.rounds:
            return False
        self._followed[region] = self.rounds
        self.believe({**self._owners, region: Owner(owner, epoch)})
        return True

    def _take_over(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Apply the daemons and owners in `answers`. Raises: Unavailable (reason "resized") after a resize."""
        for answer in answers.values() if self.regions else ():
            expect_routing(answer["table"], self.routing, answer["routing_version"])
        self._processes |= {endpoint: answer["process"] for endpoint, answer in answers.items()}
        self._meet(answers.values())
        self.believe(believed(answers.items(), self.table))

    def _description(self, daemon: Connection, request: Mapping[str, Any], patience: float | None) -> dict[str, Any]:
        """Return this daemon's description of the table. Raises: Invalid for another table."""
        described: dict[str, Any] = daemon.act("schema", request, patience)
        there = described["identity"]["table"]
        if self.id not in (None, described.get("id", self.id)):
            raise wrong_table(there)
        if self.table not in (None, there):
            raise Invalid(f"the daemon at {daemon.endpoint} serves {there}, not {self.table}")
        return described

    def _described(self, connection: Connection, described: dict[str, Any]) -> dict[str, Any]:
        """Apply a description and return it.

        Raises: Unavailable for a description with an older routing: the daemon has not applied the resize yet.
        """
        there, version = described["identity"]["table"], described["routing_version"]
        with self._changing:
            if self.regions and version < self.routing:
                raise Unavailable(f"the daemon at {connection.endpoint} has not taken over the resize of {there} yet")
            self.regions, self.routing, self.table = tuple(described["ids"]), version, there
            self.id = described.get("id", self.id)
            for each in self._connections.values():
                each.table = self.id
        self._processes[connection.endpoint] = described["process"]
        self._meet([described])
        if not self._owners:
            self.believe(believed([(connection.endpoint, described)], there))
        return described

    def _meet(self, answers: Collection[Mapping[str, Any]]) -> None:
        """Add the daemons that `answers` name. Daemons that answered are known already, possibly by another host
        name."""
        own = {answer["endpoint"] for answer in answers}
        for endpoint in dict.fromkeys(each for answer in answers for each in answer["endpoints"]):
            if endpoint not in own:
                self.connection(endpoint)


def _settled(call: Callable[[], T]) -> T | MemWalError:
    try:
        return call()
    except MemWalError as error:
        return error
