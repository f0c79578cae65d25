"""The scheduler half on real ZMQ: lookups, offers, and services that come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_common.identity import pack_hashes
from kvbm_common.tier.machine import InvalidTransition
from kvbm_common.wire.consolidator import Attach, Detach, FromConsolidator, Offered, ToConsolidator
from kvbm_common.wire.local import (
    Bye,
    Confirm,
    FromHostTier,
    Hello,
    Lookup,
    Pulled,
    Refused,
    Release,
    ToHostTier,
)
from kvbm_common.wire.session_hint import SessionHint
from kvbm_connectors.client import link as links
from kvbm_connectors.client.scheduler import SchedulerHalf, new_incarnation
from kvbm_connectors.core.lookups import Lookups
from kvbm_connectors.core.messages import (
    ConnectorMisuse,
    Hit,
    LoadResult,
    OfferEnded,
    OfferRun,
)
from kvbm_connectors.core.offers import Offers
from kvbm_connectors.core.outbox import Outbox

from tests.connectors.endpoints import (
    Endpoint,
    attached,
    consolidator,
    host_tier,
    welcome,
)
from tests.connectors.helpers import EPOCH, INCARNATION, LIMITS, NAMESPACE, answer, name
from tests.waiting import wait_for

Host = Endpoint[ToHostTier, FromHostTier]
Consolidator = Endpoint[ToConsolidator, FromConsolidator]
NAMES = [name(1), name(2)]
RUN = OfferRun(name(0), tuple(NAMES), (1, 2))


class Half(SchedulerHalf):
    """A scheduler half of engine `ada`, with a bell."""

    def __init__(self, directory: Path, *, ranks: int = 1) -> None:
        self.news = threading.Semaphore(0)
        self.host_endpoint = f"ipc://{directory}/host.sock"
        self.consolidator_endpoint = f"ipc://{directory}/consolidator.sock"
        super().__init__(
            engine="ada",
            incarnation=INCARNATION,
            namespace=NAMESPACE,
            host_tier_endpoint=self.host_endpoint,
            consolidator_endpoint=self.consolidator_endpoint,
            streams=[
                Attach(engine="ada", incarnation=INCARNATION, endpoint="", rank=rank,
                       namespace=NAMESPACE)
                for rank in range(ranks)
            ],
            limits=LIMITS,
            on_news=self.news.release,
        )  # fmt: skip

    def hit(self) -> Hit:
        """Ask until there is an answer."""
        hits: list[Hit] = []

        def answered() -> bool:
            hit = self.lookup("r", NAMES)
            hits.extend([hit] if hit is not None else [])
            return hit is not None

        wait_for(answered)
        return hits[0]


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Half]:
    half = Half(tmp_path)
    half.start()
    yield half
    half.close()


@pytest.fixture
def host(half: Half) -> Iterator[Host]:
    """An attached host tier."""
    with host_tier(half.host_endpoint) as host:
        host.hear(Hello)
        host.say(welcome(EPOCH))
        wait_for(lambda: half.attached)
        yield host


@pytest.fixture
def events(half: Half) -> Iterator[Consolidator]:
    """An attached consolidator."""
    with consolidator(half.consolidator_endpoint) as events:
        events.hear(Attach)
        events.say(attached())
        wait_for(lambda: half.streams_attached)
        yield events


def test_a_lookup_is_answered_taken_and_released(half: Half, host: Host) -> None:
    assert half.lookup("r", NAMES) is None
    host.say(answer(host.hear(Lookup).lookup, 2, lease=55))
    assert half.hit() == Hit(2, host=2)
    load = half.take("r", [8, 9])
    assert not half.idle()
    half.load_ended(LoadResult(load, (True, True)))
    assert host.hear(Release).lease == 55
    assert half.idle()
    assert half.counts()["loads"] == 1


def test_a_hint_goes_to_a_host_tier_that_takes_hints_alone(half: Half, host: Host) -> None:
    """An older one would refuse the message: it is counted instead."""
    half.hint("s", "pin", NAMES, ttl_ms=60_000)
    assert half.counts()["hints_passed_through"] == 1
    host.say(welcome(EPOCH, hints=True))
    wait_for(lambda: half.welcome is not None and half.welcome.hints)
    half.hint("s", "pin", NAMES, ttl_ms=60_000)
    hint = host.hear(SessionHint)
    assert (hint.session, hint.action, hint.hashes) == ("s", "pin", pack_hashes(NAMES))
    assert half.counts()["hints_sent.pin"] == 1


def test_a_request_that_is_aborted_gives_its_lease_back(half: Half, host: Host) -> None:
    half.lookup("r", NAMES)
    host.say(answer(host.hear(Lookup).lookup, 2, lease=55))
    half.hit()
    half.forget("r")
    assert host.hear(Release).lease == 55


def test_an_offer_is_pulled_confirmed_and_ended(
    half: Half, host: Host, events: Consolidator
) -> None:
    offer = half.offer([RUN], priority=2)
    assert offer is not None
    assert events.hear(Offered).offer == offer
    host.say(Pulled(offer=offer, pulled=2, skipped=0))
    confirm = host.hear(Confirm)
    assert (confirm.offer, confirm.held) == (offer, True)
    assert half.drain_ended() == [OfferEnded(offer, 2, complete=True)]
    assert half.drain_ended() == []


def test_offers_that_may_wait_leave_in_their_order(
    half: Half, host: Host, events: Consolidator
) -> None:
    """1. Alone, within 100 ms. 2. Before one that leaves at once."""
    first = half.offer([RUN], hurry=False)
    assert events.hear(Offered).offer == first
    others = [half.offer([RUN], hurry=False), half.offer([RUN])]
    assert [events.hear(Offered).offer for _ in others] == others


def test_a_revoked_offer_is_not_confirmed(half: Half, host: Host, events: Consolidator) -> None:
    offer = half.offer([RUN])
    assert offer is not None
    half.revoke(offer)
    assert half.drain_ended() == [OfferEnded(offer, 0)]
    host.say(Pulled(offer=offer, pulled=2, skipped=0))
    assert not host.hear(Confirm).held


def test_an_offer_that_nobody_answers_ends_by_its_deadline(
    half: Half, host: Host, events: Consolidator
) -> None:
    """Nobody calls: the link thread's clock ends it, and rings."""
    offer = half.offer([RUN])
    assert offer is not None
    while not (ended := half.drain_ended()):
        assert half.news.acquire(timeout=10)
    assert ended == [OfferEnded(offer, 0)]
    assert half.counts()["offers_ended.deadline"] == 1


