"""An engine, as small as the connector's core lets it be: requests, a paged cache, events.

    WAITING --answered, blocks--> TAKING --> LOADING --ended--> COMPUTING --> finished
       ^                                                           |
       +---------------------- preempted --------------------------+

Requests are turns of conversations, so that prefixes are shared. The engine may abort and preempt
requests and revoke offers at any time, and may dawdle between an answer and its load: beyond the
lease's end, or into another life of the host tier. It may have several KV groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import GroupRun
from kvbm_common.wire.session_hint import Action
from kvbm_connectors.core.messages import Hit, LoadResult, OfferEnded, OfferRun, merge_results

from tests.sim import invariants
from tests.sim.engine_node import REQUEST_MS_MAX, EngineNode
from tests.sim.kv_groups import Group, Rule
from tests.sim.miss_filter import denies
from tests.sim.plain_requests import NOWHERE, Request, flat

RUNNING_MAX = 3
PREFILL_MS = 3.0
HINT_TTL_MS = 800
"""The longest time to live of a hint's pin."""
PRYING = 0.2
"""How often users' requests come with a question for blocks of another model."""
PRYING_NAME = "prying"
AGAIN_NAME = "again"
DAWDLE_MS_MAX = 9_000
"""Beyond every lease, and long enough for another life of the host tier."""


