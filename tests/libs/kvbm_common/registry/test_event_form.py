"""Events are packed as long as no service is present that reads JSON only."""

from __future__ import annotations

import pytest
from kvbm_common.registry.event_form import EventForm
from kvbm_common.registry.records import Changed, Joined, Left, ServiceRecord
from msgspec.structs import replace

OLD = ServiceRecord(kind="index", host="h", instance="0", epoch=1, pid=1, started_ms=0, ttl_s=5.0)
NEW = replace(OLD, epoch=2, reads_packed=True)


def test_an_old_reader_makes_them_json_until_it_has_left() -> None:
    """Goal: a rolling upgrade and back. 1. It joins. 2. Is replaced. 3. Comes back. 4. Dies."""
    form = EventForm(packed=True)
    assert form.packs()
    form.take(Joined(replace(NEW, kind="metrics")))
    assert form.packs()
    form.take(Joined(OLD))
    assert not form.packs()
    form.take(Changed(OLD, NEW))
    assert form.packs()
    form.take(Changed(NEW, OLD))
    assert not form.packs()
    form.take(Left(OLD, "expired"))
    assert form.packs()


def test_each_of_several_old_readers_counts() -> None:
    form = EventForm(packed=True)
    other = replace(OLD, instance="1")
    for record in (OLD, other):
        form.take(Joined(record))
    form.take(Left(OLD, "deleted"))
    assert not form.packs()
    form.take(Left(other, "deleted"))
    assert form.packs()


@pytest.mark.parametrize("packed", [True, False])
def test_an_engine_reads_nothing_and_a_setting_is_kept(packed: bool) -> None:
    form = EventForm(packed=packed)
    form.take(Joined(replace(OLD, kind="engine")))
    assert form.packs() is packed
