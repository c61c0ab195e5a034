"""The client's knowledge of the owners of regions: which answers of daemons it trusts, and when it asks again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from memwal.ingest.errors import Internal, Invalid, MemWalError, Unavailable, UnknownOutcome
from memwal.ingest.service.client import retry as standstill
from memwal.ingest.service.client.retry import Attempts, verdict
from memwal.ingest.service.client.router import Call, Owner, Router, believed, endpoints_of
from memwal.wal import StoreUnavailable
from tests.messages import raises
from tests.support.clock import FakeClock, SeededIds
from tests.support.together import together

A, B, C = "grpc://a:1", "grpc://b:1", "grpc://c:1"
IDS = ["r0", "r1"]


def answer(regions: Mapping[str, int], **more: Any) -> dict[str, Any]:
    said = {"endpoint": None, "endpoints": [A, B], "process": "1", "table": "t", "routing_version": 1}
    return said | {"regions": dict(regions), "draining": False} | more


class Daemons:
    """The answer of each endpoint, None where no daemon listens, and the requests in order."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {f"grpc://{name}:1": said for name, said in answers.items()}
        self.asked: list[tuple[str, str]] = []

    def router(self, *endpoints: str, find: Callable[[], list[str]] | None = None) -> Router:
        made = Router(endpoints or (A,), lambda endpoint: Daemon(self, endpoint), FakeClock(), SeededIds(), find)  # type: ignore[arg-type,return-value]
        made.describe({}, None)
        return made


class Daemon:
    """A stand-in for a `Connection`."""

    def __init__(self, daemons: Daemons, endpoint: str) -> None:
        self._daemons, self.endpoint = daemons, endpoint

    def act(self, name: str, _request: Any = None, _timeout: float | None = None) -> Any:
        self._daemons.asked.append((name, self.endpoint))
        said = self._daemons.answers.get(self.endpoint)
        said = said() if callable(said) else said
        if said is None:
            raise Unavailable("nobody", {"reason": "lost", "not_reached": True})
        if isinstance(said, MemWalError):
            raise said
        return {"ids": IDS, "identity": {"table": said["table"]}, **said} if name == "schema" else said

    def close(self) -> None:
        pass


def test_addresses_are_a_list_or_a_text_with_commas() -> None:
    assert endpoints_of(A) == (A,)
    assert endpoints_of(f"{A}, {B},{A}") == (A, B)
    assert endpoints_of([B, A]) == (B, A)
    for nothing in ("", " , ", []):
        with raises(Invalid):
            endpoints_of(nothing)


def test_the_higher_epoch_is_believed_and_who_serves_another_table_is_not() -> None:
    answers = [
        (A, answer({"r0": 3, "r1": 2})),
        (B, answer({"r0": 4})),
        (C, answer({"r2": 9}, draining=True)),
        ("grpc://d:1", answer({"r1": 8}, table="other")),
    ]
    assert believed(answers, "t") == {"r0": Owner(B, 4), "r1": Owner(A, 2), "r2": Owner(C, 9)}


def test_a_region_that_nobody_has_is_looked_for_where_it_is_claimed() -> None:
    answers = [(A, answer({"r0": 3}, claiming=["r1"])), (B, answer({}, claiming=["r0", "r1"]))]
    assert believed(answers, "t") == {"r0": Owner(A, 3), "r1": Owner(A, 0)}


def test_the_owner_that_a_daemon_names_is_tried_at_once_and_once() -> None:
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}), b=answer({}))
    router, clock = daemons.router(), FakeClock()
    attempts = Attempts(clock, SeededIds(), 60.0, repeatable=True)
    moved = Unavailable("it is not mine", {"reason": "draining", "region": "r1", "owner": B})
    router.before_next(attempts, moved, router.rounds)
    assert (router.owners(IDS), clock.slept, router.rounds) == ({A: ["r0"], B: ["r1"]}, [], 0)
    router.before_next(attempts, moved, router.rounds)
    assert (len(clock.slept), router.rounds) == (1, 1)
    unheard_of = Unavailable("it is not mine", {"reason": "not_owner", "region": "r0", "owner": C})
    router.before_next(attempts, unheard_of, router.rounds)
    assert router.rounds == 2