@pytest.mark.slow
def test_without_a_consolidator_the_engine_keeps_no_block_for_an_offer(
    half: Half, host: Host
) -> None:
    """1. It has not come yet. 2. It is there. 3. It falls silent: offers are not made any more."""
    assert half.offer([RUN]) is None
    assert not half.streams_attached
    with consolidator(half.consolidator_endpoint) as events:
        events.hear(Attach)
        events.say(attached())
        wait_for(lambda: half.streams_attached)
        assert half.offer([RUN]) is not None
        events.hear(Offered)
        wait_for(lambda: not half.streams_attached)  # No beat is answered.
        assert half.offer([RUN]) is None
        assert half.counts()["offers_passed_through"] == 4


@pytest.mark.slow
def test_a_refusal_reaches_every_life_of_the_consolidator(half: Half) -> None:
    """Goal: a worker says once that it loads nothing; a consolidator that starts again hears why.

    The first life hears it from an attached engine, the second one with the greeting, and another
    one that is told before the answer to that.
    """
    reason = "layers of another shape"
    with consolidator(half.consolidator_endpoint) as events:
        events.hear(Attach)
        events.say(attached())
        wait_for(lambda: half.streams_attached)
        half.describe(passes_through=reason)
        assert events.hear(Attach).passes_through == reason
        wait_for(lambda: not half.streams_attached)  # No beat is answered.
    with consolidator(half.consolidator_endpoint) as events:
        assert events.hear(Attach).passes_through == reason
        half.describe(passes_through="another")
        events.say(attached())
        assert events.hear(Attach).passes_through == "another"


def test_while_nats_is_away_nothing_is_offered(
    half: Half, host: Host, events: Consolidator
) -> None:
    """1. An offer that could not be passed on is refused: its blocks are free at once.

    2. The consolidator says that it passes none on: offers are not made. 3. NATS is back.
    """
    offer = half.offer([RUN])
    events.hear(Offered)
    events.say(Refused(about="offered", code="offer_not_passed", message="", offer=offer))
    wait_for(lambda: not half.idle() and half.drain_ended() == [OfferEnded(offer or 0, 0)])
    assert half.counts()["offers_ended.refused"] == 1
    events.say(attached(offers=False))
    wait_for(lambda: not half.streams_attached)
    assert half.offer([RUN]) is None
    events.say(attached())
    wait_for(lambda: half.streams_attached)
    assert half.offer([RUN]) is not None


