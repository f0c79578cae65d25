"""A storm of faults: a real core, store and mover, whose system calls fail as a plan draws it.

`python -m tests.services.disk_tier.faults.storm DIRECTORY PLAN --faults N --seed S` runs below the
shim. The outside world is a model: it offers blocks, reads them, restarts the tier, and knows which
bytes each block has and what was announced. It prints what it has counted, as JSON, and fails where

    a block is said to be right and is not           wrong bytes are served
    a block that was announced is gone               without a fault in what it was made of
    the disk does not work once nothing fails        with a reason that stays
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path

from kvbm_common.checksum import block_checksum
from kvbm_common.memory.arena import Arena
from kvbm_common.nixl.mover_thread import MoverThread
from kvbm_common.runtime.loop import monotonic_ms
from kvbm_common.runtime.metrics import Metrics
from kvbm_common.tier.announcer import Announcer
from kvbm_common.tier.slots import Block
from kvbm_common.wire.events import Cleared, Event, Removed, Stored
from kvbm_common.wire.verbs import ArenaReply, FillReply, FillRequest, FillSlot, LeaseReply
from kvbm_disk_tier.core import effects as wanted
from kvbm_disk_tier.core import messages as said
from kvbm_disk_tier.core.core import DiskTierCore
from kvbm_disk_tier.core.frequency_filter import FrequencyFilter
from kvbm_disk_tier.core.limits import DiskTierLimits
from kvbm_disk_tier.shell.file_medium import FileMedium
from kvbm_disk_tier.shell.mover import DiskMover
from kvbm_disk_tier.shell.queue_depth import Tuning
from kvbm_disk_tier.shell.store import Store
from kvbm_disk_tier.shell.store_options import StoreOptions
from kvbm_disk_tier.shell.store_thread import StoreThread

from tests.services.disk_tier.faults.plan import SITES, Plan
from tests.services.disk_tier.helpers import NAMESPACE, leased_slot, name

SLOT_BYTES = 16384
BLOCKS = 40
DISK_SLOTS = 24
FILL_SLOTS = 8
LIMITS = DiskTierLimits(batch_blocks_max=4, journal_wait_ms=0, journal_records_per_slot=2)
RESTART_EVERY = 400
"""Steps of a life."""
SETTLE_STEPS = 200
COLD_STARTS = 0.3
"""Lives that find an empty directory."""


def content(number: int) -> bytes:
    """Return what a block holds: no two pages of any two blocks are alike."""
    pages = range(SLOT_BYTES // 4096)
    return b"".join(f"{number}.{page}.".encode().ljust(64, b"x") * 64 for page in pages)


SUMS = {number: block_checksum(content(number)) for number in range(1, BLOCKS + 1)}


def block(number: int) -> Block:
    """Return a block with the checksum of its bytes."""
    return Block(name(number), name(number - 1), NAMESPACE, SUMS[number], SLOT_BYTES)


class Life:
    """One life of the tier, its effects carried out by the real medium."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        options = StoreOptions(
            directory=world.directory / "store", capacity_bytes=0, slot_count=DISK_SLOTS,
            journal_records_per_slot=LIMITS.journal_records_per_slot,
            sync=world.random.choice(["commit", "commit", "interval"]),
        )  # fmt: skip
        mover = DiskMover(mover=MoverThread("storm", backends=("POSIX",)), counters=Metrics())
        self.medium = FileMedium(StoreThread(Store(options)), mover, Tuning(queue_depth=16))
        self.core = DiskTierCore(
            host="h", instance="0", epoch=epoch, limits=LIMITS,
            frequency_filter=FrequencyFilter(enabled=False),
        )  # fmt: skip
        self.announced: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.carry_out(self.core.start())

    async def begin(self) -> None:
        """Recover, and map the arena."""
        found = await self.medium.recover()
        if found is not None:
            self.step(found)
        reply = self.world.arena_reply()
        self.medium.use_arena(reply)
        self.step(said.ArenaKnown(reply))
        await self.settle()

    def step(self, event: said.Input) -> None:
        """Take one input."""
        effects = self.core.step(event, self.world.now_ms)
        self.core.check()
        self.carry_out(effects)

    def carry_out(self, effects: Sequence[wanted.Effect]) -> None:
        """Do what the core wants."""
        for effect in effects:
            outcome = self._carry_out(effect)
            if outcome is not None:
                task = asyncio.create_task(self._follow(outcome))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    def _carry_out(self, effect: wanted.Effect) -> Awaitable[said.Input | None] | None:
        match effect:
            case wanted.OpenStore(slot_bytes):
                return self.medium.open(slot_bytes)
            case wanted.ProbeStore():
                return self.medium.probe(effect)
            case wanted.RewriteJournal():
                return self.medium.rewrite(effect)
            case wanted.AppendJournal():
                return self.medium.append(effect)
            case wanted.WriteSlots():
                return self.medium.write(effect)
            case wanted.ReadSlots():
                return self._read(effect)
            case wanted.LeaseHost():
                return self._lease(effect)
            case wanted.ReleaseHost(write):
                return self._soon(said.Released(write, valid=True))
            case wanted.AnnounceLater():
                return self._soon(said.AnnounceMore())
            case wanted.Publish(event):
                self._publish(event)
            case wanted.Answer(_, reply):
                self.world.answered(reply)
            case _:
                pass
        return None

    async def _read(self, effect: wanted.ReadSlots) -> said.ReadDone | said.ReadFailed:
        """Read; a block that is found corrupt is so in the file, too."""
        done = await self.medium.read(effect)
        if isinstance(done, said.ReadDone):
            entries = zip(effect.sources, effect.blocks, done.intact, strict=True)
            for slot, wanted_block, intact in entries:
                number = int.from_bytes(wanted_block.hash, "big")
                if not intact and self.world.in_file(slot) == content(number):
                    raise AssertionError(f"block {number} is lost, and in order in slot {slot}")
        return done

    async def _soon(self, event: said.Input) -> said.Input:
        await asyncio.sleep(0)
        return event

    async def _lease(self, effect: wanted.LeaseHost) -> said.Input:
        slots = [
            leased_slot(number, checksum=SUMS[number], bytes=SLOT_BYTES)
            for number in (int(text, 16) for text in effect.request.hashes)
        ]
        return said.Leased(effect.write, LeaseReply(lease=effect.write, slots=slots))

    async def _follow(self, outcome: Awaitable[said.Input | None]) -> None:
        event = await outcome
        if event is not None:
            self.step(event)

    def _publish(self, event: Event) -> None:
        match event:
            case Cleared():
                self.announced.clear()
            case Stored(runs=runs):
                self.announced |= {int(text, 16) for run in runs for text in run.hashes}
            case Removed(hashes=hashes, reason=reason):
                gone = {int(text, 16) for text in hashes}
                self.announced -= gone
                self.world.counts[f"removed.{reason}"] += len(gone)

    async def settle(self) -> None:
        """Wait until everything in flight has ended."""
        while self.tasks:
            await asyncio.wait(self.tasks)
            for task in list(self.tasks):
                if task.done():
                    task.result()

    async def end(self) -> None:
        """End as a process does that is killed: nothing is said, and the files stay as they are."""
        await self.settle()
        self.medium.close()


