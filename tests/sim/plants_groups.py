"""Planted bugs of KV groups: a hit with too few blocks, with another group's, or with a part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import pytest
from kvbm_common.identity import SequenceHash
from kvbm_common.tier.kv_groups import (
    GroupRun,
    Has,
    Names,
    Reach,
    boundary_tokens,
    has_each,
    needed_names,
    reach,
)
from kvbm_common.tier.slots import SlotTable
from kvbm_common.wire.engine_events import EngineHash
from kvbm_common.wire.events import EventHead
from kvbm_common.wire.raw_events import RawRemoved, RawRun, RawStored
from kvbm_connectors.consolidator.core.events import EventDraft
from kvbm_connectors.consolidator.core.held_blocks import HeldBlocks
from kvbm_connectors.consolidator.core.merged_stream import MergedStreams
from kvbm_connectors.consolidator.core.messages import GroupNamespace
from kvbm_connectors.core.messages import LoadResult
from kvbm_host_tier.core.group_plan import GroupPlan
from kvbm_host_tier.core.lower_tier_view import Namespaces
from kvbm_host_tier.core.open_lookup import OpenLookup
from kvbm_host_tier.core.presence import Available, Presence

from tests.sim.kv_groups import GROUPINGS
from tests.sim.plant import ONE_HOST, WRONG_BYTES, Plant


def shorten_windows(patch: pytest.MonkeyPatch) -> None:
    """A hit has one block less than a window needs."""
    first_needed = GroupRun.first_needed

    def planted(run: GroupRun, tokens: int) -> int:
        return first_needed(run, tokens) + (run.window_blocks > 0)

    patch.setattr(GroupRun, "first_needed", planted)


def let_chunks_begin_late(patch: pytest.MonkeyPatch) -> None:
    """A chunk is counted from the first block that is asked for."""
    first_needed = GroupRun.first_needed

    def planted(run: GroupRun, tokens: int) -> int:
        if not run.chunk_tokens:
            return first_needed(run, tokens)
        return tokens // run.chunk_tokens * run.chunk_tokens // run.block_tokens

    patch.setattr(GroupRun, "first_needed", planted)


def answer_groups_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """The host tier leases the right blocks, the last group's first."""

    def planted(
        groups: Sequence[GroupRun], names: Sequence[Sequence[SequenceHash]], tokens: int
    ) -> list[SequenceHash]:
        return needed_names(groups[::-1], names[::-1], tokens)

    patch.setattr("kvbm_host_tier.core.group_plan.needed_names", planted)


def use_a_part_of_a_hit(patch: pytest.MonkeyPatch) -> None:
    """A load of several groups counts as loaded although a block has failed."""

    def planted(result: LoadResult) -> int:
        return len(result.intact) if any(result.intact) else 0

    patch.setattr(LoadResult, "usable", property(planted))


def know_the_first_group_alone(patch: pytest.MonkeyPatch) -> None:
    """The consolidator knows of an engine's further groups when its device has blocks of them."""
    known = MergedStreams.engine_known

    def planted(
        streams: MergedStreams, name: str, ranks: Iterable[int], groups: Collection[GroupNamespace]
    ) -> None:
        known(streams, name, ranks, list(groups)[:1])

    patch.setattr(MergedStreams, "engine_known", planted)


def overhear_the_first_group_alone(patch: pytest.MonkeyPatch) -> None:
    """The consolidator drops what an engine says of its further groups."""
    store = HeldBlocks.store

    def planted(
        held: HeldBlocks,
        engine_hashes: tuple[EngineHash, ...],
        chain: list[SequenceHash],
        parent: SequenceHash | None,
    ) -> list[RawRun] | None:
        if held.hasher.namespace.group:
            return None
        return store(held, engine_hashes, chain, parent)

    patch.setattr(HeldBlocks, "store", planted)


def say_every_block_of_the_first_group(patch: pytest.MonkeyPatch) -> None:
    """Events of the consolidated stream name the first group."""
    event = EventDraft.event

    def planted(
        draft: EventDraft, head: EventHead, group: int, namespace: str, reason: str
    ) -> RawStored | RawRemoved:
        return event(draft, head, 0, namespace, reason)

    patch.setattr(EventDraft, "event", planted)


def keep_the_pins_of_a_shorter_hit(patch: pytest.MonkeyPatch) -> None:
    """An engine that leaves leaves the shorter hit of its lookup pinned."""
    patch.setattr(OpenLookup, "unpin_fallback", lambda _lookup, _table: None)