def test_a_consolidator_that_has_forgotten_us_frees_the_offer(
    half: Half, host: Host, events: Consolidator
) -> None:
    """Refused as `unknown_engine`: the link is down, and the blocks are free all the same."""
    offer = half.offer([RUN])
    events.hear(Offered)
    events.say(Refused(about="offered", code="unknown_engine", message="", offer=offer))
    wait_for(lambda: not half.idle() and half.drain_ended() == [OfferEnded(offer or 0, 0)])
    wait_for(lambda: half.offer([RUN]) is None)


def test_the_streams_of_all_ranks_are_attached(tmp_path: Path) -> None:
    """Offers of all ranks go through the link of the first."""
    half = Half(tmp_path, ranks=2)
    half.start()
    with consolidator(half.consolidator_endpoint) as events:
        for _ in range(2):
            rank = events.hear(Attach).rank
            assert not half.streams_attached
            events.say(attached(rank))
        wait_for(lambda: half.streams_attached)
        half.close()
        assert events.hear(Detach).engine == "ada"


@pytest.mark.slow
def test_a_host_tier_that_dies_and_lives_again(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A hit. 2. Silence: lookups pass through, the hit is taken and its load means nothing.

    3. Another life: attached under its epoch, and asked again.
    """
    monkeypatch.setattr(links, "BEAT_MS", 50)
    with host_tier(half.host_endpoint) as host:
        host.hear(Hello)
        host.say(welcome(EPOCH))
        wait_for(lambda: half.attached)
        half.lookup("r", NAMES)
        host.say(answer(host.hear(Lookup).lookup, 2, lease=55))
        half.hit()
    wait_for(lambda: not half.attached)
    assert half.lookup("s", NAMES) == Hit(0, reason="no_host_tier")
    load = half.take("r", [8, 9])
    assert load.epoch == EPOCH
    half.load_ended(LoadResult(load, (False, False), reason="arena_changed"))
    with host_tier(half.host_endpoint) as host:
        host.welcome(Hello, welcome(EPOCH + 1), lambda: half.epoch == EPOCH + 1)
        assert half.lookup("r", NAMES) is None
        host.say(answer(host.hear(Lookup).lookup, 1, epoch=EPOCH + 1))
        assert half.hit() == Hit(1, host=1)


def test_the_end_is_announced(half: Half, host: Host) -> None:
    half.close()
    assert host.hear(Bye).incarnation == INCARNATION


def test_incarnations_differ() -> None:
    """Each names one life of an engine."""
    assert len({new_incarnation() for _ in range(100)}) == 100


@pytest.mark.slow
@pytest.mark.parametrize("part", [Lookups, Offers, Outbox])
def test_a_broken_invariant_costs_the_call_and_not_the_engine(
    half: Half, host: Host, events: Consolidator, monkeypatch: pytest.MonkeyPatch, part: type
) -> None:
    """Goal: the engine computes on. Method: a part of the core raises in every call."""

    def broken(*_: object, **__: object) -> None:
        raise InvalidTransition("lookup: no 'found' in LOST: lookup 1 of r: asked")

    called: dict[type, tuple[str, ...]] = {
        Lookups: ("lookup", "take", "load_ended", "forget"),
        Offers: ("offer", "revoke"),
        Outbox: ("ask", "release"),
    }
    for name_of_call in called[part]:
        monkeypatch.setattr(part, name_of_call, broken)
    hit = half.lookup("s", NAMES)
    offer = half.offer([RUN])
    half.revoke(1)
    half.forget("s")
    with pytest.raises(ConnectorMisuse):
        half.take("s", [1])
    faults = {key: count for key, count in half.counts().items() if key.startswith("core_faults")}
    if part is Lookups:
        assert hit == Hit(0, reason="core_fault")
        assert set(faults) == {f"core_faults.{one}" for one in ("lookup", "take", "forget")}
    elif part is Offers:
        assert offer is None
        assert set(faults) == {"core_faults.offer", "core_faults.revoke"}
    else:
        assert hit == Hit(0, reason="core_fault")
        assert faults == {"core_faults.lookup": 1}
