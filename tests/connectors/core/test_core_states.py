"""Every order of calls: three requests, six blocks, a host tier that comes and goes and misbehaves.

Answers and pulls come when they like, twice, late, from another life, or never. `Engine` checks the
core after every call and that each offer ends once. Here the host tier adds what only it can know:
no lease ends under a load or twice, none is kept, a pull is confirmed only while its blocks are
held, a block that failed is not asked for; and when all fall silent every question has its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kvbm_common.identity import unpack_hashes
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.local import Confirm, Found, Lookup, Release
from kvbm_connectors.core.messages import Effect, Hit, Load, ToHost

from tests.connectors.helpers import ANSWER_MS, LEASE_MS, LIMITS, Engine, answer, numbers

T = TypeVar("T")
REQUESTS = st.sampled_from(["r", "s", "t"])
BLOCKS = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True)
BAD = st.lists(st.integers(0, 3), max_size=2)


class Outside(Engine):
    """The host tier's side of every message."""

    def __init__(self) -> None:
        self.asked_now: list[Lookup] = []
        self.leased: set[int] = set()
        """Leases of this life of the host tier that have not come back."""
        self.loads: list[Load] = []
        self.avoided: dict[int, int] = {}
        self.asking = ""
        self.asked_by: dict[int, str] = {}
        """Lookup → its request, for the last lookup of each."""
        self.known: dict[str, int] = {}
        """Request → the lease of its answer, until it is taken."""
        super().__init__(attach=False)

    def look_up(
        self, *wanted: int, request: str = "r", groups: Sequence[GroupRun] = ()
    ) -> Hit | None:
        self.asking = request
        return super().look_up(*wanted, request=request, groups=groups)

    def take(self, *blocks: int, request: str = "r") -> Load:
        self.known.pop(request, None)
        return super().take(*blocks, request=request)

    def took(self, effects: Sequence[Effect]) -> list[Effect]:
        for effect in effects:
            match effect:
                case ToHost(Lookup() as lookup):
                    self.asked_now.append(lookup)
                    self.asked_by = {k: r for k, r in self.asked_by.items() if r != self.asking}
                    self.asked_by[lookup.lookup] = self.asking
                    self.known.pop(self.asking, None)
                    for number in numbers(unpack_hashes(lookup.hashes)):
                        assert self.avoided.get(number, 0) <= self.now_ms, "it had failed"
                case ToHost(Release(lease=lease)):
                    assert lease not in {load.lease for load in self.loads}, "it is being read"
                    self.leased.remove(lease)  # KeyError: given back twice.
                case ToHost(Confirm(offer=offer, held=held)):
                    assert held == (offer in self.held)
                case _:
                    pass
        return super().took(effects)

    def grant(self, found: Found) -> None:
        """The answer arrives, though maybe at somebody who takes the host tier for gone."""
        if found.lease and self.core.view.epoch:
            self.leased.add(found.lease)
            request = self.asked_by.get(found.lookup)
            if request is not None and found.lease not in {load.lease for load in self.loads}:
                self.known[request] = found.lease
        self.hear(found)

    def drop(self, request: str) -> None:
        """What is given up while the host tier is gone ends there by its deadline."""
        if not self.core.view.epoch:
            self.leased.discard(self.known.get(request, 0))


