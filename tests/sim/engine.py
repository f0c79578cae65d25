"""An engine, as small as the connector's core lets it be: requests, a paged cache, events.

    WAITING --answered, blocks--> TAKING --> LOADING --ended--> COMPUTING --> finished
       ^                                                           |
       +---------------------- preempted --------------------------+

Requests are turns of conversations, so that prefixes are shared. The engine may abort and preempt
requests and revoke offers at any time, and may dawdle between an answer and its load: beyond the
lease's end, or into another life of the host tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvbm_common.identity import SequenceHash
from kvbm_common.wire.session_hint import Action
from kvbm_connectors.core.messages import Hit, LoadResult, OfferEnded, OfferRun, merge_results

from tests.sim import invariants
from tests.sim.engine_node import REQUEST_MS_MAX, EngineNode
from tests.sim.miss_filter import denies

RUNNING_MAX = 3
PREFILL_MS = 3.0
HINT_TTL_MS = 800
"""The longest time to live of a hint's pin."""
PRYING = 0.2
"""How often users' requests come with a question for blocks of another model."""
PRYING_NAME = "prying"
DAWDLE_MS_MAX = 9_000
"""Beyond every lease, and long enough for another life of the host tier."""


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
    results: list[LoadResult] = field(default_factory=list)
    """Of the ranks whose part of the load has ended."""


