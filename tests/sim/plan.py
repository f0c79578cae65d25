"""The plan of a seed: what there is, how large everything is, and what may go wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tests.sim.kv_groups import ALONE, GROUPINGS, Rule
from tests.sim.shapes import CUTS, WHOLE, Cut

Transfer = Literal["pull", "load", "read", "write", "peer"]
"""Device to arena, arena to device, store to arena, arena to store, arena to arena."""
TRANSFERS: tuple[Transfer, ...] = get_args(Transfer)
Below = Literal["disk", "object", "both"]
"""What is below the host tiers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drawn before the start: sizes, and what may go wrong (each seed another part)."""

    hosts: int
    host_tiers: int
    """Instances on the first host; any other has one."""
    below: Below
    engines: tuple[int, ...]
    """How many each host has."""
    vllm: bool
    """The first engine of each host is one with vLLM's scheduler."""
    overlapped: bool
    """vLLM schedules a step while another one is computed."""
    cut: Cut
    """How blocks are cut, and the shapes of engines."""
    conversations: int
    """How many an engine goes on with: few share much, many overflow every tier."""
    device_blocks: int
    host_slots: int
    disk_slots: int
    """Of the disk, or names that an object tier keeps."""
    object_ttl_ms: int
    listing_lag_ms: float
    counted: bool
    """The arena's size is a number of blocks: it is made when the first engine says hello."""
    staging: bool
    filtered: bool
    pending_max: int
    """Blocks that wait to be written by a tier below the host tiers: few, or as many as come."""
    verified: bool
    """Engines compare checksums after each load."""
    lease_ms: int
    confirm_ms: int
    """How long a host tier waits for the engine's word that it has held what was pulled."""
    crossed: float
    """How often a tier below answers a fill with two blocks in each other's slots."""
    garbled: float
    """How often bytes that another host tier has sent are not those that it holds."""
    dawdles: float
    """How often an engine takes late what was found for it."""
    loss: float
    duplicates: float
    delay_ms: float
    stalls: float
    """How often a message takes much longer than it should."""
    late: Mapping[Transfer, float]
    """… or a transfer of a kind."""
    outbox_max: int
    stream_max: int
    replay_batches: int
    faults: tuple[str, ...]
    fault_every_ms: float
    sizes: tuple[int, ...] = (1,)
    """How many units of 4 KiB the blocks of a host's engines have, in turn."""
    filters: bool = True
    """Host tiers keep a miss filter, and engines read it."""
    aged: bool = False
    """Every counter begins near the end of a type that a reader may have for it."""
    tenants: tuple[str, ...] = ("",)
    """Whose the engines of a host are, in turn."""
    hints: bool = False
    """Plain engines say what becomes of their sessions."""
    copied_least: int = 64
    """Slots that a copier may pin in any arena."""
    groups: tuple[Rule, ...] = ALONE
    """The rules of the KV groups of plain engines."""
    slab_blocks: int = 2
    """How many of the largest blocks a slab surely has room for, where there are several sizes."""

    @property
    def slab_units(self) -> int:
        """Return how long the slabs of arenas and stores are; 0: as the product chooses."""
        return 0 if len(self.sizes) == 1 else (self.slab_blocks + 1) * max(self.sizes)

    def units(self, slots: int) -> int:
        """Return how long a medium is that is called one of so many slots."""
        return max(slots * sum(self.sizes) // 2, 4 * self.slab_units, slots)

    @property
    def part_count(self) -> int:
        """Return the number of a block's parts."""
        return self.cut.grid.count

    @property
    def has_peers(self) -> bool:
        """Return whether a host tier can pull from another one."""
        return self.hosts * self.host_tiers > 1

    @property
    def has_disk(self) -> bool:
        """Return whether there is a disk tier."""
        return self.below != "object"

    @property
    def has_objects(self) -> bool:
        """Return whether there is an object tier."""
        return self.below != "disk"


FAULTS = (
    *("kill host", "kill disk", "kill index", "kill consolidator", "kill engine"),
    *("stop engine", "stop host", "stop disk", "power", "outage", "stream lost", "cut"),
    *("rot disk", "rot arena"),
)
PEER_FAULTS = ("kill reader", "part hosts")
SHARD_FAULTS = ("drain host", "undrain host")
OBJECT_FAULTS = ("kill objects", "stop objects", "vanish", "rot objects", "bucket outage")
DISK_FAULTS = ("kill disk", "stop disk", "rot disk")
ALL_FAULTS = (*FAULTS, *PEER_FAULTS, *SHARD_FAULTS, *OBJECT_FAULTS)


def draw_plan(rng: random.Random, shapes: random.Random) -> Plan:
    """Swarm testing: leaving faults out reaches states that all of them together never would."""
    hosts = rng.choice((1, 1, 1, 2))
    host_tiers = rng.choice((1, 1, 1, 2)) if hosts == 1 else 1
    below: Below = rng.choice(("disk", "disk", "disk", "object", "both"))
    counted = rng.random() < 0.2
    staging = not counted and below != "object" and rng.random() < 0.2
    verified = rng.random() < 0.5
    rough = rng.random() < 0.6
    has_peers = hosts * host_tiers > 1
    sizes = rng.choice(((1,), (1,), (1,), (1, 3), (3, 1), (2, 1, 5)))
    return Plan(
        hosts=hosts,
        host_tiers=host_tiers,
        below=below,
        engines=_draw_engines(rng, hosts, has_peers=has_peers, several=len(sizes) > 1),
        vllm=rng.random() < 0.4,
        overlapped=rng.random() < 0.6,
        cut=shapes.choice(CUTS) if rng.choice((1, 1, 2)) > 1 else WHOLE,
        conversations=rng.choice((3, 6, 12)),
        device_blocks=rng.randint(16, 36),
        host_slots=rng.choice((rng.randint(8, 30), rng.randint(30, 80))),
        disk_slots=rng.randint(10, 90),
        object_ttl_ms=rng.choice((0, 0, 4_000)),
        listing_lag_ms=rng.choice((0.0, 0.0, 1_000.0)),
        counted=counted,
        staging=staging,
        filtered=rng.random() < 0.2,
        pending_max=shapes.choice((4, 12, 65_536)),
        verified=verified,
        lease_ms=rng.choice((800, 2_000, 5_000)),
        confirm_ms=rng.choice((300, 2_000)),
        crossed=rng.choice((0.0, 0.0, 0.3)),
        garbled=rng.choice((0.0, 0.1)),
        dawdles=rng.choice((0.0, 0.1, 0.3)),
        loss=rng.choice((0.002, 0.02)) if rough else 0.0,
        duplicates=rng.choice((0.0, 0.05)) if rough else 0.0,
        delay_ms=rng.choice((0.5, 3.0, 20.0)),
        stalls=rng.choice((0.0, 0.01, 0.05)) if rough else 0.0,
        late={kind: rng.choice((0.0, 0.05, 0.4)) for kind in TRANSFERS},
        outbox_max=rng.choice((8, 10_000)),
        stream_max=rng.choice((20, 10_000)),
        replay_batches=rng.choice((5, 10_000, 10_000)),
        faults=_draw_faults(rng, below, hosts=hosts, host_tiers=host_tiers, verified=verified),
        fault_every_ms=rng.choice((700.0, 2_500.0)),
        sizes=sizes,
        slab_blocks=rng.choice((1, 2, 3)),
        filters=shapes.random() < 0.8,
        tenants=shapes.choice((("",), ("",), ("", "gold"), ("gold", "silver", ""))),
        hints=shapes.random() < 0.3,
        copied_least=shapes.choice((1, 2, 5, 64)),
        groups=shapes.choice(GROUPINGS) if shapes.random() < 0.4 else ALONE,
    )


def _draw_engines(
    rng: random.Random, hosts: int, *, has_peers: bool, several: bool
) -> tuple[int, ...]:
    """Return how many engines each host has: two or more where blocks have several sizes."""
    if hosts > 1:
        return (2, 2) if several else (1, 1)
    counts = (2, 3) if has_peers or several else (1, 2, 2)
    return (rng.choice(counts),)


def _draw_faults(
    rng: random.Random, below: Below, *, hosts: int, host_tiers: int, verified: bool
) -> tuple[str, ...]:
    """Choose among what can happen in this world."""
    impossible: set[str] = set()
    if not verified:
        impossible.add("rot arena")  # What rots in the arena only engines find.
    if hosts == 1:
        impossible.add("part hosts")
    if hosts * host_tiers == 1:
        impossible.add("kill reader")
    if host_tiers == 1:
        impossible.update(SHARD_FAULTS)
    if below == "disk":
        impossible.update(OBJECT_FAULTS)
    if below == "object":
        impossible.update(DISK_FAULTS)
    return tuple(f for f in ALL_FAULTS if rng.random() < 0.4 and f not in impossible)