def test_a_claim_after_that_of_the_named_owner_is_noticed() -> None:
    """The router may have heard of a claim that the daemon it calls had not: epochs are compared, not counted."""
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}), b=answer({}), c=answer({}))
    router = daemons.router(A, B, C)
    router.learn(router.rounds)
    attempts = Attempts(FakeClock(), SeededIds(), 60.0, repeatable=True)

    def follow(owner: str, epoch: int) -> None:
        details = {"reason": "not_owner", "region": "r1", "owner": owner, "epoch": epoch}
        router.before_next(attempts, Unavailable("it is not mine", details), router.rounds)

    daemons.answers[C] = answer({"r1": 2})
    follow(B, 3)
    assert (router.owners(["r1"]), router.epochs()["r1"]) == ({B: ["r1"]}, 3)
    moved = router.watch(B, ["r1"])
    assert not moved()
    daemons.answers[C] = answer({"r1": 4})
    assert moved()
    assert router.owners(["r1"]) == {C: ["r1"]}
    router.rounds += 1
    follow(B, 3)  # older than what is known: the daemons are asked
    assert router.owners(["r1"]) == {C: ["r1"]}


def test_a_read_that_ended_two_daemons_is_not_sent_to_a_third() -> None:
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}), b=answer({}), c=answer({}))
    router, clock = daemons.router(), FakeClock()

    def lost(endpoint: str) -> Unavailable:
        return Unavailable("does not answer", {"reason": "lost", "ended": [endpoint]})

    def attempts(*, reads: bool) -> Attempts:
        return Attempts(clock, SeededIds(), 60.0, repeatable=True, reads=reads)

    read, write = attempts(reads=True), attempts(reads=False)
    for epoch in range(2, 7):  # the connection is lost, but the same process answers
        daemons.answers[A] = answer({"r0": epoch, "r1": epoch})
        router.before_next(read, lost(A), router.rounds)
    daemons.answers[A], daemons.answers[B] = None, answer({"r0": 7, "r1": 7})
    router.before_next(read, lost(A), router.rounds)
    assert router.owners(IDS) == {B: ["r0", "r1"]}
    daemons.answers[B] = answer({"r0": 8, "r1": 8}, process="2")  # started again at its endpoint
    with raises(Internal) as ended:
        router.before_next(read, lost(B), router.rounds)
    assert verdict(ended.value, repeatable=True, alone=False) == "raise"
    for number in range(3, 8):
        daemons.answers[B] = answer({"r0": 8, "r1": 8}, process=str(number))
        router.before_next(write, lost(B), router.rounds)


@pytest.mark.parametrize(("table", "told"), [("t", True), ("other", False)])
def test_a_daemon_of_another_protocol_is_told_of_if_it_serves_this_table(table: str, told: bool) -> None:
    """Otherwise the client would search for the daemon's regions until the deadline, without naming the reason."""
    daemons = Daemons(a=answer({"r0": 1}), b=Invalid("speaks protocol 9.0", {"reason": "protocol", "table": table}))
    router = daemons.router()
    if not told:
        router.learn(router.rounds)
        assert router.epochs() == {"r0": 1}
        return
    with raises(Invalid):
        router.learn(router.rounds)


def test_one_that_owns_all_is_found_without_asking_again() -> None:
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}), b=answer({}))
    router = daemons.router()
    assert router.endpoints == (A, B)
    assert router.sole is not None
    assert router.sole.endpoint == A
    assert [name for name, _ in daemons.asked] == ["schema"]


def test_owners_that_are_not_known_are_learnt_from_every_daemon() -> None:
    daemons = Daemons(a=answer({"r0": 1}), b=answer({"r1": 1}))
    router = daemons.router()
    assert router.sole is None
    with raises(Unavailable) as unknown:
        router.owners(IDS)
    assert unknown.value.details["reason"] == "not_owner"
    router.learn(router.rounds)
    assert router.owners(IDS) == {A: ["r0"], B: ["r1"]}
    assert router.owner("r1").endpoint == B
    daemons.answers[A] = None
    daemons.answers[B] = answer({"r0": 2, "r1": 1})
    router.learn(router.rounds)
    assert router.sole is not None
    assert router.sole.endpoint == B