class PlainEngine(EngineNode):
    """An engine around the connector's core."""

    def begin(self) -> None:
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        """Those that take what was found for them, and those that load it."""
        self.computing: list[Request] = []
        self.offered: dict[int, list[int]] = {}
        self._ended: list[Callable[[], None]] = []

    def offer_ended(self, ended: OfferEnded) -> None:
        self.pool.release(self.offered.pop(ended.offer))

    def work(self) -> None:
        ended, self._ended = self._ended, []
        for end in ended:
            end()
        for request in list(self.waiting):
            if len(self.loading) + len(self.computing) >= RUNNING_MAX:
                break
            if not self._admit(request):
                break

    def submit(self) -> None:
        tokens = self.conversations.next()
        name = f"{self.name}/{self.life}/{self.world.rng.getrandbits(32)}"
        self.waiting.append(Request(name, tokens, self.hasher.chain(tokens), self.world.awake_ms))
        self.poke()

    def disturb(self) -> None:
        rng = self.world.rng
        if self.offered and rng.random() < 0.05:
            self.revoke(rng.choice(list(self.offered)))
        if self.computing and rng.random() < 0.05:
            self.preempt(rng.choice(self.computing))
        requests = [request for request in self.requests() if not request.aborted]
        if requests and rng.random() < 0.05:
            self.abort(rng.choice(requests))
        self._pry()

    def _pry(self) -> None:
        """Ask by name for blocks of a neighbour's model. What is found is never right."""
        neighbours = [
            one for one in self.host.engines.values()
            if one.computed_last and one.namespace != self.namespace
        ]  # fmt: skip
        if not neighbours or self.world.rng.random() > PRYING:
            return
        self.world.marks["names of another model asked for"] += 1
        names = self.world.rng.choice(neighbours).computed_last
        is_absent = denies(self, names)
        _, effects = self.core.lookup(PRYING_NAME, names, self.world.now_ms, is_absent=is_absent)
        self.carry_out([*effects, *self.core.forget(PRYING_NAME)])

    def requests(self) -> list[Request]:
        """Return all that are in the engine."""
        return [*self.waiting, *self.loading.values(), *self.computing]

    @property
    def request_count(self) -> int:
        return len(self.waiting) + len(self.loading) + len(self.computing)

    def check_idle(self) -> None:
        left = [request.name for request in self.requests()]
        invariants.require(not left, f"{self.name} has not finished {left}")
        text = f"{self.name}: blocks of {self.offered} are still held"
        invariants.require(not self.offered, text)

    # --- admission --------------------------------------------------------------------------

    def _admit(self, request: Request) -> bool:
        """Start a request if its answer and its blocks are there; False: no other can start."""
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
        self.say_removed(evicted)
        for worker in self.workers:
            for block in blocks:
                worker.device.tear(block)
        request.blocks, request.local, request.computed = local + blocks, len(local), len(local)
        self.waiting.remove(request)
        self._start(request, hit)
        return True

    def _lookup(self, request: Request, local: int) -> Hit | None:
        missing = request.names[local:-1]
        if not missing:
            return Hit(0)
        is_absent = denies(self, missing)
        hit, effects = self.core.lookup(
            request.name, missing, self.world.now_ms, is_absent=is_absent
        )
        self.carry_out(effects)
        if effects:
            request.asked_ms = self.world.now_ms
        if hit is None:
            invariants.check_patience(self.limits, request.asked_ms, self.world.now_ms)
        return hit

    def _make_room(self) -> None:
        """Take blocks back from something, or wait."""
        rng = self.world.rng
        if self.offered and rng.random() < 0.3:
            self.revoke(rng.choice(list(self.offered)))
        elif self.computing and rng.random() < 0.1:
            self.preempt(rng.choice(self.computing))

    def revoke(self, offer: int) -> None:
        """Take offered blocks back."""
        self.world.marks["offer revoked"] += 1
        self.carry_out(self.core.revoke(offer))
        self.poke()

    def preempt(self, request: Request) -> None:
        """Begin a request again later."""
        self.world.marks["request preempted"] += 1
        self.computing.remove(request)
        self._let_go(request)
        self.waiting.insert(0, request)

    def abort(self, request: Request) -> None:
        """Drop a request. A load cannot be stopped: its blocks stay held."""
        self.world.marks["request aborted"] += 1
        request.aborted = True
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.computing:
            self.computing.remove(request)
            self._let_go(request)
        self.carry_out(self.core.forget(request.name))

    def _let_go(self, request: Request) -> None:
        request.run += 1
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0
        self.carry_out(self.core.forget(request.name))

    # --- loads ------------------------------------------------------------------------------

    def _start(self, request: Request, hit: Hit) -> None:
        if hit.blocks == 0:
            self.carry_out(self.core.forget(request.name))
            self._compute(request)
            return
        self.loading[request.name] = request
        if not self.world.calm and self.world.rng.random() < self.world.plan.dawdles:
            self.world.marks["take delayed"] += 1
            dawdle_ms = self.world.rng.choice((self.world.plan.lease_ms, DAWDLE_MS_MAX))
            self.later(self.world.rng.uniform(0, dawdle_ms), partial(self._taken, request, hit))
        else:
            self._take(request, hit)

    def _taken(self, request: Request, hit: Hit) -> None:
        """Take late what was found, unless the request was dropped meanwhile."""
        if request.aborted:
            del self.loading[request.name]
            self._let_go(request)
        else:
            self._take(request, hit)

    def _take(self, request: Request, hit: Hit) -> None:
        targets = request.blocks[request.local : request.local + hit.blocks]
        load = self.core.take(request.name, targets, self.world.now_ms)
        if load.deadline_ms <= self.world.now_ms:
            self.world.marks["take after its lease"] += 1
        if load.epoch != self.core.view.epoch:
            self.world.marks["take from a former life"] += 1
        self.mark_hit(hit)
        request.results.clear()
        for worker in self.workers:
            worker.start(load, partial(self._part_ended, request))

    def _part_ended(self, request: Request, result: LoadResult) -> None:
        """Report a load when nothing of it flies any more, on any rank."""
        request.results.append(result)
        if len(request.results) == len(self.workers):
            self._ended.append(partial(self._loaded, request, merge_results(request.results)))
            self.poke()

    def _loaded(self, request: Request, result: LoadResult) -> None:
        del self.loading[request.name]
        self.carry_out(self.core.load_ended(result, self.world.now_ms))
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
            self.write_block(request.names[index], request.blocks[index])
        request.computed = len(request.names)
        self._check(request)
        self._give_names(request, first, request.computed)
        self._offer(request, first)
        self._let_go(request)
        self.finished += 1
        self.computed_last = request.names
        self._hint(request)
        invariants.check_request_time(self.world.awake_ms - request.since_ms, REQUEST_MS_MAX)
        self.poke()

    def _hint(self, request: Request) -> None:
        """Say what the agent of one of a few sessions does next, whose pins end before the rest."""
        if not self.world.plan.hints:
            return
        rng = self.world.rng
        action: Action = rng.choice(("pin", "pin", "demote", "prefetch"))
        names = request.names if rng.random() < 0.7 else ()
        ttl_ms = rng.randint(0, HINT_TTL_MS) if action == "pin" else 0
        self.world.marks[f"hint {action}"] += 1
        session = f"s{rng.randrange(4)}"
        self.carry_out(self.core.hint(session, action, names, ttl_ms=ttl_ms))

    def _check(self, request: Request) -> None:
        """Require that everything that is about to be used is what it must be."""
        for index in range(request.computed):
            where = f"{request.name} block {index}"
            self.check_block(request.names[index], request.blocks[index], where)

    def _give_names(self, request: Request, first: int, end: int) -> None:
        if first == end:
            return
        for index in range(first, end):
            self.pool.give_name(request.blocks[index], request.names[index])
        self.say_stored(request.names, first, end, request.tokens)

    def _offer(self, request: Request, first: int) -> None:
        """Offer what was computed, sometimes in two parts."""
        end = len(request.names)
        middle = self.world.rng.choice((first, (first + end) // 2))
        for start, stop in ((first, middle), (middle, end)):
            if start == stop:
                continue
            parent = request.names[start - 1] if start else self.hasher.root
            blocks = request.blocks[start:stop]
            run = OfferRun(parent, tuple(request.names[start:stop]), tuple(blocks))
            offer, effects = self.core.offer([run], self.world.now_ms)
            if offer is not None:
                self.pool.hold(blocks)
                self.offered[offer] = blocks
            self.carry_out(effects)
