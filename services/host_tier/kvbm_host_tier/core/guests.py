"""Guests: blocks of other hosts, which were used once here, and are evicted before all others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import merge
from operator import itemgetter

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.slots import SlotTable
from kvbm_common.tier.tenants import Tenant


class Guests:
    """The guests of an arena by slot length and tenant, the oldest first."""

    def __init__(self) -> None:
        self.names: dict[SequenceHash, tuple[int, Tenant]] = {}
        """Guest → the length of its slot, and its tenant."""
        self._alike: dict[tuple[int, Tenant], OrderedDict[SequenceHash, int]] = {}
        """Slot length and tenant → guests, each with a number that says which came first."""
        self._added = 0

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[SequenceHash]:
        return iter(self.names)

    def add(self, name: SequenceHash, slot_bytes: int, tenant: Tenant) -> None:
        """Add a block of a tenant in a slot of this length."""
        assert name not in self.names, f"{name.hex()} is a guest already"
        self.names[name] = alike = slot_bytes, tenant
        self._added += 1
        self._alike.setdefault(alike, OrderedDict())[name] = self._added

    def remove(self, names: Iterable[SequenceHash]) -> None:
        """Remove guests that have left or were admitted."""
        for name in names:
            key = self.names.pop(name)
            alike = self._alike[key]
            del alike[name]
            if not alike:
                del self._alike[key]

    def of(self, slot_bytes: int, tenants: Iterable[Tenant]) -> Iterator[SequenceHash]:
        """Yield the guests of these tenants in slots of this length, the oldest first."""
        alike = [self._alike.get((slot_bytes, tenant)) for tenant in tenants]
        lists = [one.items() for one in alike if one is not None]
        for name, _ in merge(*lists, key=itemgetter(1)):
            yield name

    def check(self, table: SlotTable, others: Collection[SequenceHash] = ()) -> None:
        """Assert that each guest is in the table, where it is listed, and not among `others`."""
        assert sum(map(len, self._alike.values())) == len(self.names), (
            f"{len(self)} guests, others are listed"
        )
        for name, (slot_bytes, tenant) in self.names.items():
            slot = table.find(name)
            assert slot is not None, f"{name.hex()} has left"
            assert table.slot_bytes(slot) == slot_bytes, f"{name.hex()} is in slot {slot}"
            assert table.tenant_of(name) is tenant, f"{name.hex()} is of {table.tenant_of(name)}"
            assert name not in others, f"{name.hex()} is in two lists"
