"""Admission: what the frequency filter's decay step costs and brings, on loads with a clock.

Host memory before a disk of ten times its size. Each request hits its leading blocks in either;
blocks that the host takes in, or hits, are seen by the filter unless the disk has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvbm_cli.replay import ROOT, Chain, requests_of
from kvbm_common.eviction import EvictionPolicy, make_policy
from kvbm_common.identity import SequenceHash
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter

from benchmarks.eviction_loads import pausing_agents
from benchmarks.harness import Row

SEED = 1
HOURS = 8
HOST_SHARE = 48
"""Host memory has one part in so many of the distinct blocks: those of ten minutes."""
DISK_HOSTS = 10
"""The disk has so many times the slots of host memory."""
LOADS = ((0, 5), (0, 15), (0, 30), (0, 60), (0, 120), (2, 30))
"""Quick calls beyond the first between two pauses, on average; and minutes of a pause."""
STEPS_MIN = (60, 240, 720)
KVBM_STEP_MIN = 10
POLICY = "lru"


@dataclass
class Tier:
    """The blocks of one tier, and the policy that evicts them."""

    slot_count: int
    policy: EvictionPolicy = field(default_factory=lambda: make_policy(POLICY))
    here: set[SequenceHash] = field(default_factory=set)

    def take(self, chain: Chain, places: Sequence[int]) -> None:
        """Take these blocks of a chain, leaf freed first; as far as there is room."""
        new = [place for place in places if chain[place] not in self.here]
        short = len(new) + len(self.here) - self.slot_count
        if short > 0:
            for name in self.policy.victims(short):
                self.policy.forget(name)
                self.here.remove(name)
        del new[self.slot_count - len(self.here) :]
        for place in new:
            self.policy.admit(chain[place], chain[place - 1] if place else ROOT)
            self.policy.hold(chain[place])
            self.here.add(chain[place])
        for place in reversed(new):
            self.policy.free(chain[place])

    def use(self, names: Sequence[SequenceHash]) -> None:
        """Count a use of blocks that are here."""
        for name in names:
            self.policy.touch(name)
            self.policy.hold(name)
        for name in reversed(names):
            self.policy.free(name)


@dataclass
class Outcome:
    """Blocks by what became of them."""

    asked: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    written: int = 0

    @property
    def hits(self) -> int:
        """Return the blocks that hit in either tier."""
        return self.host_hits + self.disk_hits


def replay(
    requests: Sequence[tuple[int, Chain]], step_ms: int | None, *, host: int, disk: int
) -> Outcome:
    """Replay requests (time, chain) with a filter of this decay step; None: without one."""
    frequency_filter = FrequencyFilter(enabled=step_ms is not None)
    frequency_filter.change(enabled=None, pass_count=None, decay_ms=step_ms)
    arena, store, outcome = Tier(host), Tier(disk), Outcome()
    for now_ms, chain in requests:
        hits = leading(chain, lambda name: name in arena.here or name in store.here)
        in_host = [name for name in chain[:hits] if name in arena.here]
        filled = [name for name in chain[:hits] if name not in arena.here]
        outcome.asked += len(chain)
        outcome.host_hits += len(in_host)
        outcome.disk_hits += len(filled)
        arena.use(in_host)
        store.use(filled)
        arena.take(chain, range(len(chain)))
        absent = [place for place, name in enumerate(chain) if name not in store.here]
        passing = [at for at in absent if frequency_filter.see(chain[at], now_ms)]
        outcome.written += len(passing)
        store.take(chain, passing)
    return outcome


def leading(chain: Chain, is_here: Callable[[SequenceHash], bool]) -> int:
    """Return how many leading blocks of a chain are here."""
    return next((depth for depth, name in enumerate(chain) if not is_here(name)), len(chain))


def timed(load: Sequence[tuple[float, Sequence[int]]]) -> list[tuple[int, Chain]]:
    """Name the blocks of a load whose times are in seconds."""
    chains = requests_of(ids for _, ids in load).chains
    return [(int(at_s * 1000), chain) for (at_s, _), chain in zip(load, chains, strict=True)]


def run() -> list[Row]:
    """Every pause with every step, and without a filter; beside KVBM's step of ten minutes."""
    return [row for burst, pause_min in LOADS for row in _rows(burst, pause_min)]


def _rows(burst: int, pause_min: int) -> Iterator[Row]:
    load = timed(pausing_agents(HOURS, SEED, pause_s=60 * pause_min, burst=burst))
    host = len({name for _, chain in load for name in chain}) // HOST_SHARE

    def found(step_min: int | None) -> tuple[float, int]:
        step_ms = None if step_min is None else step_min * 60_000
        outcome = replay(load, step_ms, host=host, disk=DISK_HOSTS * host)
        return 100 * outcome.hits / outcome.asked, outcome.written

    reference, least = found(KVBM_STEP_MIN)
    for step_min in (*STEPS_MIN, None):
        hit, written = found(step_min)
        step = "no filter" if step_min is None else f"a step of {step_min} min"
        yield Row(
            name=f"{1 + burst} calls, then {pause_min} min; {step}: hits, {written:,} blocks "
            f"written (reference: {KVBM_STEP_MIN} min, {least:,} written)",
            unit="%", value=round(hit, 1), reference=round(reference, 1),
            ratio=round(hit / reference, 2), target=1 if step_min else None,
            met=hit >= reference if step_min else None,
        )  # fmt: skip
