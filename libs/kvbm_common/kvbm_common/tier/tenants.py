"""Tenants: whose blocks a tier holds, and who makes room for whom.

A tenant is what an engine's KVBM_TENANT names. The digest of each of its namespaces tells it, and
so does every block. Engines without the setting are one tenant without a name. A tier that is full
evicts a block of the tenant that is furthest above its share, and whatever policy was chosen says
which block of it. Until then each may use what others leave free. So no tenant under its share
loses a block to one above it. A tenant's share is its weight among the tenants with blocks here.

A tenant's *level* is its bytes for its weight. The one *furthest* above its share, the *worst*, is
that with the highest level. A tier is *short* of the blocks that still have to leave, and those
that a tenant has *left* may be taken from it. Blocks of 100 bytes, and gold wants two more:

```
             weight   bytes    level          short 2                    short 1
    gold        3       900      300 → 367    (with the two it wants)
    silver      1       600      600          worst: loses one, 500      worst: loses one, 400
    tin         1       300      300          below gold: loses nothing
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

from kvbm_common.eviction import EvictionPolicy
from kvbm_common.identity import SequenceHash
from kvbm_common.tenant_tag import TAG_BYTES, TENANT_MAX, tag_of, tenant_tag
from kvbm_common.wire.tier_stats import TenantStats

TENANTS_MAX = 32
"""Tenants with a share of their own; those who come later have one together."""
CALLED_MAX = 2 * TENANTS_MAX
"""Names that are remembered of tenants that may have no block here."""
NAMESPACES_MAX = 1024
"""Namespaces whose tenants are at hand."""
IDLE_MS = 3_600_000
"""A tenant that has used nothing for so long has no share: its blocks go first."""
WEIGHT_MAX = 1_000_000.0
FEW = 256
"""Blocks that are looked at before all of a tenant's are."""
OTHERS = "*"
"""In a setting: each tenant that is not listed."""
TOGETHER = "others"
"""The name under which metrics add up the tenants beyond TENANTS_MAX."""
_UNCLEAR = re.compile(rf"{TOGETHER}|[0-9a-f]{{{2 * TAG_BYTES}}}")
"""Names that would pass for those beyond, or for another's tag: figures show the tag instead."""
SHARES_TEXT = "NAME=WEIGHT, several with commas between; `*` for each tenant that is not listed"
_ENTRY = re.compile(rf"(\*|[A-Za-z0-9_-]{{1,{TENANT_MAX}}})=([0-9]+(?:\.[0-9]+)?)")


def shares_of(text: str) -> dict[str, float]:
    """Return the weights that a setting says, by tenant; raises ValueError.

    >>> shares_of("gold=3, *=1")
    {'gold': 3.0, '*': 1.0}
    """
    shares: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        found = _ENTRY.fullmatch(part)
        if found is None or found[1] in shares or not 0 < float(found[2]) <= WEIGHT_MAX:
            raise ValueError(text)
        shares[found[1]] = float(found[2])
    if len(shares) > TENANTS_MAX:
        raise ValueError(text)
    return shares


class Tenant:
    """One tenant in one tier, and what it has there."""

    __slots__ = ("block_count", "is_idle", "name", "tag", "used_bytes", "used_ms", "was_used",
                 "weight")  # fmt: skip

    def __init__(self, tag: bytes, name: str, weight: float) -> None:
        assert weight > 0, f"tenant {name!r} weighs {weight}"
        self.tag, self.name, self.weight = tag, name, weight
        self.used_bytes = self.block_count = 0
        self.was_used = True
        """Blocks of it were used since the last tick."""
        self.used_ms = 0
        self.is_idle = False

    def __repr__(self) -> str:
        return f"Tenant({self.name!r}, {self.used_bytes} bytes in {self.block_count} blocks)"

    def level(self, used_bytes: float) -> float:
        """Return how much of its share so many bytes are, compared with other tenants'."""
        return used_bytes / self.weight if not self.is_idle else math.inf