def test_daemons_that_came_back_elsewhere_are_found() -> None:
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}, endpoints=[A]))
    noted: list[str] = []
    router = daemons.router(find=lambda: noted)
    assert not router.alone
    daemons.answers[A] = None
    daemons.answers[C] = answer({"r0": 2, "r1": 2}, endpoints=[C])
    router.learn(router.rounds)
    with raises(Unavailable):
        router.owners(IDS)
    noted.append(C)
    router.learn(router.rounds)
    assert router.owners(IDS) == {C: IDS}


def test_nobody_is_looked_for_while_every_region_has_an_owner() -> None:
    def find() -> list[str]:
        raise AssertionError("it is not called")

    router = Daemons(a=answer({"r0": 1}), b=answer({"r1": 1})).router(find=find)
    router.learn(router.rounds)
    assert router.owners(IDS) == {A: ["r0"], B: ["r1"]}


def test_storage_that_fails_while_daemons_are_looked_for_is_no_other_error() -> None:
    def find() -> list[str]:
        raise StoreUnavailable("away")

    daemons = Daemons(a=answer({"r0": 1, "r1": 1}, endpoints=[A]))
    router = daemons.router(find=find)
    daemons.answers[A] = None
    router.learn(router.rounds)
    with raises(Unavailable):
        router.owners(IDS)


def test_calls_that_failed_together_ask_once() -> None:
    daemons = Daemons(a=answer({"r0": 1}), b=answer({"r1": 1}))
    router = daemons.router()
    together(*[partial(router.learn, router.rounds)] * 8)
    assert sorted(daemons.asked[1:]) == [("regions", A), ("regions", B)]


def test_no_call_is_made_again_past_its_deadline() -> None:
    daemons = Daemons(a=answer({"r0": 1}), b=answer({"r1": 1}))
    router = daemons.router()
    error, clock = Unavailable("busy elsewhere", {"reason": "not_owner"}), FakeClock()
    attempts = Attempts(clock, SeededIds(), 1.0, repeatable=True)
    router.before_next(attempts, error, router.rounds)
    assert router.rounds == 1

    class Slow(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            clock.advance(5.0)
            return super().__getitem__(name)

    daemons.answers[A] = Slow(daemons.answers[A])
    with pytest.raises(Unavailable) as raised:
        router.before_next(attempts, error, router.rounds)
    assert raised.value is error


def test_another_name_of_the_same_daemon_is_not_another_daemon() -> None:
    local = "grpc://localhost:1"
    daemons = Daemons(localhost=answer({"r0": 1, "r1": 1}, endpoint=A, endpoints=[A]))
    router = daemons.router(local)
    assert router.alone
    router.learn(router.rounds)
    assert router.endpoints == (local,)


def test_one_that_is_alone_is_asked_whatever_it_owned_when_it_was_looked_at() -> None:
    """The daemon itself reports what is wrong."""
    daemons = Daemons(a=answer({}, endpoints=[]))
    router = daemons.router()
    assert router.alone
    assert router.sole is not None


def test_the_first_that_answers_describes_the_table() -> None:
    daemons = Daemons(b=answer({"r0": 1, "r1": 1}))
    router = daemons.router(A, B)
    assert (router.table, router.regions) == ("t", ("r0", "r1"))
    with raises(Unavailable):
        Daemons().router(A, C)


@pytest.mark.parametrize("reason", ["unauthenticated", "protocol"])
@pytest.mark.parametrize("order", [(A, B, C), (B, A, C), (B, C, A)])
def test_that_a_daemon_refuses_us_is_told_before_that_others_are_not_there(reason: str, order: Sequence[str]) -> None:
    with raises(Invalid):
        Daemons(a=Invalid("refused", {"reason": reason})).router(*order)


def test_a_daemon_of_another_table_is_refused() -> None:
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}))
    router = daemons.router(A)
    daemons.answers[A] = answer({"r0": 1, "r1": 1}, table="other")
    daemons.answers[B] = answer({}, table="other")
    with raises(MemWalError):
        router.describe({}, None)