def fall_back_on_nothing(patch: pytest.MonkeyPatch) -> None:
    """Where one block of a lookup does not come, the answer is empty."""

    def planted(plan: GroupPlan, here: Has, blocks_max: int | None = None) -> None:
        plan.reach = Reach(0, plan.reach.shared)

    patch.setattr(GroupPlan, "fall_back", planted)


def stop_a_boundary_early(patch: pytest.MonkeyPatch) -> None:
    """A plan reaches a boundary less far than blocks do, where a window cuts it."""

    def planted(
        groups: Sequence[GroupRun], names: Names, has: Has, *, most: int | None = None,
        shared: int = 0,
    ) -> Reach:  # fmt: skip
        found = reach(groups, names, has, most=most, shared=shared)
        step = boundary_tokens(groups)
        return (
            found if found.tokens in (0, found.shared) else Reach(found.tokens - step, found.shared)
        )

    patch.setattr("kvbm_host_tier.core.group_plan.reach", planted)


def wait_for_no_block(patch: pytest.MonkeyPatch) -> None:
    """A plan does not count on blocks of lower tiers."""

    of = Presence.of

    def planted(presence: Presence, own: Namespaces, now_ms: int) -> Available:
        known = of(presence, own, now_ms)
        return replace(known, may_come=known.here)

    patch.setattr(Presence, "of", planted)


def plan_with_blocks_of_others(patch: pytest.MonkeyPatch) -> None:
    """A plan counts on blocks of every namespace, and so does the answer."""

    def planted(table: SlotTable, _own: Namespaces) -> Has:
        return has_each(table.holds)

    patch.setattr("kvbm_host_tier.core.presence.blocks_here", planted)
    patch.setattr("kvbm_host_tier.core.answers.blocks_here", planted)


def avoid_in_the_first_group_alone(patch: pytest.MonkeyPatch) -> None:
    """The connector avoids failed blocks of the first group, and asks for others again."""

    def planted(groups: Sequence[GroupRun], names: Names, has: Has) -> Reach:
        others = frozenset(names[0]).isdisjoint
        return reach(groups, names, has_each(lambda name: others([name]) or has([name]) == b"\1"))

    patch.setattr("kvbm_connectors.core.asked_blocks.reach", planted)


WINDOW, _, STATE, CHUNK, TWO = GROUPINGS[:5]
DIES = {"faults": ("kill engine",), "fault_every_ms": 300.0, "host_slots": 12}
SHORT = r"is for \d+ blocks up to"
CORRUPT = {"faults": ("rot arena",), "fault_every_ms": 300.0, "verified": True}
PLANTS = (
    Plant("a window is a block short", shorten_windows, SHORT, {**ONE_HOST, "groups": WINDOW}),
    Plant("a chunk begins late", let_chunks_begin_late, f"{SHORT}|are here",
          {**ONE_HOST, "groups": CHUNK}),
    Plant("groups change their places", answer_groups_in_another_order, WRONG_BYTES,
          {**ONE_HOST, "groups": STATE}),
    Plant("further groups are known late", know_the_first_group_alone, "consolidated differs",
          {**ONE_HOST, "groups": WINDOW, "faults": ("kill engine",), "fault_every_ms": 700.0}),
    Plant("further groups are not overheard", overhear_the_first_group_alone, "misses",
          {**ONE_HOST, "groups": TWO}),
    Plant("all blocks are of the first group", say_every_block_of_the_first_group, "says|is said",
          {**ONE_HOST, "groups": TWO}),
    Plant("a shorter hit stays pinned", keep_the_pins_of_a_shorter_hit, "pin",
          {**ONE_HOST, **DIES, "groups": WINDOW}),
    Plant("a lookup falls back on nothing", fall_back_on_nothing, "are here",
          {**ONE_HOST, **DIES, "groups": WINDOW}, seed=1_022),
    Plant("a plan stops early", stop_a_boundary_early, r"are here|Reach\(",
          {**ONE_HOST, "groups": WINDOW}),
    Plant("a plan waits for no block", wait_for_no_block, "are here",
          {**ONE_HOST, "groups": WINDOW}, seed=1_007),
    Plant("a plan with blocks of others", plan_with_blocks_of_others, "are here|another namespace",
          {**ONE_HOST, "groups": WINDOW, "sizes": (1, 2)}),
    Plant("avoided in the first group alone", avoid_in_the_first_group_alone, "failed to load",
          {**ONE_HOST, **CORRUPT, "groups": STATE}, seed=1_042),
    Plant("a state is used without its KV", use_a_part_of_a_hit, WRONG_BYTES,
          {**ONE_HOST, **CORRUPT, "groups": STATE}),
)  # fmt: skip
