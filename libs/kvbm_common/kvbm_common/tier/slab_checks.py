"""Checks of the slab pool: no two slots overlap, no slot is lost, and each is counted once."""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_common.tier.slab_pool import SIZES_MAX, SlabPool
from kvbm_common.tier.slabs import SizeClass, Slab, SlabState
from kvbm_common.tier.slot_states import SlotState


def check_pool(pool: SlabPool, states: Sequence[SlotState]) -> None:
    """Assert every invariant of the slabs and classes; O(slots)."""
    assert len(pool.sizes) <= SIZES_MAX
    assert len(states) == len(pool.used) == len(pool.slab_of) == len(pool.policy_of)
    _check_medium(pool)
    numbers: set[int] = set()
    for slab in pool.slabs:
        size = slab.size
        assert (size is None) == (slab.state is SlabState.FREE), slab
        assert slab in pool.leaving or slab.state is not SlabState.LEAVING, slab
        if size is not None:
            ours = set(range(slab.first, slab.first + slab.slot_count))
            assert not numbers & ours, f"slots of {slab} are another slab's, too"
            numbers |= ours
            _check_slab(pool, slab, size, states)
    spare = (slot for slot in range(len(states)) if slot not in numbers)
    assert all(states[slot] is SlotState.RESET for slot in spare), "a slot of no slab is in use"
    for size in pool.sizes.values():
        _check_size(pool, size)


def _check_medium(pool: SlabPool) -> None:
    """Assert that the slabs are the whole medium, one after the other."""
    layout, place = pool.layout, 0
    for slab in pool.slabs:
        assert slab.place == place, f"{slab} begins at {slab.place}, not at {place}"
        assert 0 <= slab.retired_bytes <= slab.length, slab
        place += slab.length // layout.unit_bytes
    retired = sum(slab.retired_bytes for slab in pool.slabs)
    assert pool.retired_bytes == retired, f"{pool.retired_bytes} of {retired} bytes are counted"
    assert place * layout.unit_bytes == layout.total_bytes, f"slabs up to {place}"


def _check_slab(pool: SlabPool, slab: Slab, size: SizeClass, states: Sequence[SlotState]) -> None:
    """Assert that the slots of a slab lie in it, and that its lists say what they hold."""
    slots = range(slab.first, slab.first + slab.slot_count)
    end = slab.place + slab.length // pool.layout.unit_bytes
    assert slab is size.slabs[slab.number], f"{size} does not know {slab}"
    policies = list(size.policies.values())
    for index, slot in enumerate(slots):
        place = pool.place_of[slot]
        assert place == slab.place + index * size.units, f"slot {slot} of {slab}"
        assert place + size.units <= end, f"slot {slot} ends after {slab}"
        assert pool.slab_of[slot] is slab, f"slot {slot} is of {pool.slab_of[slot]}, not {slab}"
        policy = pool.policy_of[slot]
        is_ours = any(policy is one for one in policies)
        assert is_ours or pool.has_switched, f"another policy: {slot}"
    reset = [slot for slot in slots if states[slot] is SlotState.RESET]
    retired = [slot for slot in slots if states[slot] is SlotState.RETIRED]
    assert sorted(slab.reset) == reset, slab
    assert sorted(slab.retired) == retired, slab
    assert slab.usable == slab.slot_count - len(slab.retired), slab


def _check_size(pool: SlabPool, size: SizeClass) -> None:
    """Assert that a class knows its slabs and what is free in them."""
    assert all(slab.size is size for slab in size.slabs.values()), size
    cut = [slab for slab in size.slabs.values() if slab.state is SlabState.CUT]
    with_room = {slab.number for slab in cut if slab.reset}
    assert sorted(slab.number for slab in size.open) == sorted(with_room), size
    assert size.free_count == sum(len(slab.reset) for slab in cut), size
    room = pool.room_for(size, 1 << 40)
    others = [slab for slab in pool.slabs if slab.size is not size]
    open_to_us = [slab for slab in others if slab.state is not SlabState.LEAVING and slab.is_empty]
    assert room == size.free_count + sum(slab.room(size) for slab in open_to_us), size
