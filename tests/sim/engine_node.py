"""What engines of the simulation have in common: the connector's halves, device memory, events."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import lcm

from kvbm_common.identity import Namespace, SequenceHash, of_tenant
from kvbm_common.wire.consolidator import Attached, Detach, FromConsolidator
from kvbm_common.wire.engine_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
)
from kvbm_common.wire.local import Found, FromHostTier, Lookup, Pulled, Refused, Welcome
from kvbm_connectors.consolidator.core.messages import StreamKey
from kvbm_connectors.core.core import ConnectorCore
from kvbm_connectors.core.messages import (
    ConnectorLimits,
    Effect,
    Hit,
    Load,
    LoadResult,
    OfferEnded,
    ToHost,
)
from kvbm_connectors.sim.event_stream import engine_hash
from kvbm_connectors.sim.paged import BlockPool

from tests.sim import invariants
from tests.sim.ages import age_connector
from tests.sim.cluster import Cluster, Host
from tests.sim.conversations import Conversations
from tests.sim.engine_sockets import Sockets
from tests.sim.failed_loads import FailedLoads
from tests.sim.host_lookups import Question
from tests.sim.kv_groups import Group, Rule, groups_of
from tests.sim.memory import right
from tests.sim.workers import Worker
from tests.sim.world import Node, World

REQUEST_MS_MAX = 45_000
"""A request that takes longer was forgotten: all deadlines that it can meet are far shorter."""


class EngineNode(Node):
    """One engine. Its device memory, cache and requests die with it."""

    block_tokens = 1
    core: ConnectorCore
    limits: ConnectorLimits
    pool: BlockPool
    workers: list[Worker]
    incarnation = ""

    def __init__(self, world: World, cluster: Cluster, host: Host, name: str) -> None:
        super().__init__(world, f"{host.name}/{name}")
        self.cluster, self.host, self.name_alone = cluster, host, name
        sizes = world.plan.sizes
        self.units = sizes[len(host.engines) % len(sizes)]
        """How long its blocks are, in units of the arenas."""
        tenant = world.plan.tenants[len(host.engines) % len(world.plan.tenants)]
        self.shape = world.plan.cut.shape(sum(len(one.engines) for one in cluster.hosts.values()))
        """What each rank holds of a block."""
        host.engines[name] = self
        namespace = Namespace(model=f"sim-{self.units}", block_tokens=self.block_tokens)
        self.groups = groups_of(of_tenant(namespace, tenant), self.rules())
        self.namespaces = [one.hasher.namespace for one in self.groups]
        self.namespace, self.hasher = self.namespaces[0], self.groups[0].hasher
        self.conversations = self._conversations()
        self._group_of: dict[SequenceHash, int] = {}
        """Of every block that the device has ever had."""
        self.finished = 0
        self.computed_last: Sequence[Sequence[SequenceHash]] = ()
        """The names of the last request's blocks of each group, which engines of other models may
        learn."""

    def rules(self) -> Sequence[Rule]:
        """Return the rules of the model's KV groups."""
        return (Rule("full", self.block_tokens),)

    @cached_property
    def has_groups(self) -> bool:
        """Return whether hits need other blocks than all before a boundary."""
        return len(self.groups) > 1 or self.groups[0].has_holes

    @cached_property
    def boundary_tokens(self) -> int:
        """Return the tokens between two places where a hit can end."""
        return lcm(*(one.size for one in self.groups))

    def _conversations(self) -> Conversations:
        """Return the users' prompts: where host tiers can help each other, users go anywhere."""
        if not self.world.plan.has_peers:
            return Conversations(self.world, self.tokens_max)
        shared = self.cluster.conversations
        if self.block_tokens not in shared:
            shared[self.block_tokens] = Conversations(self.world, self.tokens_max)
        return shared[self.block_tokens]

    @property
    def tokens_max(self) -> int:
        """Return how long a request may be."""
        blocks = Fraction(self.world.plan.device_blocks - 2)
        return int(blocks / sum(Fraction(1, one.size) for one in self.groups))

    def boot(self) -> None:
        plan = self.world.plan
        self.incarnation = f"{self.world.rng.getrandbits(64):016x}"
        self.pool = BlockPool(plan.device_blocks)
        self.limits = ConnectorLimits(lease_ms=plan.lease_ms, avoid_ms=5_000)
        self.core = ConnectorCore(
            engine=self.name_alone,
            incarnation=self.incarnation,
            namespace=self.namespace.digest,
            limits=self.limits,
        )
        self._failed = FailedLoads(self.limits.avoid_ms)
        self.buffer: deque[tuple[int, EngineBatch]] = deque(maxlen=plan.replay_batches)
        self.subscribed = False
        """The consolidator listens to our PUB."""
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._seq = age_connector(self.core, self.world)
        self._poked = False
        self.workers = [Worker(self, rank, share) for rank, share in enumerate(self.shape)]
        self.sockets = Sockets(self)
        self.begin()
        self.every(100, self.step)

    @abstractmethod
    def begin(self) -> None:
        """Set up what is of this kind of engine."""

    @abstractmethod
    def work(self) -> None:
        """Do what can be done now, as a scheduler between two forward passes."""

    @abstractmethod
    def offer_ended(self, ended: OfferEnded) -> None:
        """Free what was offered."""

    @abstractmethod
    def submit(self) -> None:
        """Take a user's request."""

    @abstractmethod
    def disturb(self) -> None:
        """Have some trouble of an engine's own: an abort, a preemption."""

    @property
    @abstractmethod
    def request_count(self) -> int:
        """Return how many requests are in the engine."""

    @abstractmethod
    def check_idle(self) -> None:
        """Require that nothing is left of any request."""

    def check(self) -> None:
        """Check everything that belongs to the engine."""
        self.core.check()
        self.pool.check()

    def receive(self, connection: bytes, data: bytes) -> None:
        """Take a frame for one of our sockets; one of a former life is dropped."""
        if self.sockets.receive(connection, data):
            self.poke()

    def stop(self) -> None:
        """End in order."""
        detach = Detach(engine=self.name_alone, incarnation=self.incarnation)
        self.sockets.host_tier.outbox.append(self.sockets.bye)
        self.sockets.consolidator.outbox.append(detach)
        self.step()
        self.kill()

    # --- the connector ----------------------------------------------------------------------

    def take(self, message: FromHostTier | FromConsolidator) -> None:
        """Hear host tier or consolidator."""
        if self.world.traced:
            self.world.note(f"{self.name} < {message}")
        match message:
            case Welcome():
                hints = message.hints and self.world.plan.hints
                self.carry_out(self.core.attached(message.epoch, hints=hints))
            case Found():
                self.carry_out(self.core.found(message))
            case Pulled():
                self.carry_out(self.core.pulled(message))
            case Attached():
                self.core.take_offers(taken=message.offers)
            case Refused(offer=int(offer)):
                self.carry_out(self.core.revoke(offer, "refused"))

    def host_down(self) -> None:
        """The host tier does not answer any more."""
        self.carry_out(self.core.detached())

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Send what the connector's core wants sent."""
        for effect in effects:
            if isinstance(effect, OfferEnded):
                self.offer_ended(effect)
                continue
            if self.world.traced:
                self.world.note(f"{self.name} > {effect}")
            is_host = isinstance(effect, ToHost)
            if isinstance(lookup := effect.message, Lookup):
                question = Question.of(lookup, self.groups, self.boundary_tokens)
                self._failed.asked(lookup, question, self.core.view.epoch, self.world.now_ms)
            link = self.sockets.host_tier if is_host else self.sockets.consolidator
            link.outbox.append(effect.message)

    def take_found(self, request: str, blocks: Sequence[int]) -> Load:
        """Take what was found for a request."""
        load = self.core.take(request, blocks, self.world.now_ms)
        self._failed.taken(load, self.world.now_ms)
        return load

    def load_ended(self, result: LoadResult) -> None:
        """Report the end of a load."""
        failed = self._failed.ended(result, self.core.view.epoch, self.world.now_ms)
        self.world.marks["failed blocks avoided"] += failed
        self.carry_out(self.core.load_ended(result, self.world.now_ms))

    def mark_hit(self, hit: Hit) -> None:
        """Count where the blocks of a hit that is taken were."""
        self.world.marks["blocks from host"] += hit.host
        self.world.marks["blocks from below"] += hit.disk
        self.world.marks["blocks from afar"] += hit.remote

    # --- the loop ---------------------------------------------------------------------------

    def poke(self) -> None:
        """Look soon: something has happened."""
        if not self._poked:
            self._poked = True
            self.later(self.world.rng.uniform(0.1, 2.0), self.step)

    def step(self) -> None:
        """Hear, work, say."""
        self._poked = False
        now_ms = self.world.now_ms
        self.sockets.tick(now_ms)
        self.carry_out(self.core.tick(now_ms))
        for worker in self.workers:
            worker.look()
        self.work()
        self.flush()
        self.sockets.flush(now_ms)
        self.stepped()

    # --- device blocks ----------------------------------------------------------------------

    def check_block(self, name: SequenceHash, block: int, where: str) -> None:
        """Require that a block which is about to be used is right on every rank."""
        for worker in self.workers:
            for part, content in worker.held(block):
                if content != right(name, part):
                    invariants.check_content(name, part, content, where)

    def write_block(self, name: SequenceHash, block: int) -> None:
        """Compute a block, on every rank."""
        for worker in self.workers:
            worker.device.put(block, [right(name, part) for part in worker.parts])

    def say_removed(self, names: Sequence[SequenceHash]) -> None:
        """Publish that blocks have left the device's cache."""
        for group in self.groups:
            gone = [name for name in names if self._group_of[name] == group.number]
            if gone:
                hashes, number = tuple(engine_hash(name) for name in gone), self._said(group)
                self._events.append(
                    BlockRemoved(block_hashes=hashes, medium="GPU", group_idx=number)
                )

    def _said(self, group: Group) -> int | None:
        return group.number if self.has_groups else None

    def group_of(self, name: SequenceHash) -> int:
        """Return the KV group of a block that the device has, or has had; -1: it never had it."""
        return self._group_of.get(name, -1)

    def must_be_known(self, name: SequenceHash) -> bool:
        """Tell whether events have said all of a block of the device: after a hole there is no
        parent that a consolidator can know."""
        return not self.groups[self._group_of[name]].has_holes

    def say_stored(
        self,
        names: Sequence[SequenceHash],
        first: int,
        end: int,
        tokens: Sequence[int],
        group: Group | None = None,
    ) -> None:
        """Publish that blocks `first` to `end` of a sequence can be found on the device."""
        group = group or self.groups[0]
        size = group.size
        self._group_of.update(dict.fromkeys(names[first:end], group.number))
        self._events.append(
            BlockStored(
                block_hashes=tuple(engine_hash(name) for name in names[first:end]),
                parent=engine_hash(names[first - 1]) if first else None,
                token_ids=tuple(tokens[first * size : end * size]),
                block_size=size,
                medium="GPU",
                group_idx=self._said(group),
            )
        )

    def say_cleared(self) -> None:
        """Publish that the device's cache is empty."""
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publish the step's events, as one batch, if the consolidator has subscribed."""
        if not self._events:
            return
        batch = EngineBatch(self.world.now, tuple(self._events), 0)
        self._events.clear()
        seq, self._seq = self._seq, self._seq + 1
        self.buffer.append((seq, batch))
        if self.subscribed:
            consolidator = self.host.consolidator
            key = StreamKey(self.name_alone, self.incarnation, 0)
            self.world.send(
                f"{self.name} pub", consolidator, lambda: consolidator.batch(key, seq, batch)
            )