class World:
    """The host tier, the clock and the truth."""

    def __init__(self, directory: Path, plan: Plan, seed: int) -> None:
        self.directory, self.plan = directory, plan
        self.random = random.Random(seed)
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.skipped_ms = 0
        slots = BLOCKS + 1 + FILL_SLOTS
        self.arena = Arena.create("/dev/shm", f"kvbm-storm-{os.getpid()}", slots * SLOT_BYTES)
        for number in SUMS:
            self.arena.view(number * SLOT_BYTES, SLOT_BYTES)[:] = content(number)
        self.host = Announcer(host="h", source="host-tier-0", tier="host", epoch=1)
        self.asked = itertools.count(1)

    @property
    def now_ms(self) -> int:
        """The clock; pauses are skipped, not waited for."""
        return monotonic_ms() + self.skipped_ms

    def arena_reply(self) -> ArenaReply:
        return ArenaReply(
            path=str(self.arena.path), bytes=self.arena.bytes, slot_bytes=SLOT_BYTES,
            slot_count=BLOCKS + 1 + FILL_SLOTS, epoch=1, instance="0",
        )  # fmt: skip

    def in_file(self, slot: int) -> bytes:
        """Return the bytes of a slot, by a process whose calls do not fail."""
        path = self.directory / "store/slots"
        command = ["dd", f"if={path}", f"bs={SLOT_BYTES}", f"skip={slot}", "count=1", "status=none"]
        environ = {"PATH": os.environ["PATH"]}
        return subprocess.run(command, env=environ, check=True, capture_output=True).stdout

    def answered(self, reply: object) -> None:
        """Compare every block that a fill says is right."""
        assert not isinstance(reply, FillReply) or reply.slots, "an answer has entries"
        for slot in reply.slots if isinstance(reply, FillReply) else ():
            if not slot.ok:
                self.counts[f"fill.{slot.reason}"] += 1
                continue
            number = int(slot.hash, 16)
            found = bytes(self.arena.view(slot.slot * SLOT_BYTES, SLOT_BYTES))
            assert found == content(number), f"block {number}: wrong bytes were served"
            self.counts["served"] += 1

    async def fill(self, life: Life, numbers: Sequence[int]) -> None:
        """Ask for blocks, and wait for the answer: the slots are used again."""
        first = BLOCKS + 1
        for i in range(len(numbers)):
            self.arena.view((first + i) * SLOT_BYTES, SLOT_BYTES)[:] = b"\xee" * SLOT_BYTES
        slots = [FillSlot(hash=name(n).hex(), slot=first + i) for i, n in enumerate(numbers)]
        request = FillRequest(epoch=1, until_ms=self.now_ms + 60_000, slots=slots)
        life.step(said.FillAsked(next(self.asked), request))
        await life.settle()

    async def live(self, life: Life, steps: int) -> None:
        """Let things happen."""
        for _ in range(steps):
            some = self.random.sample(sorted(SUMS), self.random.randint(1, 6))
            match self.random.randint(0, 6):
                case 0 | 1 | 2:
                    for event in self.host.stored([block(number) for number in some]):
                        life.step(said.HostEvent("0", event))
                case 3 | 4:
                    here = sorted(life.announced) or some
                    some = self.random.sample(here, min(len(here), self.random.randint(1, 6)))
                    await self.fill(life, some)
                case 5:
                    life.step(said.Synchronised(await life.medium.synchronise()))
                case _:
                    self.skipped_ms += self.random.choice([1_000, 5_000, 61_000])
                    life.step(said.Tick())
            if self.random.random() < 0.3:
                await life.settle()
            self.counts["not ready"] += not life.core.view.statistics().ready

    async def check_nothing_is_lost(self, life: Life) -> None:
        """Without faults: what was announced is there, and has its bytes or was damaged."""
        for number in sorted(life.announced):
            await self.fill(life, [number])

    async def heal(self, life: Life) -> None:
        """Let pauses pass until the disk works; it must, since nothing fails."""
        for _ in range(SETTLE_STEPS):
            await life.settle()
            if life.core.view.statistics().ready:
                return
            self.skipped_ms += 5_000
            life.step(said.Tick())
        raise AssertionError(f"it does not heal: {life.core.view.statistics().reasons}")

    async def begin_without_each_call(self) -> None:
        """Begin a life in an empty directory for each kind of call, which fails until it has begun.

        Some calls are made only here, and once: a storm hits them by luck.
        """
        for epoch, site in enumerate(SITES, 1):
            life = Life(self, epoch)
            self.plan.fail_at(site)
            await life.begin()
            self.plan.end()
            await self.heal(life)
            await life.end()
            shutil.rmtree(self.directory / "store")

    async def run(self, faults: int) -> None:
        """Live life after life, until so many faults have happened."""
        await self.begin_without_each_call()
        before: set[int] = set()
        first = len(SITES) + 1
        for epoch in itertools.count(first):
            life = Life(self, epoch)
            faulty_start = self.random.random() < 0.5
            if faulty_start:
                self.plan.begin(rate=0.15, seed=self.seed)
            await life.begin()
            self.plan.end()
            await self.heal(life)
            if epoch > first:
                lost = before - life.announced
                assert not lost, f"life {epoch} has lost {sorted(lost)}: {self.counts}"
                self.counts["restarts"] += 1
                self.counts["restarts with faults"] += faulty_start
            await self.check_nothing_is_lost(life)
            if self.plan.total >= faults:
                self.counts["blocks at the end"] = len(life.announced)
                await life.end()
                return
            self.plan.begin(rate=self.random.choice([0.02, 0.1, 0.3]), seed=self.seed)
            await self.live(life, RESTART_EVERY)
            if self.random.random() < 0.5:
                self.plan.end()
                await self.heal(life)
            else:
                await life.settle()
            before = set(life.announced)
            self.plan.end()
            await life.end()
            if self.random.random() < COLD_STARTS:
                shutil.rmtree(self.directory / "store")
                before = set()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    plan = Plan(given.plan)
    world = World(given.directory, plan, given.seed)
    try:
        await world.run(given.faults)
    finally:
        world.arena.close()
    json.dump({"faults": plan.faults, "counts": dict(world.counts)}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
