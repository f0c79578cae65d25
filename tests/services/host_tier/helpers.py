"""A host tier's core with an engine, a disk tier and a clock around it. Blocks are small integers.

`Host` is the outside world: it feeds the core, checks every invariant after each step, and checks
that what the core announces is numbered without a hole and never contradicts itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvbm_common.checksum import pack_sums
from kvbm_common.identity import Namespace, SequenceHash, hash_from_hex, pack_hashes
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.tier.slots import Block
from kvbm_common.wire.admin import BlockReply, BlockRequest, DrainReply, DrainRequest
from kvbm_common.wire.events import Cleared, Event, Removed, Stored
from kvbm_common.wire.local import (
    Beat,
    Bye,
    Confirm,
    Found,
    Hello,
    Lookup,
    Pulled,
    Refused,
    Region,
    Release,
    ToHostTier,
    Welcome,
)
from kvbm_common.wire.slot_entries import FilledSlot
from kvbm_common.wire.verbs import (
    ErrorBody,
    FillReply,
    LeaseReply,
    LeaseRequest,
    Offer,
    OfferRun,
    ReleaseReply,
    ReleaseRequest,
)
from kvbm_host_tier.core.core import HostTierCore
from kvbm_host_tier.core.limits import HostTierLimits
from kvbm_host_tier.core.messages import (
    AdminAsked,
    Answer,
    ArenaInfo,
    AskFill,
    AttachPeer,
    Effect,
    EngineId,
    FillDone,
    FillFailed,
    FromEngine,
    Input,
    LeaseAsked,
    LowerTierEvent,
    OfferReceived,
    PeerAttached,
    Publish,
    PullDone,
    PullFailed,
    ReleaseAsked,
    StartPull,
    Tick,
    ToEngine,
)

NAMESPACE = Namespace(model="test", block_tokens=4)
DIGEST = NAMESPACE.digest.hex()
EPOCH = 7
BLOCK_BYTES = 64
SLOT_BYTES = 4096
DEVICE_BLOCKS = 100
LEASE_MS = 1_000
LOOKUP_MS = 100
OFFER_MS = 500

E = TypeVar("E")


def name(number: int) -> SequenceHash:
    """Block 7 is called 0…07."""
    return SequenceHash(number.to_bytes(16, "big"))


def numbers(texts: Iterable[str]) -> list[int]:
    """Hex names back to numbers."""
    return [int(text, 16) for text in texts]


def checksum(number: int) -> int:
    """What the right bytes of a block sum up to."""
    return number * 1_000 + 1


def part_sums(number: int, part_count: int) -> tuple[int, ...]:
    """What the right bytes of a block's parts sum up to."""
    return (
        (checksum(number),)
        if part_count == 1
        else tuple(checksum(number) + 10 * rank for rank in range(part_count))
    )


def incarnation(life: int) -> str:
    """16 hex digits."""
    return f"{life:016x}"


def hello(
    *,
    engine: str = "ada",
    life: int = 1,
    role: Any = "worker",
    rank: int = 0,
    world_size: int = 1,
    piece_bytes: int = BLOCK_BYTES,
    namespace: Namespace = NAMESPACE,
    group_namespaces: Sequence[Namespace] = (),
    agent: bytes = b"agent",
) -> Hello:
    """How a half introduces itself."""
    region = Region(address=4096, stride=piece_bytes, piece_bytes=piece_bytes, blocks=DEVICE_BLOCKS)
    return Hello(
        engine=engine,
        incarnation=incarnation(life),
        role=role,
        namespace=namespace,
        group_namespaces=list(group_namespaces),
        rank=rank,
        world_size=world_size,
        agent=agent if role == "worker" else b"",
        regions=[region] if role == "worker" else [],
    )


def connection(half: Hello) -> bytes:
    """Where answers to a half go: `ada:1/scheduler`, `ada:1/0` in life 1."""
    where = "scheduler" if half.role == "scheduler" else str(half.rank)
    return f"{half.engine}:{int(half.incarnation, 16)}/{where}".encode()


