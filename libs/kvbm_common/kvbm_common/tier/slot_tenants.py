"""Slot tenants: whose block is in each slot, counted, and in the policy of its tenant.

They are the layer of a `SlotTable` above its records: see `slots.py`. Only slots of named tenants
are noted: of 12 blocks, 5 of gold and 4 of silver, 3 are unnamed. The *worst* block is the next one
of the tenant that is furthest above its share; `tenants.py` has an example with figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.eviction.succession import Succession
from kvbm_common.identity import SequenceHash
from kvbm_common.tenant_tag import tenant_tag
from kvbm_common.tier.block_columns import BlockColumns
from kvbm_common.tier.blocks import Block
from kvbm_common.tier.layout import Layout
from kvbm_common.tier.slab_pool import MakePolicy
from kvbm_common.tier.slabs import SizeClass
from kvbm_common.tier.slot_blocks import STRETCH_BITS
from kvbm_common.tier.slot_records import SlotRecords
from kvbm_common.tier.tenants import (
    TENANTS_MAX,
    Claim,
    MayLeave,
    Tenant,
    Tenants,
    in_order,
    worst_first,
)
from kvbm_common.wire.tier_stats import TenantStats


class SlotTenants(SlotRecords):
    """Slot records with the tenant of each slot. Without named tenants it costs nearly nothing."""

    def __init__(
        self,
        layout: Layout,
        make: MakePolicy,
        tenants: Tenants | None = None,
        *,
        packs: bool = False,
    ) -> None:
        """Start with slots without blocks."""
        self.tenants = Tenants() if tenants is None else tenants
        self._owner: list[Tenant | None] = []
        """Slot → the tenant of its block, if that has a name."""
        super().__init__(layout, make, self.tenants, packs=packs)

    # --- questions --------------------------------------------------------------------------

    def tenant_of(self, name: SequenceHash) -> Tenant:
        """Return the tenant of a block that can be found."""
        return self._tenant_in(self._slot_of(name))

    def _tenant_in(self, slot: int) -> Tenant:
        return self._owner[slot] or self.tenants.unnamed

    def count_unnamed(self) -> None:
        """Count what the engines have that name no tenant: whatever no other has."""
        unnamed, named = self.tenants.unnamed, self.tenants.named.values()
        unnamed.used_bytes = self._block_bytes - sum([one.used_bytes for one in named])
        committed = len(self) + len(self._discarded)
        unnamed.block_count = committed - sum([one.block_count for one in named])
        assert min(unnamed.used_bytes, unnamed.block_count) >= 0, f"{unnamed} beside {named}"

    def tenant_figures(self) -> list[TenantStats]:
        """Return what each tenant has; none while no engine names one."""
        self.count_unnamed()
        return self.tenants.figures(self.usable_bytes)

    def claim(self, count: int, block_bytes: int, namespace: bytes) -> Claim | None:
        """Return what the tenant of a namespace asks for; None: there is one tenant only."""
        tenant = self.tenants.of(namespace)
        if not self.tenants.named:
            return None
        self.count_unnamed()
        return Claim(self.tenants, block_bytes, tenant, count)

    def share_bytes(self, tenant: Tenant) -> float:
        """Return the share of a tenant among those with blocks here, in bytes of the medium."""
        if not self.tenants.named:
            return float(self.usable_bytes)
        self.count_unnamed()
        here = [one for one in self.tenants if one.block_count and not one.is_idle]
        total = sum([one.weight for one in here if one is not tenant], tenant.weight)
        assert total >= tenant.weight > 0, f"{tenant} weighs {tenant.weight} of {total}"
        return self.usable_bytes * tenant.weight / total

    def worst_of(
        self, size: SizeClass, count: int, may_leave: MayLeave | None = None
    ) -> list[SequenceHash]:
        """Return up to `count` blocks of a class, those first that would leave first."""
        if len(size.policies) == 1:
            if may_leave is None:
                return size.policy.victims(count)
            return list(islice(filter(may_leave, in_order(size.policy)), count))
        self.count_unnamed()
        return worst_first(self.tenants, size.policies, count, size.slot_bytes, may_leave)

    def _policy_in_force(self, slot: int) -> EvictionPolicy:
        """Return the policy to which the block in a slot comes when it is used."""
        size = self.pool.slab_of[slot].size
        assert size is not None, f"slot {slot} is of no class"
        return size.policies[self._tenant_in(slot)]

    def _grow(self, count: int) -> None:
        super()._grow(count)
        self._owner += [None] * count
        assert len(self._owner) == len(self._state), f"{len(self._owner)} slots have tenants"

    # --- blocks come and leave --------------------------------------------------------------

    def _come(self, entries: Sequence[tuple[int, Block]]) -> None:
        """Count blocks that are being registered for their tenants."""
        for namespace in dict.fromkeys([block.namespace for _, block in entries]):
            tenant = self.tenants.of(namespace)
            tenant.was_used = True
            if tenant is not self.tenants.unnamed:
                ours = [(slot, block) for slot, block in entries if block.namespace == namespace]
                self._give_to(tenant, ours)

    def _give_to(self, tenant: Tenant, entries: Sequence[tuple[int, Block]]) -> None:
        """Count blocks that come as those of a tenant with a name, whose policy has them."""
        for slot, block in entries:
            size = self.pool.slab_of[slot].size
            assert size is not None, f"slot {slot} is of no class"
            self.pool.policy_of[slot] = self.pool.policy_for(size, tenant)
            self._owner[slot] = tenant
            tenant.used_bytes += block.bytes
            tenant.block_count += 1

    def _take_back(self, slot: int, size_bytes: int) -> None:
        """Count a block that leaves a slot of a tenant with a name."""
        tenant, self._owner[slot] = self._tenant_in(slot), None
        tenant.used_bytes -= size_bytes
        tenant.block_count -= 1
        size = self.pool.slab_of[slot].size
        assert size is not None, f"slot {slot} is of no class"
        self.pool.policy_of[slot] = size.policy

    def _empty(self, slot: int, size_bytes: int) -> None:
        """Take the block, which has so many bytes, out of a slot that is RESET again."""
        self._block_bytes -= size_bytes
        assert self._block_bytes >= 0, f"slot {slot} is empty: {self._block_bytes} bytes are left"
        self._block[slot] = None
        if self._packed is not None:
            self._packed.drop(slot)
        self._held_in[slot >> STRETCH_BITS] -= 1
        if self._owner[slot] is not None:
            self._take_back(slot, size_bytes)
        self.pool.give_back(slot)

    def _note_use(self, slots: Sequence[int]) -> None:
        """Note that a request has asked for the blocks in these slots."""
        if slots:
            self._tenant_in(slots[0]).was_used = True

    def _fill_policies(self, former: BlockColumns) -> None:
        """Give the blocks of a former life to the policies of their tenants."""
        rows: dict[Tenant, NDArray[np.bool_]] = {}
        for namespace, ours in former.by_namespace().items():
            tenant = self.tenants.of(namespace)
            rows[tenant] = rows[tenant] | ours if tenant in rows else ours
            if tenant is not self.tenants.unnamed:
                # At once: where places are short, those without a block are forgotten.
                tenant.block_count += int(ours.sum())
        for tenant, ours in rows.items():
            part = former if ours.all() else former.only(ours)
            if tenant is not self.tenants.unnamed:
                for slot in part.slots.tolist():
                    self._owner[slot] = tenant
                tenant.used_bytes += part.total_bytes
                assert tenant.block_count == len(part), f"{len(part)} blocks are of {tenant}"
            self.pool.fill_policies(part, tenant)

    # --- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant; O(slots)."""
        super().check()
        self._check_tenants([slot for slot, block in enumerate(self._block) if block is not None])

    def _check_tenants(self, held: Sequence[int]) -> None:
        """Assert that every block is counted for its tenant, and is in that one's policy."""
        used, counts = Counter[Tenant](), Counter[Tenant]()
        for slot in held:
            block = self.block(slot)
            tenant = self._tenant_in(slot)
            used[tenant] += block.bytes
            counts[tenant] += 1
            size = self.pool.slab_of[slot].size
            assert size is not None, f"slot {slot} is of no class"
            policy, ours = self.pool.policy_of[slot], size.policies[tenant]
            # A held block comes to the policy in force when it is freed.
            is_left = isinstance(ours, Succession) and (self._pins[slot] or ours.knows(policy))
            assert policy is ours or is_left, f"slot {slot} of {tenant}"
            tag = tenant_tag(block.namespace)
            assert bool(tag) == (tenant is not self.tenants.unnamed), f"{block} is of {tenant}"
            assert tenant.tag in (tag, b""), f"{block} is of {tenant}"
        owned = {slot for slot, tenant in enumerate(self._owner) if tenant is not None}
        assert owned <= set(held), "a slot without a block is a tenant's"
        self.count_unnamed()
        for tenant in self.tenants:
            assert tenant.used_bytes == used[tenant], f"{used[tenant]} bytes are of {tenant}"
            assert tenant.block_count == counts[tenant], f"{counts[tenant]} blocks of {tenant}"
        assert used.keys() <= set(self.tenants), "a tenant with blocks was forgotten"
        for size in self.pool.sizes.values():
            assert len(size.policies) <= TENANTS_MAX + 2, f"{len(size.policies)} policies of {size}"
