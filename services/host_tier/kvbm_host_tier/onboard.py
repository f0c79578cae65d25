"""Onboard, G2 (and G3 and G4 through G2) → G1: answer lookups with leased slots.

A lookup is walked from its first block on. Each block is either here (pin it), below (stage a
slot and have it filled), being filled already (wait with the others), or the end of the run. The
answer goes out once: when all is here, or at its deadline with the prefix that is here by then.
Blocks that arrive after the answer stay: they have been promoted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvbm_common.identity import SequenceHash, hash_from_hex, hashes_to_hex
from kvbm_common.slots import Block
from kvbm_common.wire.admin import PrefetchReply
from kvbm_common.wire.events import Tier as WireTier
from kvbm_common.wire.local import Found, Lookup
from kvbm_common.wire.verbs import (
    FILL_GRACE_MS,
    ErrorBody,
    FilledSlot,
    FillRequest,
    FillSlot,
    Hits,
)

from kvbm_host_tier.messages import (
    Answer,
    AskFill,
    EngineId,
    FillDone,
    FillFailed,
    TellHits,
    ToEngine,
)
from kvbm_host_tier.tier import Tier

HITS_MAX = 1024
"""At most this many hits are told per lookup; the rest are told the next time."""

OPERATOR = EngineId("operator", "")
"""Whose prefetches are; no engine has an empty incarnation."""

NOT_ON_DISK = ("gone", "corrupt")
"""The disk tier's own word that it does not have a block; any other failure may pass."""


@dataclass(slots=True)
class OnboardState:
    """A lookup that waits for fills. `slots[i]` is None until block i is here and pinned."""

    engine: EngineId
    connection: bytes
    lookup: int
    hashes: list[SequenceHash]
    slots: list[int | None]
    answer_by_ms: int
    lease_until_ms: int
    run: int
    """Blocks of the run that may still be had; shrinks when a fill fails."""
    block_tokens: int
    came_from: dict[int, WireTier] = field(default_factory=dict)
    """Where blocks of the run came from that were not here."""
    reason: str = ""
    reply_to: int = 0
    """An operator's prefetch: it is answered there, and nothing stays pinned."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A request to a disk tier: staged slots lent to it."""

    tier: WireTier
    instance: str
    slots: dict[SequenceHash, int]
    until_ms: int
    ahead: int = 0
    """Blocks of the same run that were asked for before these."""


