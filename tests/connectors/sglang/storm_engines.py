"""Engines of a storm, what is known of what they have stored, and what has been wrong."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvbm_connectors.sglang import engine_life
from kvbm_connectors.sglang.options import Options, Stream
from kvbm_connectors.sglang.storage import Storage

from tests.connectors.sglang.pool import Config, Pool
from tests.vllm.harness import LiveStack

DEADLINE_MS, PATIENCE_MS = 1_000, 8_000
"""For questions and offers of a stormy program, and of a calm one."""
CALL_S = 2 * DEADLINE_MS / 1000 + 2.5
"""The longest call: a write waits for its pull and then for an answer. Both have a margin."""
ATTACH_S, GATE_S = 30.0, 120.0
THREADS = 2
"""Threads of a rank."""
OWN_PAGES = 16
"""Pages of a thread in each pool."""
ODD = ("KeyError", "UnknownPool", "ValueError")
"""Errors of calls to a storage that is closed, and of calls that SGLang should not make."""
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A model as its engines have it. Two of one kind share pages."""

    model: str
    layout: str = "page_first"
    page_size: int = 64
    ranks: int = 1
    mla: bool = False
    has_states: bool = False
    """A draft and states beside its KV."""


class Gate:
    """A gate that many pass at once. Who closes it waits until they are through, and they wait for
    it to open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Pass the gate, and keep it from closing."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._closed, GATE_S), "a gate stays closed"
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate when nobody is inside."""
        with self._changed:
            assert not self._closed, "a gate is closed twice"
            self._closed = True
            assert self._changed.wait_for(lambda: not self._inside, GATE_S), "a call does not end"
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class FlushedPool(Pool):
    """A host pool with a table, which a flush replaces."""

    def flush(self) -> None:
        """Replace the table, as SGLang does when it clears the pool."""
        self.slot_used = object()


@dataclass(slots=True)
class Rank:
    """A storage and its pools, which outlive it."""

    number: int
    pools: dict[str, FlushedPool]
    storage: Storage


@dataclass(slots=True)
class Engine:
    """An engine: its ranks, and the name of its weights where they are its own."""

    number: int
    kind: Kind
    ranks: list[Rank] = field(default_factory=list)
    own_weights: str = ""
    gate: Gate = field(default_factory=Gate)
    """Closed while it flushes: nothing is on its way then."""

    def stores(self, rank: Rank) -> bool:
        """Return whether a rank stores its pages itself."""
        return rank.number == 0 or not self.kind.mla


@dataclass(slots=True)
class Storm:
    """All engines on one stack."""

    stack: LiveStack
    seed: int
    is_calm: bool
    engines: list[Engine] = field(default_factory=list)
    weights: int = 0
    """How often all of them have cleared."""
    everybody: Gate = field(default_factory=Gate)
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: set[Key] = field(default_factory=set)
    """Pages of which a write has begun."""
    counts: Counter[str] = field(default_factory=Counter)
    longest_s: dict[str, float] = field(default_factory=dict)
    """Call → the longest time of one."""
    errors: list[str] = field(default_factory=list)
    turns: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def add(self, kind: Kind) -> None:
        """Attach an engine of a kind."""
        self.engines.append(engine := Engine(len(self.engines), kind))
        count, size = THREADS * OWN_PAGES, kind.page_size
        for number in range(kind.ranks):
            pools = {"kv": FlushedPool(kind.layout, mla=kind.mla, pages=count, page_size=size)}
            if kind.has_states:
                pools["mamba"] = FlushedPool(pages=count, page_size=1)
                pools["draft"] = FlushedPool(kind.layout, pages=count, page_size=size)
            for pool in pools.values():
                pool.flush()
            engine.ranks.append(Rank(number, pools, self.attach(engine, number, pools)))

    def attach(self, engine: Engine, rank: int, pools: dict[str, FlushedPool]) -> Storage:
        """Return a storage of these pools. Only engines whose weights are pushed flush here."""
        kind, settings = engine.kind, self.stack.settings
        os.environ[engine_life.RUN] = f"{self.seed}/{engine.number}"  # As SGLang draws one.
        wait_ms = PATIENCE_MS if self.is_calm else DEADLINE_MS
        extra = {
            "interface_v1": 1, "plain_reset": "forget",
            "runtime_dir": str(settings.runtime_dir), "state_dir": str(settings.state_dir),
            "onboard_deadline_ms": wait_ms, "offer_deadline_ms": wait_ms,
        }  # fmt: skip
        config = Config(
            tp_rank=rank, tp_size=kind.ranks, is_mla_model=kind.mla,
            model_name=f"{kind.model} {self.seed}", extra_config=extra,
        )  # fmt: skip
        storage = Storage(config, Options.read(extra), Stream())
        for name, pool in pools.items():
            storage.register(pool, name)
        storage.start()
        return storage

    def wait_attached(self) -> None:
        """Wait until every storage has found the services."""
        for engine in self.engines:
            for rank in engine.ranks:
                assert rank.storage.wait_attached(ATTACH_S), f"engine {engine.number} is away"

    def close(self) -> None:
        """Detach all, and look at what they have counted."""
        for engine in self.engines:
            for rank in engine.ranks:
                self._look_at(rank.storage.all_counts())
                rank.storage.close()

    def _look_at(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            is_failure = name.startswith("failed.") and not name.endswith(ODD)
            if count and (is_failure or "core_faults" in name):
                self.wrong(f"{count} {name}")

    # --- pages ------------------------------------------------------------------------------

    def key(self, engine: Engine, rank: Rank, pool: str, key: str) -> Key:
        """Return what a page's bytes follow from."""
        part = 0 if engine.kind.mla else rank.number
        return (engine.kind.model, str(part), pool, f"{self.weights}{engine.own_weights}", key)

    def content(self, of: Key) -> int:
        """Return the seed of a page's bytes."""
        digest = hashlib.sha256(f"{self.seed} {of}".encode()).digest()
        return int.from_bytes(digest[:6])

    def share(self, one: Engine, other: Engine) -> bool:
        """Return whether two engines find each other's pages."""
        if self.weights and one.kind.mla:
            return one is other  # Cleared pages of latent attention have their engine's name.
        return (one.kind, one.own_weights) == (other.kind, other.own_weights)

    # --- what was wrong ---------------------------------------------------------------------

    def wrong(self, what: str) -> None:
        """Note an error, and end the program."""
        with self.lock:
            self.errors.append(what)
        self.over.set()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long a call takes, which has a bound."""
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        with self.lock:
            self.longest_s[what] = max(took_s, self.longest_s.get(what, 0.0))
            self.counts[what] += 1
        if took_s > CALL_S and not self.is_calm:
            self.wrong(f"{what} took {took_s:.1f} s")
