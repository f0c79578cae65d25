"""An engine, as small as the connector's core lets it be: requests, a paged cache, events.

    WAITING --answered, blocks--> LOADING --ended--> COMPUTING --> finished
       ^                                                |
       +------------------- preempted ------------------+

Requests are turns of conversations, so that prefixes are shared. The engine may abort and preempt
requests and revoke offers at any time. The links are the product's own, on a socket of ours.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbm_common.checksum import block_checksum
from kvbm_common.identity import Hasher, SequenceHash
from kvbm_common.wire.engine_events import BlockRemoved, BlockStored, EngineBatch
from kvbm_common.wire.local import Attached, Bye, Detach, Found, Pulled, Refused, Welcome
from kvbm_connectors.consolidator.messages import StreamKey
from kvbm_connectors.core import ConnectorCore, Limits
from kvbm_connectors.messages import (
    Effect,
    FromService,
    Hit,
    Load,
    LoadResult,
    OfferEnded,
    OfferRun,
    ToHost,
)
from kvbm_connectors.sim.event_stream import engine_hash
from kvbm_connectors.sim.paged import BlockPool

from tests.sim import invariants
from tests.sim.engine_sockets import NAMESPACE, Sockets
from tests.sim.memory import Memory, copy
from tests.sim.peers import Peers
from tests.sim.world import Node, World

HASHER = Hasher(NAMESPACE)
RUNNING_MAX = 3
PREFILL_MS = 3.0
REQUEST_MS_MAX = 45_000
"""A request that takes longer was forgotten: all deadlines that it can meet are far shorter."""


@dataclass(slots=True)
class Request:
    """A request in the engine. One token is one block, and the last one must be computed."""

    name: str
    tokens: list[int]
    names: list[SequenceHash]
    since_ms: float
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    computed: int = 0
    run: int = 0
    """Counts its beginnings: a timer of a former one means nothing."""
    asked_ms: float = 0.0
    aborted: bool = False


class EngineNode(Node):
    """One engine. Its device memory, cache and requests die with it."""

    core: ConnectorCore
    pool: BlockPool
    device: Memory
    incarnation = ""

    def __init__(self, world: World, peers: Peers, name: str) -> None:
        super().__init__(world, name)
        self.peers = peers
        peers.engines[name] = self
        self.finished = 0
        self.conversations: list[list[int]] = [[0]]

    def boot(self) -> None:
        plan = self.world.plan
        self.incarnation = f"{self.world.rng.getrandbits(64):016x}"
        self.pool = BlockPool(plan.device_blocks)
        self.device = Memory(self.world, plan.device_blocks)
        self.core = ConnectorCore(
            engine=self.name,
            incarnation=self.incarnation,
            namespace=NAMESPACE.digest,
            limits=Limits(lease_ms=plan.lease_ms, avoid_ms=5_000),
        )
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.computing: list[Request] = []
        self.offered: dict[int, list[int]] = {}
        self._ended: list[LoadResult] = []
        self.buffer: deque[tuple[int, EngineBatch]] = deque(maxlen=plan.replay_batches)
        self.subscribed = False
        """The consolidator listens to our PUB."""
        self._events: list[BlockStored | BlockRemoved] = []
        self._seq = 0
        self._poked = False
        self.sockets = Sockets(self, self._take, self._host_down)
        self.every(100, self.step)

    def receive(self, connection: bytes, data: bytes) -> None:
        """A frame for one of our sockets; one of a former life is nobody's."""
        if self.sockets.receive(connection, data):
            self.poke()

    def stop(self) -> None:
        """End in order."""
        bye = Bye(engine=self.name, incarnation=self.incarnation)
        detach = Detach(engine=self.name, incarnation=self.incarnation)
        self.sockets.host_tier.outbox.append(bye)
        self.sockets.consolidator.outbox.append(detach)
        self.step()
        self.kill()

    # --- the connector ----------------------------------------------------------------------

    def _take(self, message: FromService) -> None:
        if self.world.traced:
            self.world.note(f"{self.name} < {message}")
        match message:
            case Welcome():
                self._carry_out(self.core.attached(message.epoch))
            case Found():
                self._carry_out(self.core.found(message))
            case Pulled():
                self._carry_out(self.core.pulled(message))
            case Attached():
                self.core.events_attached = message.offers
            case Refused(offer=int(offer)):
                self._carry_out(self.core.revoke(offer, "refused"))

    def _host_down(self) -> None:
        self._carry_out(self.core.detached())

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, OfferEnded):
                self.pool.release(self.offered.pop(effect.offer))
                continue
            if self.world.traced:
                self.world.note(f"{self.name} > {effect}")
            is_host = isinstance(effect, ToHost)
            link = self.sockets.host_tier if is_host else self.sockets.consolidator
            link.outbox.append(effect.message)

    # --- the loop ---------------------------------------------------------------------------

    def poke(self) -> None:
        """Something has happened: look soon."""
        if not self._poked:
            self._poked = True
            self.later(self.world.rng.uniform(0.1, 2.0), self.step)

    def step(self) -> None:
        """Do what can be done now, as an engine's scheduler between two forward passes."""
        self._poked = False
        now_ms = self.world.now_ms
        self.sockets.tick(now_ms)
        self._carry_out(self.core.tick(now_ms))
        ended, self._ended = self._ended, []
        for result in ended:
            self._loaded(result)
        for request in list(self.waiting):
            if len(self.loading) + len(self.computing) >= RUNNING_MAX:
                break
            if not self._admit(request):
                break
        self._flush()
        self.sockets.flush(now_ms)
        if self.due_check():
            self.core.check()
            self.pool.check()

    def submit(self) -> None:
        """A user says something: as before, the next turn, or another turn from some point on."""
        rng, longest = self.world.rng, self.world.plan.device_blocks - 2
        index = rng.randrange(len(self.conversations))
        tokens, says = self.conversations[index], [_say(rng) for _ in range(rng.randint(1, 6))]
        roll = rng.random()
        if len(tokens) < 2 or roll < 0.3:
            tokens = (tokens + says)[:longest]
            self.conversations[index] = tokens
        elif roll < 0.45:
            tokens = (tokens[: rng.randint(1, len(tokens))] + says)[:longest]
            self._begin(tokens)
        name = f"{self.name}/{self.life}/{self._seq}/{rng.getrandbits(32)}"
        self.waiting.append(Request(name, tokens, HASHER.chain(tokens), self.world.now))
        self.poke()

    def _begin(self, tokens: list[int]) -> None:
        """Another conversation; beyond the plan's number it takes the place of one."""
        if len(self.conversations) < self.world.plan.conversations:
            self.conversations.append(tokens)
        else:
            self.conversations[self.world.rng.randrange(len(self.conversations))] = tokens

    def requests(self) -> list[Request]:
        """All that are in the engine."""
        return [*self.waiting, *self.loading.values(), *self.computing]

    # --- admission --------------------------------------------------------------------------

    def _admit(self, request: Request) -> bool:
        """Start a request if its answer and its blocks are there; False: nobody else either."""
        local: list[int] = []
        for name in request.names[:-1]:
            block = self.pool.find(name)
            if block is None:
                break
            local.append(block)
        hit = self._lookup(request, len(local))
        if hit is None:
            return True
        self.pool.hold(local)
        allocated = self.pool.allocate(len(request.names) - len(local))
        if allocated is None:
            self.pool.release(local)
            self._make_room()
            return False
        blocks, evicted = allocated
        if evicted:
            hashes = tuple(engine_hash(name) for name in evicted)
            self._events.append(BlockRemoved(block_hashes=hashes, medium="GPU"))
        for block in blocks:
            self.device.slots[block] = self.device.garbage()
        request.blocks, request.local, request.computed = local + blocks, len(local), len(local)
        self.waiting.remove(request)
        self._start(request, hit)
        return True

    def _lookup(self, request: Request, local: int) -> Hit | None:
        missing = request.names[local:-1]
        if not missing:
            return Hit(0)
        hit, effects = self.core.lookup(request.name, missing, self.world.now_ms)
        self._carry_out(effects)
        if effects:
            request.asked_ms = self.world.now
        if hit is None:
            invariants.check_patience(self.core.limits, request.asked_ms, self.world.now)
        return hit

    def _make_room(self) -> None:
        """No blocks: take some back from somebody, or wait."""
        rng = self.world.rng
        if self.offered and rng.random() < 0.3:
            self.revoke(rng.choice(list(self.offered)))
        elif self.computing and rng.random() < 0.1:
            self.preempt(rng.choice(self.computing))

    def revoke(self, offer: int) -> None:
        """Take offered blocks back."""
        self.world.marks["offer revoked"] += 1
        self._carry_out(self.core.revoke(offer))
        self.poke()

    def preempt(self, request: Request) -> None:
        """Begin a request again later."""
        self.world.marks["request preempted"] += 1
        self.computing.remove(request)
        self._let_go(request)
        self.waiting.insert(0, request)

    def abort(self, request: Request) -> None:
        """Nobody wants the answer any more. A load cannot be stopped: its blocks stay held."""
        self.world.marks["request aborted"] += 1
        request.aborted = True
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.computing:
            self.computing.remove(request)
            self._let_go(request)
        self._carry_out(self.core.forget(request.name))

    def _let_go(self, request: Request) -> None:
        request.run += 1
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0
        self._carry_out(self.core.forget(request.name))

    # --- loads ------------------------------------------------------------------------------

    def _start(self, request: Request, hit: Hit) -> None:
        if hit.blocks == 0:
            self._carry_out(self.core.forget(request.name))
            self._compute(request)
            return
        targets = request.blocks[request.local : request.local + hit.blocks]
        load = self.core.take(request.name, targets, self.world.now_ms)
        self.loading[request.name] = request
        self.world.marks["blocks from host"] += hit.host
        self.world.marks["blocks from disk"] += hit.disk
        self._pull(load)

    def _pull(self, load: Load) -> None:
        """What every rank's worker half does. It reports only when nothing flies any more."""
        if any(epoch != load.epoch for epoch in self.sockets.welcomed):
            self._load_ended(LoadResult(load, (False,) * len(load.blocks), (), "arena_changed"))
            return
        duration_ms = self.world.transfer_ms("load")
        copy(
            self,
            (self.peers.host_tier.arenas[load.epoch], load.slots),
            (self.device, load.blocks),
            duration_ms,
        )
        self.later(duration_ms, lambda: self._pulled(load))

    def _pulled(self, load: Load) -> None:
        if self.world.now_ms >= load.deadline_ms:
            self.world.marks["load outlived its lease"] += 1
            self._load_ended(LoadResult(load, (False,) * len(load.blocks), (), "lease_ended"))
            return
        corrupt: list[int] = []
        if self.world.plan.verified:
            sums = [block_checksum(self.device.slots[block]) for block in load.blocks]
            corrupt = [i for i, found in enumerate(sums) if found != load.checksums[i]]
        self.world.marks["host block corrupt"] += len(corrupt)
        invariants.check_corrupt([self.device.slots[load.blocks[i]] for i in corrupt])
        intact = tuple(index not in corrupt for index in range(len(load.blocks)))
        self._load_ended(LoadResult(load, intact, tuple(corrupt), "corrupt" if corrupt else ""))

    def _load_ended(self, result: LoadResult) -> None:
        self._ended.append(result)
        self.poke()

    def _loaded(self, result: LoadResult) -> None:
        request = self.loading.pop(result.load.request)
        self._carry_out(self.core.load_ended(result, self.world.now_ms))
        if request.aborted:
            self._let_go(request)
            return
        request.computed = request.local + result.usable
        self._check(request)
        self._give_names(request, request.local, request.computed)
        self._compute(request)

    # --- compute ----------------------------------------------------------------------------

    def _compute(self, request: Request) -> None:
        self.computing.append(request)
        run, count = request.run, len(request.names) - request.computed

        def end() -> None:
            if request.run == run and request in self.computing:
                self._computed(request)

        self.later(self.world.rng.uniform(0.5, 1.5) * PREFILL_MS * count, end)

    def _computed(self, request: Request) -> None:
        self.computing.remove(request)
        first = request.computed
        for index in range(first, len(request.names)):
            self.device.slots[request.blocks[index]] = request.names[index]
        request.computed = len(request.names)
        self._check(request)
        self._give_names(request, first, request.computed)
        self._offer(request, first)
        self._let_go(request)
        self.finished += 1
        invariants.check_request_time(self.world.now - request.since_ms, REQUEST_MS_MAX)
        self.poke()

    def _check(self, request: Request) -> None:
        """Everything that is about to be used is what it must be."""
        for index in range(request.computed):
            content = self.device.slots[request.blocks[index]]
            invariants.check_content(request.names[index], content, f"{request.name} block {index}")

    def _give_names(self, request: Request, first: int, end: int) -> None:
        if first == end:
            return
        for index in range(first, end):
            self.pool.give_name(request.blocks[index], request.names[index])
        names = request.names
        self._events.append(
            BlockStored(
                block_hashes=tuple(engine_hash(name) for name in names[first:end]),
                parent=engine_hash(names[first - 1]) if first else None,
                token_ids=tuple(request.tokens[first:end]),
                block_size=1,
                medium="GPU",
            )
        )

    def _offer(self, request: Request, first: int) -> None:
        """Offer what was computed, sometimes in two parts."""
        end = len(request.names)
        middle = self.world.rng.choice((first, (first + end) // 2))
        for start, stop in ((first, middle), (middle, end)):
            if start == stop:
                continue
            parent = request.names[start - 1] if start else HASHER.root
            blocks = request.blocks[start:stop]
            run = OfferRun(parent, tuple(request.names[start:stop]), tuple(blocks))
            offer, effects = self.core.offer([run], self.world.now_ms)
            if offer is not None:
                self.pool.hold(blocks)
                self.offered[offer] = blocks
            self._carry_out(effects)

    def _flush(self) -> None:
        """Publish the step's events, as one batch, to whoever has subscribed."""
        if not self._events:
            return
        batch = EngineBatch(self.world.now, tuple(self._events), 0)
        self._events.clear()
        seq, self._seq = self._seq, self._seq + 1
        self.buffer.append((seq, batch))
        if self.subscribed:
            consolidator, key = self.peers.consolidator, StreamKey(self.name, self.incarnation, 0)
            self.world.send(
                f"{self.name} pub", consolidator, lambda: consolidator.batch(key, seq, batch)
            )


def _say(rng: random.Random) -> int:
    """A token: often one that others have said, too."""
    return rng.randint(0, 3 if rng.random() < 0.5 else 10**6)