class PlainEngine(EngineNode):
    """An engine around the connector's core."""

    def begin(self) -> None:
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        """Those that take what was found for them, and those that load it."""
        self.computing: list[Request] = []
        self.offered: dict[int, list[int]] = {}
        self._ended: list[Callable[[], None]] = []

    def rules(self) -> Sequence[Rule]:
        return self.world.plan.groups

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
        names = [one.hasher.chain(tokens[: one.floor(len(tokens))]) for one in self.groups]
        self.waiting.append(Request(name, tokens, names, self.world.awake_ms))
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
        self._ask_by_name(PRYING_NAME, self.world.rng.choice(neighbours).computed_last)
        self.carry_out(self.core.forget(PRYING_NAME))

    def _ask_by_name(self, request: str, known: Sequence[Sequence[SequenceHash]]) -> None:
        """Ask for blocks by their names: over all groups, if the names are of as many groups."""
        runs: list[GroupRun] = []
        if self.has_groups and len(known) == len(self.groups):
            self.world.marks["groups asked for by name"] += 1
            pairs = list(zip(self.groups, known, strict=True))
            end = min(len(names) * group.size for group, names in pairs)
            runs = [group.run(0, end) for group in self.groups]
            known = [names[: run.blocks] for run, names in zip(runs, known, strict=True)]
        asked = [name for names in known[: len(runs) or 1] for name in names]
        is_absent = denies(self, asked, runs)
        _, effects = self.core.lookup(
            request, asked, self.world.now_ms, groups=runs, is_absent=is_absent
        )
        self.carry_out(effects)

    def ask_again(self) -> None:
        """Ask for all blocks of the last request."""
        if self.computed_last:
            self._ask_by_name(AGAIN_NAME, self.computed_last)
            self.poke()

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
        tables, local = self._hits(request)
        hit = self._lookup(request, local)
        if hit is None:
            return True
        hits = flat(tables)
        self.pool.hold(hits)
        pairs = zip(request.names, tables, strict=True)
        wanted = [len(names) - len(table) for names, table in pairs]
        allocated = self.pool.allocate(sum(wanted))
        if allocated is None:
            self.pool.release(hits)
            self._make_room()
            return False
        blocks, evicted = allocated
        self.say_removed(evicted)
        for worker in self.workers:
            for block in blocks:
                worker.device.tear(block)
        for table, count in zip(tables, wanted, strict=True):
            table += [blocks.pop(0) for _ in range(count)]
        request.tables, request.local, request.computed = tables, local, local
        self.waiting.remove(request)
        self._start(request, hit)
        return True

    def _hits(self, request: Request) -> tuple[list[list[int]], int]:
        """Return the blocks of each group that the device's cache has, as far as all groups have
        what is needed; and how many tokens that is."""
        boundary = self._end(request)
        places: list[list[int | None]] = []
        for group, names in zip(self.groups, request.names, strict=True):
            found = [*map(self.pool.find, names[: boundary // group.size])]
            if not group.has_holes and None in found:  # No hit goes beyond the first that lacks.
                boundary = min(boundary, found.index(None) * group.size)
            places.append(found)
        boundary -= boundary % self.boundary_tokens
        while (tables := self._tables(places, boundary)) is None:
            boundary -= self.boundary_tokens
        return tables, boundary

    def _tables(self, places: list[list[int | None]], boundary: int) -> list[list[int]] | None:
        """Return what a device hit up to a boundary has; None: blocks are missing."""
        tables: list[list[int]] = []
        for group, found in zip(self.groups, places, strict=True):
            table = [NOWHERE] * (boundary // group.size)
            for index in group.needed(boundary):
                place = found[index]
                if place is None:
                    return None
                table[index] = place
            tables.append(table)
        return tables

    def _end(self, request: Request) -> int:
        """Return the largest boundary that a hit can have: one token is always computed."""
        return (len(request.tokens) - 1) // self.boundary_tokens * self.boundary_tokens

    def _lookup(self, request: Request, local: int) -> Hit | None:
        end = self._end(request)
        if local == end:
            return Hit(0)
        missing = [
            name
            for group, names in zip(self.groups, request.names, strict=True)
            for name in names[local // group.size : end // group.size]
        ]
        runs = [group.run(local, end) for group in self.groups] if self.has_groups else []
        is_absent = denies(self, missing, runs)
        hit, effects = self.core.lookup(
            request.name, missing, self.world.now_ms, groups=runs, is_absent=is_absent
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
        self.pool.release(flat(request.tables))
        request.tables, request.computed = [], 0
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
        load = self.take_found(request.name, self._targets(request, hit))
        if load.deadline_ms <= self.world.now_ms:
            self.world.marks["take after its lease"] += 1
        if load.epoch != self.core.view.epoch:
            self.world.marks["take from a former life"] += 1
        self.mark_hit(hit)
        request.results.clear()
        for worker in self.workers:
            worker.start(load, partial(self._part_ended, request))

    def _boundary(self, request: Request, blocks: int) -> int:
        """Return up to which token so many loaded blocks reach: of groups, that is all or none."""
        if not self.has_groups:
            return request.local + blocks * self.block_tokens
        return request.boundary if blocks else request.local

    def _targets(self, request: Request, hit: Hit) -> list[int]:
        """Return the device blocks of a hit, group after group."""
        request.boundary = request.local + hit.boundary
        boundary = self._boundary(request, hit.blocks)
        self.world.marks["hit over groups"] += self.has_groups
        self.world.marks["hit that a window has cut"] += hit.shared > hit.boundary
        chosen = [
            table[index]
            for group, table in zip(self.groups, request.tables, strict=True)
            for index in group.needed(boundary)
            if index >= request.local // group.size
        ]
        text = f"{hit} is for {len(chosen)} blocks up to token {boundary}"
        invariants.require(len(chosen) == hit.blocks, text)
        return chosen

    def _part_ended(self, request: Request, result: LoadResult) -> None:
        """Report a load when nothing of it is in flight any more, on any rank."""
        request.results.append(result)
        if len(request.results) == len(self.workers):
            self._ended.append(partial(self._loaded, request, merge_results(request.results)))
            self.poke()

    def _loaded(self, request: Request, result: LoadResult) -> None:
        del self.loading[request.name]
        self.load_ended(result)
        if request.aborted:
            self._let_go(request)
            return
        request.computed = self._boundary(request, result.usable)
        self.world.marks["load over groups failed"] += self.has_groups and not result.usable
        self._check(request)
        self._give_names(request, request.local, request.computed, computed=False)
        self._compute(request)

    # --- compute ----------------------------------------------------------------------------

    def _compute(self, request: Request) -> None:
        self.computing.append(request)
        run, count = request.run, len(request.tokens) - request.computed

        def end() -> None:
            if request.run == run and request in self.computing:
                self._computed(request)

        self.later(self.world.rng.uniform(0.5, 1.5) * PREFILL_MS * count, end)

    def _computed(self, request: Request) -> None:
        self.computing.remove(request)
        first, end = request.computed, len(request.tokens)
        for group, names, table in self._kept(request):
            for index in range(first // group.size, len(names)):
                self.write_block(names[index], table[index])
        request.computed = end
        self._check(request)
        self._give_names(request, first, end)
        for number in range(len(self.groups)):
            self._offer(request, number, first)
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
        names = [name for one in request.names for name in one] if rng.random() < 0.7 else ()
        ttl_ms = rng.randint(0, HINT_TTL_MS) if action == "pin" else 0
        self.world.marks[f"hint {action}"] += 1
        session = f"s{rng.randrange(4)}"
        self.carry_out(self.core.hint(session, action, names, ttl_ms=ttl_ms))

    def _kept(self, request: Request) -> Iterator[tuple[Group, list[SequenceHash], list[int]]]:
        """Go through the groups: their rules, and a request's names and table."""
        return zip(self.groups, request.names, request.tables, strict=True)

    def _check(self, request: Request) -> None:
        """Require that everything that is about to be used is what it must be."""
        for group, names, table in self._kept(request):
            for index in group.needed(request.computed):
                where = f"{request.name} {group.rule.name} block {index}"
                self.check_block(names[index], table[index], where)

    def _give_names(self, request: Request, first: int, end: int, *, computed: bool = True) -> None:
        """Let the blocks between two tokens be found: of what was loaded, only what a hit needs."""
        for group, names, table in self._kept(request):
            written = range(first // group.size, end // group.size)
            given = written if computed else [i for i in group.needed(end) if i in written]
            for index in given:
                self.pool.give_name(table[index], names[index])
            if given:
                self.say_stored(names, given[0], given[-1] + 1, request.tokens, group)

    def _offer(self, request: Request, number: int, first: int) -> None:
        """Offer what was computed of a group, sometimes in two parts, or only what hits at the end
        need of it."""
        rng, group = self.world.rng, self.groups[number]
        names, table = request.names[number], request.tables[number]
        start, end = first // group.size, len(names)
        if self.has_groups and rng.random() < 0.5:
            start = max(start, *group.needed(self._end(request))[:1], 0)
        middle = rng.choice((start, (start + end) // 2))
        namespace = group.hasher.namespace.digest if self.has_groups else b""
        for begin, stop in ((start, middle), (middle, end)):
            if begin == stop:
                continue
            parent = names[begin - 1] if begin else group.hasher.root
            blocks = table[begin:stop]
            run = OfferRun(parent, tuple(names[begin:stop]), tuple(blocks))
            offer, effects = self.core.offer([run], self.world.now_ms, namespace=namespace)
            if offer is not None:
                self.pool.hold(blocks)
                self.offered[offer] = blocks
            self.carry_out(effects)