class Onboard:
    """All lookups that are not answered yet, and all fills in flight."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._states: dict[int, OnboardState] = {}
        self._waiting: dict[SequenceHash, list[tuple[int, int]]] = {}
        """Block on its way in → (onboard, index in its run) of each that waits for it."""
        self._fills: dict[int, Fill] = {}
        self._lent: list[tuple[int, Fill]] = []
        """(reusable from, fill) of fills without an answer: the disk tier may still read."""
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._states)

    def looked_up(
        self,
        connection: bytes,
        lookup: Lookup,
        hashes: list[SequenceHash],
        now_ms: int,
        *,
        block_tokens: int,
    ) -> None:
        """An engine asks which run of these blocks it can have."""
        if len(self._states) >= self._tier.limits.lookups_max:
            self._tier.counts["dropped.lookup_busy"] += 1
            self._refuse(connection, lookup, "busy")
            return
        state = OnboardState(
            engine=EngineId(lookup.engine, lookup.incarnation),
            connection=connection,
            lookup=lookup.lookup,
            hashes=hashes,
            slots=[],
            answer_by_ms=now_ms + lookup.deadline_ms,
            lease_until_ms=now_ms + lookup.lease_ms,
            run=0,
            block_tokens=block_tokens,
        )
        here = self._begin(state, now_ms)
        self._tell_hits(lookup, state.hashes[:here])  # The engine waits, the disk tier does not.

    def prefetch(
        self, reply_to: int, hashes: list[SequenceHash], now_ms: int, *, deadline_ms: int
    ) -> None:
        """An operator wants the leading blocks of a run here."""
        refusal = "busy" if len(self._states) >= self._tier.limits.lookups_max else ""
        if self._tier.draining:
            refusal = "draining"
        if refusal:
            text = "this host tier takes no prefetch now"
            self._tier.emit(Answer(reply_to, ErrorBody(code=refusal, message=text)))
            return
        state = OnboardState(
            engine=OPERATOR,
            connection=b"",
            lookup=0,
            hashes=hashes,
            slots=[],
            answer_by_ms=now_ms + deadline_ms,
            lease_until_ms=now_ms,
            run=0,
            block_tokens=0,
            reply_to=reply_to,
        )
        self._begin(state, now_ms)

    def _begin(self, state: OnboardState, now_ms: int) -> int:
        """Pin what is here, have filled what is below; returns how many blocks were here."""
        here = self._pin_prefix(state)
        fills = self._walk_rest(state, now_ms)
        if not fills and None not in state.slots:
            self._answer(state)
        else:
            self._wait(state, fills, now_ms)
        return here

    def _pin_prefix(self, state: OnboardState) -> int:
        """Pin the leading blocks that are here: the common case, kept short."""
        state.slots += self._tier.table.pin_prefix(state.hashes)
        state.run = len(state.slots)
        return state.run

    def _walk_rest(self, state: OnboardState, now_ms: int) -> list[SequenceHash]:
        """Go on where the host's own prefix ends; returns the blocks to be filled from disk."""
        table, below = self._tier.table, self._tier.below
        fills: list[SequenceHash] = []
        for name in state.hashes[state.run :]:
            slot = table.find(name)
            if slot is not None:
                table.pin(slot, used=True)
            elif below.usable(name, now_ms) and not table.is_staging(name):
                fills.append(name)
            elif name not in self._waiting:
                break
            state.slots.append(slot)
        state.run = len(state.slots)
        if state.run < len(state.hashes):
            state.reason = "not_stored"
        return self._fit(state, fills)

    def _fit(self, state: OnboardState, fills: list[SequenceHash]) -> list[SequenceHash]:
        """Cut the run at the first fill for which there is no slot."""
        if not fills:
            return fills
        room = self._tier.make_room(len(fills))
        if room == len(fills):
            return fills
        self._tier.counts["dropped.fill_no_room"] += len(fills) - room
        self._cut(state, state.hashes.index(fills[room]), "no_room")
        return fills[:room]

    def _wait(self, state: OnboardState, fills: list[SequenceHash], now_ms: int) -> None:
        onboard_id = self._next_id
        self._next_id += 1
        self._states[onboard_id] = state
        self._start_fills(state, fills, now_ms)
        for index in range(state.run):
            if state.slots[index] is None:
                self._waiting.setdefault(state.hashes[index], []).append((onboard_id, index))
        self._answer_if_complete(onboard_id)

    # --- fills ------------------------------------------------------------------------------

    def _start_fills(self, state: OnboardState, names: Sequence[SequenceHash], now_ms: int) -> None:
        """Batches, prefix first, each to one disk tier; they are in flight side by side."""
        table, batch_max = self._tier.table, self._tier.limits.batch_blocks_max
        by_source: dict[tuple[WireTier, str], list[SequenceHash]] = {}
        for name in names:
            by_source.setdefault(self._tier.below.source(name, now_ms), []).append(name)
        for (tier, instance), wanted in by_source.items():
            for start in range(0, len(wanted), batch_max):
                slots: dict[SequenceHash, int] = {}
                for name in wanted[start : start + batch_max]:
                    slot = table.stage(name)
                    assert slot is not None
                    slots[name] = slot
                    self._tier.diary.note(now_ms, f"staged in slot {slot} for a fill", name)
                self._ask(Fill(tier, instance, slots, state.answer_by_ms, ahead=start))

    def _ask(self, fill: Fill) -> None:
        request = FillRequest(
            epoch=self._tier.announcer.epoch,
            until_ms=fill.until_ms,
            slots=[FillSlot(hash=name.hex(), slot=slot) for name, slot in fill.slots.items()],
            ahead=fill.ahead,
        )
        self._fills[self._next_id] = fill
        self._tier.emit(AskFill(self._next_id, fill.instance, request, fill.tier))
        self._next_id += 1

    def fill_done(self, event: FillDone, now_ms: int) -> None:
        """A disk tier has answered; whatever it did not mention has failed."""
        fill = self._fills.pop(event.fill)
        answered = {hash_from_hex(filled.hash): filled for filled in event.reply.slots}
        blocks: list[Block] = []
        for name, slot in fill.slots.items():
            filled = answered.get(name)
            if filled is not None and filled.ok and filled.slot == slot:
                blocks.append(self._arrived(fill, name, filled, now_ms))
            else:
                self._tier.table.abort(slot)
                reason = filled.reason if filled is not None else "no_answer"
                self._missing(fill, name, reason, now_ms)
        self._tier.announce_stored(blocks)

    def fill_failed(self, event: FillFailed, now_ms: int) -> None:
        """No answer. Unless that is settled, the slots stay lent until the disk tier is done."""
        fill = self._fills.pop(event.fill)
        if event.settled:
            self._take_back(fill)
        else:
            for slot in fill.slots.values():
                self._tier.table.abandon(slot)
            self._lent.append((max(now_ms, fill.until_ms) + FILL_GRACE_MS, fill))
        for name in fill.slots:
            self._missing(fill, name, event.reason, now_ms)

    def disk_restarted(self, tier: WireTier, instance: str) -> None:
        """A disk tier has begun a new life: its old one reads no more."""
        for entry in self._lent[:]:
            if (entry[1].tier, entry[1].instance) == (tier, instance):
                self._lent.remove(entry)
                self._take_back(entry[1])

    def _take_back(self, fill: Fill) -> None:
        for slot in fill.slots.values():
            self._tier.table.abort(slot)

    def _arrived(self, fill: Fill, name: SequenceHash, filled: FilledSlot, now_ms: int) -> Block:
        table, slot = self._tier.table, fill.slots[name]
        parent = hash_from_hex(filled.parent)
        block = Block(name, parent, bytes.fromhex(filled.namespace), filled.checksum, filled.bytes)
        table.register(slot, block)
        self._tier.diary.note(now_ms, f"filled from {fill.tier} in slot {slot}", name)
        self._tier.counts["promoted_blocks"] += 1
        waiting = self._waiting.pop(name, [])
        for onboard_id, index in waiting:
            state = self._states.get(onboard_id)
            if state is not None and index < state.run:
                table.pin(slot)
                state.slots[index] = slot
                state.came_from[index] = fill.tier
        for onboard_id, _ in waiting:
            self._answer_if_complete(onboard_id)
        return block

    def _missing(self, fill: Fill, name: SequenceHash, reason: str, now_ms: int) -> None:
        """A block will not come: those who wait for it get what is before it."""
        view = self._tier.below.views[fill.tier]
        if reason in NOT_ON_DISK:
            view.forget(name)
        else:
            view.avoid(name, now_ms)
        self._tier.counts[f"dropped.fill_{reason}"] += 1
        for onboard_id, index in self._waiting.pop(name, []):
            state = self._states.get(onboard_id)
            if state is not None and index < state.run:
                self._cut(state, index, reason)
                self._answer_if_complete(onboard_id)

    # --- answers ----------------------------------------------------------------------------

    def _cut(self, state: OnboardState, run: int, reason: str) -> None:
        """The run ends before index `run`: give back what was pinned behind it."""
        self._tier.table.unpin(slot for slot in state.slots[run:] if slot is not None)
        del state.slots[run:]
        state.run = run
        state.reason = reason

    def _answer_if_complete(self, onboard_id: int) -> None:
        state = self._states.get(onboard_id)
        if state is not None and None not in state.slots:
            del self._states[onboard_id]
            self._answer(state)

    def tick(self, now_ms: int) -> None:
        """Answer what is due with the prefix that is here; take back slots that were lent."""
        due = [i for i, state in self._states.items() if now_ms >= state.answer_by_ms]
        for onboard_id in due:
            state = self._states.pop(onboard_id)
            if None in state.slots:
                self._tier.counts["lookups_cut_by_deadline"] += 1
                self._cut(state, state.slots.index(None), "deadline")
            self._answer(state)
        for entry in [entry for entry in self._lent if now_ms >= entry[0]]:
            self._lent.remove(entry)
            self._take_back(entry[1])

    def end_engine(self, engine_id: EngineId) -> None:
        """Nobody waits for these answers any more."""
        for onboard_id in [i for i, state in self._states.items() if state.engine == engine_id]:
            state = self._states.pop(onboard_id)
            self._cut(state, 0, "engine_lost")

    def _answer(self, state: OnboardState) -> None:
        slots = [slot for slot in state.slots if slot is not None]
        assert len(slots) == state.run
        tier = self._tier
        if state.reply_to:
            self._answer_prefetch(state, slots)
            return
        lease_id = 0
        if slots:
            lease = tier.leases.grant(
                str(state.engine), "onboard", tuple(slots), deadline_ms=state.lease_until_ms
            )
            lease_id = lease.id
        disk, objects = _came_from(state, "disk"), _came_from(state, "object")
        here = state.run - len(disk) - len(objects)
        self._count(len(state.hashes), here, len(disk), len(objects))
        tier.counts["matched_tokens"] += state.run * state.block_tokens
        blocks = [tier.table.block(slot) for slot in slots]
        found = Found(
            lookup=state.lookup,
            epoch=tier.announcer.epoch,
            lease=lease_id,
            slots=slots,
            checksums=[block.checksum for block in blocks],
            block_bytes=blocks[0].bytes if blocks else 0,
            disk_blocks=disk,
            object_blocks=objects,
            reason=state.reason if state.run < len(state.hashes) else "",
        )
        tier.emit(ToEngine(state.connection, found))

    def _answer_prefetch(self, state: OnboardState, slots: list[int]) -> None:
        self._tier.table.unpin(slots)
        reply = PrefetchReply(
            blocks=state.run,
            filled=len(state.came_from.keys() & set(range(state.run))),
            reason=state.reason if state.run < len(state.hashes) else "",
        )
        self._tier.counts["prefetched_blocks"] += reply.filled
        self._tier.emit(Answer(state.reply_to, reply))

    def _refuse(self, connection: bytes, lookup: Lookup, reason: str) -> None:
        found = Found(
            lookup=lookup.lookup, epoch=self._tier.announcer.epoch, lease=0, slots=[],
            checksums=[], block_bytes=0, reason=reason,
        )  # fmt: skip
        self._tier.emit(ToEngine(connection, found))

    def _count(self, asked: int, host: int, disk: int, objects: int) -> None:
        counts = self._tier.counts
        counts["lookups"] += 1
        counts["lookup_blocks.host"] += host
        counts["lookup_blocks.disk"] += disk
        counts["lookup_blocks.object"] += objects
        counts["lookup_blocks.miss"] += asked - host - disk - objects
        counts["onboard_blocks_h2d"] += host
        counts["onboard_blocks_d2d"] += disk
        counts["onboard_blocks_o2d"] += objects
        self._tier.hit_window.append((asked, host, disk, objects))

    def _tell_hits(self, lookup: Lookup, names: Iterable[SequenceHash]) -> None:
        """The disk tier gives space to what is asked for again."""
        news = hashes_to_hex(self._tier.below.missing(names)[:HITS_MAX])
        if news:
            self._tier.emit(TellHits(Hits(namespace=lookup.namespace.hex(), hashes=news)))

    def staged_slots(self) -> set[int]:
        """Every slot that a fill has staged, for `check`."""
        fills = [*self._fills.values(), *(fill for _, fill in self._lent)]
        return {slot for fill in fills for slot in fill.slots.values()}

    def pinned_slots(self) -> list[int]:
        """Every pin that a waiting lookup holds, for `check`."""
        states = self._states.values()
        return [slot for state in states for slot in state.slots if slot is not None]

    def check(self) -> None:
        """Assert every invariant."""
        for name, waiting in self._waiting.items():
            assert self._tier.table.is_staging(name), self._tier.diary.story(name)
            assert waiting
        for state in self._states.values():
            assert None in state.slots, "a complete lookup was not answered"
            assert len(state.slots) == state.run


def _came_from(state: OnboardState, tier: WireTier) -> list[int]:
    """Indices of the run."""
    return sorted(i for i, source in state.came_from.items() if source == tier and i < state.run)