class Tenants:
    """All tenants of one tier; `unnamed` has the blocks of engines that name none."""

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        shares = shares or {}
        assert len(shares) <= TENANTS_MAX, f"{len(shares)} tenants are listed"
        self._weight = shares.get(OTHERS, 1.0)
        self.unnamed = Tenant(b"", "", self._weight)
        self.named: dict[bytes, Tenant] = {}
        """Tag → tenant that has had a block here. What the others use is `unnamed`'s."""
        self._listed = {
            tag_of(name): (shown_name(name), weight)
            for name, weight in shares.items()
            if name != OTHERS
        }
        self._called: dict[bytes, str] = {}
        """Names that engines have said, by tag; the one that was said last is the last."""
        self._together: Tenant | None = None
        self._by_namespace: dict[bytes, Tenant] = {}
        self._now_ms = 0

    def __iter__(self) -> Iterator[Tenant]:
        yield self.unnamed
        yield from self.named.values()

    def of(self, namespace: bytes) -> Tenant:
        """Return the tenant of a namespace, which is a digest."""
        tenant = self._by_namespace.get(namespace)
        if tenant is None:
            tag = tenant_tag(namespace)
            tenant = self.unnamed if not tag else self.named.get(tag) or self._add(tag)
            if len(self._by_namespace) >= NAMESPACES_MAX:
                self._by_namespace.clear()
            self._by_namespace[namespace] = tenant
        return tenant

    def _add(self, tag: bytes) -> Tenant:
        assert tag not in self.named, f"tag {tag.hex()} is of {self.named[tag]}"
        if tag not in self._listed and self._is_full():
            self._forget_empty()
        if tag not in self._listed and self._is_full():
            if self._together is None:
                self._together = self.named[b""] = Tenant(b"", TOGETHER, self._weight)
            return self._together
        name, weight = self._listed.get(tag, (self._called.get(tag, tag.hex()), self._weight))
        self.named[tag] = Tenant(tag, name, weight)
        self.named[tag].used_ms = self._now_ms
        return self.named[tag]

    def _is_full(self) -> bool:
        """Tell whether only those that are listed may still come: each of them has its place."""
        unlisted = sum(1 for tag in self.named if tag and tag not in self._listed)
        assert unlisted < TENANTS_MAX, f"{unlisted} tenants beside {len(self._listed)} listed"
        return unlisted + len(self._listed) >= TENANTS_MAX - 1

    def _forget_empty(self) -> None:
        """Forget the tenants that have left nothing here."""
        self.named = {
            tag: one for tag, one in self.named.items() if one.block_count or one is self._together
        }
        self._by_namespace.clear()

    def call(self, name: str) -> None:
        """Have figures call a tenant by its name, which an engine has said."""
        assert name, "the tenant without a name is called nothing"
        tag, name = tag_of(name), shown_name(name)
        self._called.pop(tag, None)
        if len(self._called) >= CALLED_MAX:
            # At most half of them have a place here.
            del self._called[next(one for one in self._called if one not in self.named)]
        self._called[tag] = name
        if tag in self.named:
            self.named[tag].name = name

    def tick(self, now_ms: int) -> None:
        """Mark the tenants that have used nothing for IDLE_MS."""
        self._now_ms = now_ms
        if not self.named:
            self.unnamed.used_ms = now_ms
            return
        for tenant in self:
            if tenant.was_used:
                tenant.was_used, tenant.used_ms = False, now_ms
            tenant.is_idle = now_ms - tenant.used_ms > IDLE_MS

    def figures(self, capacity_bytes: int) -> list[TenantStats]:
        """Return what each has, and its share: none while no engine has named a tenant."""
        if not self.named:
            return []
        assert capacity_bytes >= 0, f"a tier of {capacity_bytes} bytes"
        here = [one for one in self if one.block_count]
        total = sum(one.weight for one in here if not one.is_idle)
        return [
            TenantStats(
                name=one.name,
                blocks=one.block_count,
                bytes=one.used_bytes,
                share_bytes=0 if one.is_idle else int(capacity_bytes * one.weight / total),
            )
            for one in here
        ]


def shown_name(name: str) -> str:
    """Return what figures call a tenant: its name, unless that would pass for something else.

    >>> shown_name("gold"), shown_name("others")
    ('gold', '2557f5ec6801eb5a')
    """
    assert name, "figures call the tenant without a name nothing"
    return tag_of(name).hex() if _UNCLEAR.fullmatch(name) else name


MayLeave = Callable[[SequenceHash], bool]


