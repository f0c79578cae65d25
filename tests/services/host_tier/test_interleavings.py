"""Every order of events: two engines, one disk tier, five slots, eight blocks.

Pulls, fills and attaches end when they like, or never; engines and the disk tier come and go.
`Host` checks the core after every step, and that what is announced is what is there. Here the
outside world adds what only it can know: no slot that late bytes may still reach is given away,
every question is answered at most once, and when all have fallen silent nothing is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kvbm_common.eviction import POLICIES
from kvbm_common.wire.admin import PolicyRequest, RemoveRequest, ResizeReply, ResizeRequest
from kvbm_common.wire.local import Found, Pulled
from kvbm_common.wire.verbs import FILL_GRACE_MS, ErrorBody
from kvbm_host_tier.core.lower_snapshot import LowerSnapshot
from kvbm_host_tier.core.messages import (
    AdminAsked,
    Answer,
    AskFill,
    AttachPeer,
    DetachPeer,
    Effect,
    LowerTierEvent,
    LowerTierJoined,
    LowerTierLeft,
    LowerTierSnapshot,
    PeerAttached,
    PeerFailed,
    PullSettled,
    StartPull,
    ToEngine,
)

from tests.services.host_tier.helpers import Host, asked, hello, name, on_disk

T = TypeVar("T")
BLOCKS = st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True)
ENGINES = st.sampled_from(["ada", "bob"])
MS = st.integers(1, 120)
LOST_PULLS_MAX = 2


class Everything(RuleBasedStateMachine):
    """The outside world; what it does to the core is in `Host`."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(attach=False)
        self.lives = {"ada": 1, "bob": 1}
        self.attaching: list[AttachPeer] = []
        self.peers: set[str] = set()
        self.pulls: list[StartPull] = []
        self.fills: list[AskFill] = []
        self.lost: list[StartPull] = []
        """Failed pulls of which late bytes may still land."""
        self.loans: list[tuple[int, AskFill]] = []
        """(back at, fill) of fills that were not answered."""
        self.asked: dict[int, tuple[str, int]] = {}
        """Lookup → the engine and life that wait for its answer."""
        self.leases: list[tuple[str, int, int]] = []
        self.copies: list[int] = []
        self.unconfirmed: list[tuple[str, int, int]] = []
        self.last_lookup = 0

    @initialize(
        staging=st.booleans(), transfers_max=st.integers(1, 3), piece=st.sampled_from([1, 8_192])
    )
    def begin(self, staging: bool, transfers_max: int, piece: int) -> None:
        self.host = Host(
            slots=5, staging=staging, attach=False, transfers_max=transfers_max,
            batch_blocks_max=2, engine_lost_ms=300, confirm_ms=80, pull_deadline_ms=100,
            below_piece=piece,
        )  # fmt: skip
        self.attach("ada")
        self.attach("bob")
        self.disk_stored([1, 2, 3, 4])

    def take(self, effects: list[Effect]) -> None:
        """What the outside world makes of effects."""
        for effect in effects:
            match effect:
                case StartPull():
                    self.check_safe(effect.slots)
                    assert {part.peer for part in effect.parts} <= self.peers
                    self.pulls.append(effect)
                case AskFill():
                    self.check_safe(slot.slot for slot in effect.request.slots)
                    self.fills.append(effect)
                case AttachPeer():
                    self.attaching.append(effect)
                case DetachPeer(peer):
                    self.peers.remove(peer)
                case ToEngine(connection, Found() as found):
                    assert self.asked.pop(found.lookup) == sender(connection)
                    self.check_safe(found.slots)
                    gone = set(found.slots) - self.host.core.view.blocks().keys()
                    assert not gone, f"blocks in {gone} were discarded, and are served"
                    self.leases.append((*sender(connection), found.lease))
                case ToEngine(connection, Pulled(confirm=True) as pulled):
                    self.unconfirmed.append((*sender(connection), pulled.offer))
                case _:
                    pass

    def check_safe(self, slots: Iterable[int]) -> None:
        """No transfer that may still write has one of these slots."""
        fills = (*self.fills, *(fill for _, fill in self.loans))
        written = {slot for pull in (*self.pulls, *self.lost) for slot in pull.slots}
        written |= {slot.slot for fill in fills for slot in fill.request.slots}
        assert not written & set(slots), f"late bytes may reach {written & set(slots)}"

    @staticmethod
    def one_of(data: st.DataObject, entries: list[T]) -> T:
        return entries.pop(data.draw(st.integers(0, len(entries) - 1)))

    # --- engines ----------------------------------------------------------------------------

    @rule(engine=ENGINES, what=st.sampled_from(["greet", "move", "restart", "bye", "beat"]))
    def engine_does(self, engine: str, what: str) -> None:
        """What happens now and then: one rule, so that it does not crowd out the rest."""
        life = self.lives[engine]
        match what:
            case "greet":
                self.take(self.host.greet(hello(engine=engine, life=life)))
            case "move":
                self.take(self.host.greet(hello(engine=engine, life=life, agent=b"moved")))
            case "restart":
                self.lives[engine] += 1
            case "bye":
                self.take(self.host.bye(engine=engine, life=life))
            case _:
                self.take(self.host.beat(engine=engine, life=life))

    @precondition(lambda self: self.attaching)
    @rule(data=st.data(), refused=st.sampled_from([False, False, False, True]))
    def end_attach(self, data: st.DataObject, refused: bool) -> None:
        attach = self.one_of(data, self.attaching)
        if refused:
            self.take(self.host.step(PeerFailed(attach.engine, attach.rank, "refused")))
        else:
            self.attached(attach)

    @rule(engine=ENGINES)
    def attach(self, engine: str) -> None:
        """The usual case: both halves say hello, and NIXL is quick."""
        life = self.lives[engine]
        self.take(self.host.greet(hello(engine=engine, life=life)))
        while self.attaching:
            self.attached(self.attaching.pop())
        self.take(self.host.greet(hello(engine=engine, life=life, role="scheduler")))

    def attached(self, attach: AttachPeer) -> None:
        peer = f"{attach.engine}-{attach.rank}"
        self.peers.add(peer)
        self.take(self.host.step(PeerAttached(attach.engine, attach.rank, peer)))

    # --- offload ----------------------------------------------------------------------------

    @rule(engine=ENGINES, blocks=BLOCKS, deadline_ms=MS)
    def offer(self, engine: str, blocks: list[int], deadline_ms: int) -> None:
        life = self.lives[engine]
        self.take(self.host.offer(*blocks, engine=engine, life=life, deadline_ms=deadline_ms))

    @precondition(lambda self: self.pulls)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["done", "done", "failed", "lost"]),
        reason=st.sampled_from(["transfer_timeout", "peer_lost"]),
    )
    def end_pull(self, data: st.DataObject, outcome: str, reason: str) -> None:
        pull = self.one_of(data, self.pulls)
        if outcome == "done":
            self.take(self.host.pulled(pull))
            return
        lost = outcome == "lost" and len(self.lost) < LOST_PULLS_MAX
        if lost:
            self.lost.append(pull)
        self.take(self.host.pull_failed(pull, settled=not lost, reason=reason))

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.take(self.host.step(PullSettled(self.one_of(data, self.lost).pull)))

    @precondition(lambda self: self.unconfirmed)
    @rule(data=st.data(), held=st.sampled_from([True, True, False]))
    def confirm(self, data: st.DataObject, held: bool) -> None:
        engine, life, offer = self.one_of(data, self.unconfirmed)
        self.take(self.host.confirm(offer, held=held, engine=engine, life=life))

    # --- onboard ----------------------------------------------------------------------------

    @rule(engine=ENGINES, blocks=BLOCKS, deadline_ms=MS)
    def look_up(self, engine: str, blocks: list[int], deadline_ms: int) -> None:
        self.last_lookup += 1
        life = self.lives[engine]
        self.asked[self.last_lookup] = (engine, life)
        self.take(
            self.host.look_up(
                *blocks, engine=engine, life=life, lookup=self.last_lookup, lease_ms=200,
                deadline_ms=deadline_ms,
            )
        )  # fmt: skip

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), corrupt=st.lists(st.integers(0, 4), max_size=1), thief=st.booleans())
    def release(self, data: st.DataObject, corrupt: list[int], thief: bool) -> None:
        engine, life, lease = self.one_of(data, self.leases)
        if thief:
            other = "bob" if engine == "ada" else "ada"
            self.host.release(lease, engine=other, life=self.lives[other])
        self.host.release(lease, *corrupt, engine=engine, life=life)

    # --- the disk tier ----------------------------------------------------------------------

    @rule(blocks=BLOCKS)
    def disk_stored(self, blocks: list[int]) -> None:
        self.host.disk_stored(*blocks)

    @rule(blocks=BLOCKS, what=st.sampled_from(["removed", "seen", "stopped", "restarted", "lost"]))
    def disk_does(self, blocks: list[int], what: str) -> None:
        match what:
            case "removed":
                self.host.disk_removed(*blocks)
            case "seen":
                self.take(self.host.step(LowerTierJoined("0")))
                reply = self.host.disk.snapshot([on_disk(number) for number in blocks])
                self.host.step(
                    LowerTierSnapshot("0", LowerSnapshot.of(reply) if len(blocks) > 1 else None)
                )
            case "stopped":
                self.host.step(LowerTierEvent("0", self.host.disk.cleared("stop")))
            case "restarted":
                # What its old life was reading ended with it.
                self.loans.clear()
                self.host.disk_restarts()
            case _:
                self.host.step(LowerTierLeft("0"))

    @precondition(lambda self: self.fills)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["all", "some", "settled", "lent"]),
        reason=st.sampled_from(["gone", "corrupt", "busy"]),
    )
    def end_fill(self, data: st.DataObject, outcome: str, reason: str) -> None:
        fill = self.one_of(data, self.fills)
        match outcome:
            case "all":
                self.take(self.host.filled(fill))
            case "some":
                self.take(self.host.filled(fill, *asked(fill)[1:], reason=reason))
            case "settled":
                self.take(self.host.fill_failed(fill))
            case _:
                self.lend(fill)

    def lend(self, fill: AskFill) -> None:
        back_ms = max(self.host.now_ms, fill.request.until_ms) + FILL_GRACE_MS
        self.loans.append((back_ms, fill))
        self.take(self.host.fill_failed(fill, settled=False))

    @rule(blocks=BLOCKS, lease_ms=MS)
    def copy(self, blocks: list[int], lease_ms: int) -> None:
        reply = self.host.lease(*blocks, lease_ms=lease_ms)
        self.check_safe(slot.slot for slot in reply.slots)
        self.copies.append(reply.lease)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        self.host.copied(self.one_of(data, self.copies))

    # --- operators --------------------------------------------------------------------------

    @rule(slots=st.integers(1, 6))
    def resize(self, slots: int) -> None:
        """No slot with a reader goes, and what is asked for is reached where none stands in it."""
        before = self.host.slots
        effects = self.host.step(AdminAsked(0, "resize", ResizeRequest(slots=slots)))
        [answer] = [one for one in effects if isinstance(one, Answer)]
        if slots > 5 or not isinstance(answer.reply, ResizeReply):
            assert isinstance(answer.reply, ErrorBody)
            assert self.host.slots == before
            return
        busy = before["active"] + before["staged"]
        assert answer.reply.slots >= max(slots, busy)
        if not self.host.core.view.is_staging:  # There, only what is on disk may go.
            assert answer.reply.slots == max(slots, busy)
        self.take(effects)

    @rule(blocks=BLOCKS, verb=st.sampled_from(["evict", "reset"]))
    def remove(self, blocks: list[int], verb: str) -> None:
        """A block that was reset is found by no lookup, also by none that waits."""
        request = RemoveRequest(hashes=[name(number).hex() for number in blocks])
        self.take(self.host.step(AdminAsked(0, verb, request)))
        assert verb == "evict" or not self.host.announced & set(blocks)

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def use_policy(self, policy: str) -> None:
        announced = set(self.host.announced)
        self.take(self.host.step(AdminAsked(0, "policy", PolicyRequest(policy=policy))))
        assert self.host.announced == announced

    # --- time -------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([0, 1, 10, 50, 100]))
    def wait(self, ms: int) -> None:
        for engine in self.lives:
            self.take(self.host.beat(engine=engine, life=self.lives[engine]))
        self.be_silent(ms)

    @rule(ms=st.sampled_from([301, FILL_GRACE_MS]))
    def be_silent(self, ms: int) -> None:
        now_ms = self.host.now_ms + ms
        self.loans = [loan for loan in self.loans if loan[0] > now_ms]
        self.take(self.host.wait(ms))

    def teardown(self) -> None:
        """Every transfer ends, everybody falls silent: nothing is leased, staged or attached."""
        while self.attaching:
            self.attached(self.attaching.pop())
        while self.pulls:
            self.take(self.host.pull_failed(self.pulls.pop()))
        while self.fills:
            self.lend(self.fills.pop())
        for _ in range(2):
            self.be_silent(2 * FILL_GRACE_MS)
        assert not self.peers
        statistics, lost = self.host.core.view.statistics(self.host.now_ms), set[int]()
        lost.update(slot for pull in self.lost for slot in pull.slots)
        assert statistics.leases == statistics.slots["active"] == 0
        assert self.host.figure("offers") == self.host.figure("lookups_waiting") == 0
        assert statistics.slots["staged"] == self.host.figure("slots_unsettled") == len(lost)
        assert not lost & self.host.core.view.blocks().keys()


def sender(connection: bytes) -> tuple[str, int]:
    """The engine and life behind a connection."""
    engine, life = connection.decode().split("/")[0].split(":")
    return engine, int(life)


Everything.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestEverything = Everything.TestCase