class Everything(RuleBasedStateMachine):
    """What may happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Outside()
        self.life = 10
        self.leases = 1_000
        self.answered: list[Found] = []
        self.offers: list[int] = []
        self.wanted: dict[str, list[int]] = {}
        """What each request asked for last."""
        self.hits: dict[str, Hit] = {}
        """What each request was told last, as long as it may take it."""

    def one_of(self, data: st.DataObject, entries: list[T], *, keep: bool = False) -> T:
        index = data.draw(st.integers(0, len(entries) - 1))
        return entries[index] if keep else entries.pop(index)

    # --- the host tier ----------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.host_tier_does("restart")

    @rule(what=st.sampled_from(["restart", "welcome", "welcome", "welcome", "silence"]))
    def host_tier_does(self, what: str) -> None:
        """What happens now and then: one rule, so that it does not crowd out the rest."""
        match what:
            case "restart":
                self.life += 1
                self.engine.leased.clear()  # Its arena is empty.
                self.engine.avoided.clear()
                self.engine.attached(self.life)
            case "welcome":
                self.engine.attached(self.life)
            case _:
                self.engine.detached()

    @precondition(lambda self: self.engine.asked_now)
    @rule(data=st.data(), count=st.integers(0, 5), old=st.sampled_from([False, False, False, True]))
    def answer(self, data: st.DataObject, count: int, old: bool) -> None:
        """More blocks than were asked for are malformed; a former life's answer comes late."""
        lookup = self.one_of(data, self.engine.asked_now)
        self.leases += 1
        found = answer(
            lookup.lookup, count, lease=self.leases if count else 0, epoch=self.life - old
        )
        if old:
            self.engine.hear(found)  # What it leased ended with that life.
            return
        self.answered.append(found)
        self.engine.grant(found)

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def answer_again(self, data: st.DataObject) -> None:
        """Nobody should. What it leased may have come back: then it is leased anew."""
        found = self.one_of(data, self.answered, keep=True)
        if found.epoch == self.life:
            self.engine.grant(found)

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), confirm=st.booleans(), keep=st.booleans())
    def pull(self, data: st.DataObject, confirm: bool, keep: bool) -> None:
        self.engine.pulled(self.one_of(data, self.offers, keep=keep), confirm=confirm)

    # --- the engine -------------------------------------------------------------------------

    @rule(request=REQUESTS, blocks=BLOCKS)
    def find(self, request: str, blocks: list[int]) -> None:
        """The usual case: a question, and its answer soon."""
        self.look_up(request, blocks)
        if not self.engine.asked_now or not self.engine.core.view.epoch:
            return
        lookup = self.engine.asked_now.pop()
        self.leases += 1
        count = len(lookup.hashes) // 16
        self.answered.append(answer(lookup.lookup, count, lease=self.leases, epoch=self.life))
        self.engine.grant(self.answered[-1])
        self.look_up(request, blocks)

    @rule(request=REQUESTS, blocks=BLOCKS)
    def look_up(self, request: str, blocks: list[int]) -> None:
        self.hits.pop(request, None)
        self.engine.drop(request)
        self.wanted[request] = blocks
        hit = self.engine.look_up(*blocks, request=request)
        if hit is None:
            assert self.engine.core.view.epoch, "nobody will answer"
        elif hit.blocks:
            assert hit.blocks <= len(blocks)
            self.hits[request] = hit

    @precondition(lambda self: self.hits)
    @rule(data=st.data(), fewer=st.integers(0, 2))
    def take(self, data: st.DataObject, fewer: int) -> None:
        """At any time after the hit, whatever has become of the host tier."""
        request = self.one_of(data, list(self.hits))
        count = max(1, self.hits.pop(request).blocks - fewer)
        if any(load.request == request for load in self.engine.loads):
            return  # An engine loads a request once at a time.
        self.engine.loads.append(self.engine.take(*range(count), request=request))

    @precondition(lambda self: self.engine.loads)
    @rule(data=st.data(), bad=BAD)
    def end_load(self, data: st.DataObject, bad: list[int]) -> None:
        engine = self.engine
        load = self.one_of(data, engine.loads)
        bad = [index for index in bad if index < len(load.blocks)]
        if load.epoch == engine.core.view.epoch:
            for name in numbers(load.hashes[index] for index in bad):
                engine.avoided[name] = engine.now_ms + LIMITS.avoid_ms
        else:
            engine.leased.discard(load.lease)  # It ends by its deadline: nobody can be told.
        engine.load_ended(load, *bad)

    @rule(request=REQUESTS)
    def forget(self, request: str) -> None:
        self.hits.pop(request, None)
        self.engine.drop(request)
        self.engine.forget(request)

    @rule(blocks=BLOCKS)
    def offer(self, blocks: list[int]) -> None:
        offer = self.engine.offer(*blocks)
        assert (offer is None) == (
            not self.engine.core.view.epoch or len(self.engine.held - {offer}) >= LIMITS.offers_max
        )
        if offer is not None:
            self.offers.append(offer)

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        self.engine.revoke(self.one_of(data, self.offers, keep=True))

    @rule(ms=st.sampled_from([1, 40, ANSWER_MS, LIMITS.offer_deadline_ms, LEASE_MS]))
    def wait(self, ms: int) -> None:
        self.engine.wait(ms)

    # --- the end ----------------------------------------------------------------------------

    def teardown(self) -> None:
        """1. Nobody answers any more: offers end, questions are answered, loads fail.

        2. All requests leave: the host tier has all leases back but those it could not be told of.
        """
        engine = self.engine
        engine.wait(LIMITS.offer_deadline_ms)
        assert not engine.held
        engine.wait(LEASE_MS)
        while engine.loads:
            load = engine.loads.pop()
            if load.epoch != engine.core.view.epoch:
                engine.leased.discard(load.lease)
            engine.load_ended(load)
        for request, blocks in self.wanted.items():
            engine.drop(request)
            sent = len(engine.asked_now)
            hit = engine.look_up(*blocks, request=request)
            assert hit is not None or len(engine.asked_now) > sent, "an old question is still open"
        for request in ("r", "s", "t"):
            engine.drop(request)
            engine.forget(request)
        assert engine.idle()
        assert not engine.leased


Everything.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestEverything = Everything.TestCase