class Host:
    """The core, the clock, and everybody who talks to it."""

    def __init__(
        self, *, slots: int = 4, staging: bool = False, attach: bool = True, host: str = "h",
        **limits: Any,
    ) -> None:  # fmt: skip
        self.core = HostTierCore(
            host=host,
            instance="0",
            epoch=EPOCH,
            arena=ArenaInfo("/arena", 4096, slots * SLOT_BYTES, b"arena"),
            limits=HostTierLimits(**limits),
            staging=staging,
        )
        self.now_ms = 1_000
        self.events: list[Event] = []
        self.announced: set[int] = set()
        """What a reader of the events believes."""
        self.disk = Announcer(host="h", source="disk-tier-0", tier="disk", epoch=1)
        self.objects = Announcer(host="h", source="object-tier-0", tier="object", epoch=1)
        self._ids = 0
        self.settles = True
        """Whether no other input waits behind a step."""
        self._take(self.core.start())
        if attach:
            self.attach()

    # --- driving ----------------------------------------------------------------------------

    def step(self, event: Input) -> list[Effect]:
        """One input, and what is settled after it; returns the effects but announcements."""
        effects = self._take(self.core.step(event, self.now_ms))
        self.core.check()
        if self.settles:
            effects += self._take(self.core.settle())
            self.core.check()
        parts = self.core.view.snapshot().parts
        there = {number for part in parts for run in part.runs for number in numbers(run.hashes)}
        assert self.announced == there, "the events say something else than the table"
        return effects

    def _take(self, effects: Sequence[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Publish):
                self._announced(effect.event)
        return [effect for effect in effects if not isinstance(effect, Publish)]

    def _announced(self, event: Event) -> None:
        self.events.append(event)
        assert (event.epoch, event.seq) == (EPOCH, len(self.events))
        match event:
            case Cleared():
                self.announced.clear()
            case Stored(runs=runs):
                stored = [number for run in runs for number in numbers(run.hashes)]
                assert not self.announced & set(stored), f"{stored} announced twice"
                self.announced.update(stored)
            case Removed(hashes=hashes):
                assert set(numbers(hashes)) <= self.announced, "what was not there cannot leave"
                self.announced.difference_update(numbers(hashes))

    def wait(self, ms: int) -> list[Effect]:
        """Let time pass, and the core notice."""
        self.now_ms += ms
        return self.step(Tick())

    def say(self, message: ToHostTier, *, half: str = "scheduler") -> list[Effect]:
        """A message of an engine."""
        connection = f"{message.engine}:{int(message.incarnation, 16)}/{half}".encode()
        return self.step(FromEngine(connection, message))

    def greet(self, half: Hello) -> list[Effect]:
        """A half introduces itself; NIXL is not asked yet."""
        return self.step(FromEngine(connection(half), half))

    def attach(
        self, *, engine: str = "ada", life: int = 1, world_size: int = 1,
        namespace: Namespace = NAMESPACE, group_namespaces: Sequence[Namespace] = (),
    ) -> None:  # fmt: skip
        """Every half of an engine says hello, and NIXL knows all of them."""
        half = partial(
            hello, engine=engine, life=life, world_size=world_size, namespace=namespace,
            group_namespaces=group_namespaces,
        )  # fmt: skip
        for rank in range(world_size):
            effects = self.greet(half(rank=rank))
            for effect in of(effects, AttachPeer):
                self.step(PeerAttached(effect.engine, rank, f"{engine}-{life}-{rank}"))
        greeting = half(role="scheduler")
        assert of(self.told(self.greet(greeting)), Welcome)

    @staticmethod
    def told(effects: Sequence[Effect]) -> list[object]:
        """What engines are told."""
        return [effect.message for effect in effects if isinstance(effect, ToEngine)]

    # --- offload ----------------------------------------------------------------------------

    def offer(
        self, *wanted: int, offer: int | None = None, engine: str = "ada", life: int = 1,
        deadline_ms: int = OFFER_MS, namespace: str = DIGEST,
    ) -> list[Effect]:  # fmt: skip
        """An engine offers a chain: block n is in device block n, its parent is the one before."""
        self._ids += 1
        run = OfferRun(
            parent=name(wanted[0] - 1).hex() if wanted else name(0).hex(),
            hashes=[name(number).hex() for number in wanted],
            blocks=[number % DEVICE_BLOCKS for number in wanted],
        )
        return self.step(
            OfferReceived(
                Offer(
                    host="h",
                    engine=engine,
                    incarnation=incarnation(life),
                    offer=self._ids if offer is None else offer,
                    namespace=namespace,
                    deadline_ms=deadline_ms,
                    runs=[run],
                )
            )
        )

    def pulled(self, pull: StartPull) -> list[Effect]:
        """The bytes are in."""
        count = pull.parts[0].share.grid.count
        sums = tuple(pack_sums(part_sums(block, count)) for block in pull.blocks)
        return self.step(PullDone(pull.pull, sums))

    def pull_failed(
        self, pull: StartPull, *, settled: bool = True, reason: str = "transfer_timeout"
    ) -> list[Effect]:
        """They are not."""
        return self.step(PullFailed(pull.pull, reason, settled))

    def confirm(
        self, offer: int, *, held: bool = True, engine: str = "ada", life: int = 1
    ) -> list[Effect]:
        """The engine says whether it had held the blocks."""
        return self.say(
            Confirm(engine=engine, incarnation=incarnation(life), offer=offer, held=held)
        )

    def store(self, *wanted: int) -> None:
        """The whole offload path of a chain."""
        self.store_for(*wanted)

    def store_for(
        self, *wanted: int, engine: str = "ada", namespace: Namespace = NAMESPACE
    ) -> None:
        """The whole offload path of a chain of an engine."""
        effects = self.offer(*wanted, engine=engine, namespace=namespace.digest.hex())
        todo = of(effects, StartPull)
        while todo:
            effects = self.pulled(todo.pop())
            todo += of(effects, StartPull)
            for pulled in of(self.told(effects), Pulled):
                assert pulled.confirm, pulled
                self.confirm(pulled.offer, engine=engine)

    # --- onboard ----------------------------------------------------------------------------

    def look_up(
        self, *wanted: int, engine: str = "ada", life: int = 1, lookup: int | None = None,
        lease_ms: int = LEASE_MS, deadline_ms: int = LOOKUP_MS, groups: Sequence[GroupRun] = (),
        namespace: Namespace = NAMESPACE, request: str = "", only_asks: bool = False,
    ) -> list[Effect]:  # fmt: skip
        """Which of these can be had?"""
        self._ids += 1
        return self.say(
            Lookup(
                engine=engine,
                incarnation=incarnation(life),
                lookup=self._ids if lookup is None else lookup,
                namespace=namespace.digest,
                hashes=pack_hashes(name(number) for number in wanted),
                lease_ms=lease_ms,
                deadline_ms=deadline_ms,
                groups=list(groups),
                request=request,
                only_asks=only_asks,
            )
        )

    def found(self, effects: Sequence[Effect]) -> Found:
        """The one answer among the effects, whose slots hold what they should."""
        [found] = of(self.told(effects), Found)
        assert len(found.slots) == len(found.checksums)
        blocks = self.core.view.blocks()
        for slot, expected in zip(found.slots, found.checksums, strict=True):
            assert blocks[slot].checksum == expected
        assert (found.lease == 0) == (not found.slots)
        return found

    def release(self, lease: int, *corrupt: int, engine: str = "ada", life: int = 1) -> None:
        """The engine is done with a lease, and no lookup follows: some other message does."""
        self.say(
            Release(
                engine=engine, incarnation=incarnation(life), lease=lease, corrupt=list(corrupt)
            )
        )
        if self.settles:
            self.beat(engine=engine, life=life)

    def beat(self, *, engine: str = "ada", life: int = 1, half: str = "scheduler") -> list[Effect]:
        """The engine lives."""
        return self.say(Beat(engine=engine, incarnation=incarnation(life)), half=half)

    def bye(self, *, engine: str = "ada", life: int = 1, half: str = "scheduler") -> list[Effect]:
        """The engine leaves."""
        return self.say(Bye(engine=engine, incarnation=incarnation(life)), half=half)

    # --- the disk tier ----------------------------------------------------------------------

    def disk_stored(self, *wanted: int) -> None:
        """The disk tier announces a chain."""
        for event in self.disk.stored([on_disk(number) for number in wanted]):
            self.step(LowerTierEvent("0", event))

    def object_stored(self, *wanted: int) -> None:
        """The object tier announces a chain."""
        for event in self.objects.stored([on_disk(number) for number in wanted]):
            self.step(LowerTierEvent("0", event, "object"))

    def disk_removed(self, *wanted: int) -> None:
        """… or its loss."""
        for event in self.disk.removed([on_disk(number) for number in wanted], "evicted"):
            self.step(LowerTierEvent("0", event))

    def disk_restarts(self) -> None:
        """A new life of the disk tier says so."""
        self.disk = Announcer(
            host="h", source="disk-tier-0", tier="disk", epoch=self.disk.epoch + 1
        )
        self.step(LowerTierEvent("0", self.disk.cleared("start")))

    def filled(
        self, fill: AskFill, *missing: int, reason: str = "gone", namespace: str = DIGEST
    ) -> list[Effect]:
        """The disk tier has read everything but `missing`."""
        slots = [
            FilledSlot(hash=asked.hash, slot=asked.slot, ok=False, reason=reason)
            if int(asked.hash, 16) in missing
            else FilledSlot(
                hash=asked.hash,
                slot=asked.slot,
                ok=True,
                parent=name(int(asked.hash, 16) - 1).hex(),
                namespace=namespace,
                checksum=checksum(int(asked.hash, 16)),
                bytes=BLOCK_BYTES,
            )
            for asked in fill.request.slots
        ]
        return self.step(FillDone(fill.fill, FillReply(slots=slots)))

    def fill_failed(
        self, fill: AskFill, *, settled: bool = True, reason: str = "deadline_exceeded"
    ) -> list[Effect]:
        """The disk tier has not answered, or refused."""
        return self.step(FillFailed(fill.fill, reason, settled))

    def lease(
        self,
        *wanted: int,
        lease_ms: int = LEASE_MS,
        epoch: int = EPOCH,
        owner: str = "disk-tier-0",
        token: str = "",
    ) -> Any:
        """The disk tier wants to copy blocks; a LeaseReply or an ErrorBody."""
        request = LeaseRequest(
            owner=owner,
            epoch=epoch,
            hashes=[name(number).hex() for number in wanted],
            lease_ms=lease_ms,
            token=token,
        )
        [answer] = of(self.step(LeaseAsked(1, request)), Answer)
        assert isinstance(answer.reply, LeaseReply | ErrorBody)
        return answer.reply

    def copied(self, lease: int, token: str = "") -> bool:
        """… and gives the lease back: had it held?"""
        request = ReleaseRequest(lease=lease, token=token)
        [answer] = of(self.step(ReleaseAsked(2, request)), Answer)
        assert isinstance(answer.reply, ReleaseReply)
        return answer.reply.valid

    # --- questions --------------------------------------------------------------------------

    @property
    def slots(self) -> dict[str, int]:
        """Slots by state."""
        return self.core.view.statistics(self.now_ms).slots

    def figure(self, figure: str) -> int:
        """A figure of the statistics: offers, lookups that wait, slots that are unsettled."""
        return int(self.core.view.statistics(self.now_ms).figures[figure])

    def drain(self) -> None:
        """An operator wants no new blocks here."""
        [answer] = of(self.step(AdminAsked(0, "drain", DrainRequest())), Answer)
        assert answer.reply == DrainReply(draining=True, was=False)

    def block(self, number: int) -> BlockReply:
        """What an operator is told of a block."""
        asked = AdminAsked(0, "block", BlockRequest(hash=name(number).hex()))
        [answer] = of(self.step(asked), Answer)
        assert isinstance(answer.reply, BlockReply)
        return answer.reply

    def diary(self, number: int) -> list[tuple[int, str]]:
        """What happened to a block, and when."""
        return [(self.now_ms - one.ago_ms, one.what) for one in self.block(number).story]

    def slot_of(self, number: int) -> int | None:
        """Where a block is."""
        blocks = self.core.view.blocks()
        return next((slot for slot, one in blocks.items() if one.hash == name(number)), None)

    def refusal(self, effects: Sequence[Effect]) -> Refused:
        """The one refusal among the effects."""
        [refused] = of(self.told(effects), Refused)
        return refused


def on_disk(number: int) -> Block:
    """A block as the disk tier has it."""
    return Block(name(number), name(number - 1), NAMESPACE.digest, checksum(number), BLOCK_BYTES)


def of(entries: Iterable[object], kind: type[E]) -> list[E]:
    """Those of one type."""
    return [entry for entry in entries if isinstance(entry, kind)]


def asked(fill: AskFill) -> list[int]:
    """The blocks that a fill asks for."""
    return [int.from_bytes(hash_from_hex(slot.hash), "big") for slot in fill.request.slots]


def engine_id(engine: str = "ada", life: int = 1) -> EngineId:
    """One life of an engine."""
    return EngineId(engine, incarnation(life))