def test_a_table_that_was_resized_meanwhile_is_told_at_the_next_look() -> None:
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}), b=answer({}))
    router = daemons.router(A, B)
    daemons.answers[A] = answer({"r0": 5, "r1": 5, "r2": 5}, routing_version=2)
    with pytest.raises(Unavailable) as told:
        router.learn(router.rounds)
    assert told.value.details == {"reason": "resized", "routing": 2}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every call count as long at once."""
    monkeypatch.setattr(standstill, "LOOK_AFTER", 0.01)
    monkeypatch.setattr(standstill, "LOOK_EVERY", 0.01)


@pytest.mark.usefixtures("impatient")
def test_a_call_is_given_up_when_its_regions_have_another_owner_and_not_before() -> None:
    daemons = Daemons(a=answer({"r0": 1}), b=answer({"r1": 1}))
    router = daemons.router()
    router.learn(router.rounds)
    released, looked = threading.Event(), threading.Event()

    def stands_still() -> str:
        daemons.answers[A] = None
        looked.wait(60)  # the call must not be abandoned while no other daemon owns its regions
        daemons.answers[B] = answer({"r0": 2, "r1": 1})
        released.wait(60)
        return "late"

    def counted() -> dict[str, Any]:
        if len(daemons.asked) > 8:
            looked.set()
        return answer({"r1": 1})

    daemons.answers[B] = counted
    calls = [Call(router.connection(A), ["r0"], stands_still), Call(router.connection(B), ["r1"], lambda: "here")]
    given_up, answered = router.answers(calls)
    released.set()
    assert isinstance(given_up, UnknownOutcome)
    assert given_up.details["reason"] == "moved"
    assert answered == "here"
    assert router.owners(IDS) == {B: IDS}


@pytest.mark.usefixtures("impatient")
def test_a_daemon_that_lives_may_say_what_became_of_a_call_when_its_region_has_moved() -> None:
    daemons = Daemons(a=answer({"r0": 1, "r1": 1}), b=answer({"r0": 2}))
    router = daemons.router()
    asked = threading.Event()

    def slow() -> str:
        asked.wait(60)
        return "done before it let the region go"

    def moved() -> dict[str, Any]:
        asked.set()
        return answer({"r0": 2})

    daemons.answers[B] = moved
    assert router.answers([Call(router.connection(A), IDS, slow)], grace=60.0) == ["done before it let the region go"]


def test_a_description_that_comes_late_is_dropped() -> None:
    """Otherwise the client would have the regions of one daemon and the routing of another."""
    described, answered = threading.Event(), threading.Event()
    wide = {f"r{number}": 1 for number in range(4)}

    def late() -> dict[str, Any]:
        described.wait(60)
        answered.set()
        return answer(wide, routing_version=3, ids=[*wide])

    router = Daemons(a=answer({"r0": 2, "r1": 2}, routing_version=2), b=late).router(A, B)
    described.set()
    assert answered.wait(60)
    router._pool.shutdown(wait=True)  # the call has ended
    assert (router.routing, router.regions) == (2, tuple(IDS))


def test_a_daemon_that_has_not_met_the_resize_yet_is_not_followed_back() -> None:
    wide = {f"r{number}": 1 for number in range(4)}
    daemons = Daemons(a=answer({"r0": 2, "r1": 2}, routing_version=2), b=None)
    router = daemons.router(A, B)
    daemons.answers |= {A: None, B: answer(wide, ids=[*wide])}
    with raises(Unavailable):
        router.describe({}, None)
    assert (router.routing, router.regions) == (2, tuple(IDS))
    daemons.answers |= {A: answer({"r0": 2, "r1": 2}, routing_version=2)}
    assert router.describe({}, None)["routing_version"] == 2