class Claim:
    """The claim of a tenant to room, and whose blocks may leave for it; or that of an operator."""

    def __init__(
        self, tenants: Tenants, block_bytes: int, tenant: Tenant | None = None, count: int = 0
    ) -> None:
        assert count >= 0, f"{tenant} wants {count} blocks"
        self.tenant, self.block_bytes = tenant, block_bytes
        self.tenants = tuple(tenants)
        self._used = {one: float(one.used_bytes) for one in self.tenants}
        if tenant is not None:
            tenant.was_used, tenant.is_idle = True, False
            self._used[tenant] += count * block_bytes

    def _level(self, tenant: Tenant, less: float = 0) -> float:
        return tenant.level(self._used[tenant] - less)

    def may_lose(self, tenant: Tenant, lost_bytes: int) -> bool:
        """Tell whether a tenant may lose so many bytes for the one that asks."""
        if self.tenant is None or tenant is self.tenant:
            return True
        # As much of its share as the other has: then each would take from the other in turn.
        return self._level(tenant, lost_bytes) >= self._level(self.tenant)

    def furthest(self, lost_bytes: int) -> Tenant | None:
        """Return the other tenant that is furthest above its share, if it may lose so much."""
        others = [one for one in self._used if one is not self.tenant and self._used[one] > 0]
        first = max(others, key=self._level, default=None)
        return first if first is not None and self.may_lose(first, lost_bytes) else None

    def lose(self, tenant: Tenant, lost_bytes: int) -> None:
        """Note that a tenant loses so many bytes."""
        assert lost_bytes >= 0, f"{tenant} loses {lost_bytes} bytes"
        self._used[tenant] -= lost_bytes

    def shared_out(
        self,
        policies: Mapping[Tenant, EvictionPolicy],
        short: int,
        may_leave: MayLeave | None = None,
    ) -> list[SequenceHash]:
        """Return up to `short` blocks of one class that leave, each of the tenant that is furthest
        above its share then."""
        if may_leave is not None:
            return self._chosen(policies, short, may_leave)
        left = {one: len(policy) for one, policy in policies.items() if len(policy)}
        taken = dict.fromkeys(left, 0)
        order: list[Tenant] = []
        while left and len(order) < short:
            # Of equals the asking one loses.
            worst = max(left, key=lambda one: (self._level(one), one is self.tenant))
            # Every level after it is lower: so would be that of the next one.
            if not self.may_lose(worst, 0):
                break
            order.append(worst)
            taken[worst] += 1
            self.lose(worst, self.block_bytes)
            left[worst] -= 1
            if not left[worst]:
                del left[worst]
        names = {one: iter(policies[one].victims(count)) for one, count in taken.items() if count}
        return [next(names[one]) for one in order]

    def _chosen(
        self, policies: Mapping[Tenant, EvictionPolicy], short: int, may_leave: MayLeave
    ) -> list[SequenceHash]:
        """Return what `shared_out` says where some blocks stay; a tenant loses what leaves."""
        # Without blocks: also those of tenants that were forgotten.
        there = {one: policy for one, policy in policies.items() if len(policy)}
        left = {one: filter(may_leave, in_order(policy)) for one, policy in there.items()}
        chosen: list[SequenceHash] = []
        while left and len(chosen) < short:
            worst = max(left, key=lambda one: (self._level(one), one is self.tenant))
            if not self.may_lose(worst, 0):
                break
            name = next(left[worst], None)
            if name is None:
                del left[worst]
                continue
            chosen.append(name)
            self.lose(worst, self.block_bytes)
        assert len(chosen) <= max(0, short), f"{len(chosen)} blocks leave for {short}"
        return chosen


def in_order(policy: EvictionPolicy) -> Iterator[SequenceHash]:
    """Yield the free blocks, worst first; of many the first ones without a look at the rest."""
    few = policy.victims(FEW)
    yield from few
    if len(few) == FEW:
        yield from policy.victims(len(policy))[FEW:]


def worst_first(
    tenants: Tenants,
    policies: Mapping[Tenant, EvictionPolicy],
    count: int,
    block_bytes: int,
    may_leave: MayLeave | None = None,
) -> list[SequenceHash]:
    """Return up to `count` blocks of this size, those first that would leave first."""
    return Claim(tenants, block_bytes).shared_out(policies, count, may_leave)
