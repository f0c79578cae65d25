"""What every registry must do. A test class inherits this and says how to make one."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import weakref
from collections.abc import Awaitable, Callable

import pytest
from kvbm_common.errors import RegistryUnavailable
from kvbm_common.registry import services
from kvbm_common.registry.records import ENGINE, Changed, Joined, Left, RegistryEvent
from kvbm_common.registry.services import Registry

from tests.waiting import wait_until

TTL_S = 0.6
"""Short enough for tests of expiry, long enough for a busy machine."""
MakeRegistry = Callable[[], Awaitable[Registry]]


class RegistryContract:
    """Tests of the protocol `Registry`; two registries are two processes."""

    expires_within_s = 4 * TTL_S
    """How long the silent may stay, on a busy machine."""

    @pytest.fixture
    async def make(self) -> MakeRegistry:
        """A function that connects one more process to the registry, with TTL_S."""
        raise NotImplementedError

    async def test_registered_service_is_listed_by_another_process(
        self, make: MakeRegistry
    ) -> None:
        """Goal: peers find each other, with what they say about themselves."""
        ours, theirs = await make(), await make()
        registration = await ours.register("index", "h", "0", {"port": 1})
        (record,) = await theirs.list()
        assert (record.kind, record.host, record.instance) == ("index", "h", "0")
        assert record.info == {"port": 1}
        assert record.epoch == registration.epoch
        assert await theirs.list("host-tier") == []

    async def test_epoch_grows_with_every_life(self, make: MakeRegistry) -> None:
        """Goal: consumers can order the lives of a source, whichever process lived them."""
        epochs = []
        for _ in range(3):
            registry = await make()
            registration = await registry.register("host-tier", "h", "0")
            epochs.append(registration.epoch)
            await registration.revoke()
        assert epochs == sorted(set(epochs))

    async def test_an_epoch_from_the_future_is_refused(
        self, make: MakeRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Goal: no life whose events are dropped as those of a future epoch, in silence.

        Clocks may differ by a day; here by less than nothing.
        """
        registry = await make()
        monkeypatch.setattr("kvbm_common.wire.epochs.AHEAD_MAX_S", -3_600)
        with pytest.raises(RegistryUnavailable, match="ahead of this host's clock"):
            await registry.register("host-tier", "h", "0")
        assert await registry.list() == []

    async def test_registry_forgets_an_entry_that_has_left(self, make: MakeRegistry) -> None:
        """Goal: a process that enters engines for weeks keeps nothing of those that have left."""
        registry = await make()
        registration = await registry.register(ENGINE, "h", "e-1")
        kept = weakref.ref(registration)
        await registration.revoke()
        del registration
        gc.collect()
        assert kept() is None

    async def test_watch_tells_joined_changed_left(self, make: MakeRegistry) -> None:
        """Goal: one callback sees a whole life in order."""
        ours, theirs = await make(), await make()
        events: list[RegistryEvent] = []
        theirs.watch(events.append)
        registration = await ours.register("index", "h", "0", {"port": 1})
        await wait_until(lambda: len(events) == 1)
        await registration.update({"port": 2})
        await wait_until(lambda: len(events) == 2)
        await registration.revoke()
        await wait_until(lambda: len(events) == 3)
        joined, changed, left = events
        assert isinstance(joined, Joined)
        assert isinstance(changed, Changed)
        assert changed.before == joined.record
        assert changed.record.info == {"port": 2}
        assert isinstance(left, Left)
        assert left.reason == "deleted"

    async def test_a_callback_that_fails_is_counted_and_the_others_hear(
        self, make: MakeRegistry
    ) -> None:
        """Goal: what one reader cannot take ends neither the reading nor the other callbacks."""
        ours, theirs = await make(), await make()
        events: list[RegistryEvent] = []

        def fail(event: RegistryEvent) -> None:
            raise ValueError(event.record.key)

        theirs.watch(fail)
        theirs.watch(events.append)
        first = await ours.register("index", "h", "0")
        await wait_until(lambda: len(events) == 1)
        await first.revoke()
        await wait_until(lambda: len(events) == 2)
        assert isinstance(events[1], Left)
        assert theirs.counts["registry_callback_failures_total"] == 2
        assert not theirs.unreadable.is_set()

    async def test_late_watcher_hears_who_is_there(self, make: MakeRegistry) -> None:
        """Goal: a watcher needs no list call first, and ends when told."""
        ours = await make()
        await ours.register("index", "h", "0")
        assert len(await ours.list()) == 1
        events: list[RegistryEvent] = []
        forget = ours.watch(events.append)
        assert [type(event) for event in events] == [Joined]
        forget()
        await ours.register("index", "h", "1")
        await wait_until(lambda: True)
        assert len(events) == 1

    @pytest.mark.slow
    async def test_heartbeats_keep_a_service_alive(self, make: MakeRegistry) -> None:
        """Goal: nobody leaves while its process lives. Method: watch for three times the TTL."""
        ours, theirs = await make(), await make()
        events: list[RegistryEvent] = []
        theirs.watch(events.append)
        await ours.register("index", "h", "0")
        with pytest.raises(TimeoutError):
            await wait_until(lambda: len(events) > 1, deadline_s=3 * TTL_S)
        assert len(await theirs.list()) == 1

    @pytest.mark.slow
    async def test_silent_service_expires(self, make: MakeRegistry) -> None:
        """Goal: a killed process leaves within its TTL. Method: end its heartbeats only."""
        ours, theirs = await make(), await make()
        events: list[RegistryEvent] = []
        theirs.watch(events.append)
        await ours.register("index", "h", "0")
        await wait_until(lambda: events)
        await ours.close()
        await wait_until(lambda: len(events) == 2, deadline_s=self.expires_within_s)
        assert isinstance(events[1], Left)
        assert events[1].reason == "expired"
        assert await theirs.list() == []

    async def test_one_process_enters_engines_beside_itself(self, make: MakeRegistry) -> None:
        """Goal: a consolidator speaks for its engines; one of them leaves, the rest stays."""
        ours, theirs = await make(), await make()
        events: list[RegistryEvent] = []
        theirs.watch(events.append)
        entries = [
            await ours.register(kind, "h", instance, {"rank": 0})
            for kind, instance in (("consolidator", "0"), (ENGINE, "a"), (ENGINE, "b"))
        ]
        assert len({entry.epoch for entry in entries}) == len(entries)
        await wait_until(lambda: len(events) == 3)
        await entries[1].revoke()
        await wait_until(lambda: len(events) == 4)
        assert events[3] == Left(entries[1].record, "deleted")
        assert await theirs.list(ENGINE) == [entries[2].record]

    @pytest.mark.slow
    async def test_a_silent_process_leaves_with_all_that_it_has_entered(
        self, make: MakeRegistry
    ) -> None:
        """Goal: engines live as long as their consolidator's process, and not much longer."""
        ours, theirs = await make(), await make()
        events: list[RegistryEvent] = []
        theirs.watch(events.append)
        await ours.register("consolidator", "h", "0")
        await ours.register(ENGINE, "h", "a")
        with pytest.raises(TimeoutError):
            await wait_until(lambda: len(events) > 2, deadline_s=3 * TTL_S)
        await ours.close()
        await wait_until(lambda: len(events) == 4, deadline_s=self.expires_within_s)
        left = [event.reason for event in events[2:] if isinstance(event, Left)]
        assert left == ["expired", "expired"]

    @pytest.mark.slow
    async def test_what_was_entered_beside_an_entry_stays_without_it(
        self, make: MakeRegistry
    ) -> None:
        """Goal: no entry depends on another one of its process."""
        ours, theirs = await make(), await make()
        events: list[RegistryEvent] = []
        theirs.watch(events.append)
        first = await ours.register("consolidator", "h", "0")
        await ours.register(ENGINE, "h", "a")
        await first.revoke()
        with pytest.raises(TimeoutError):
            await wait_until(
                lambda: any(isinstance(e, Left) and e.record.kind == ENGINE for e in events),
                deadline_s=3 * TTL_S,
            )
        assert [record.kind for record in await theirs.list()] == [ENGINE]

    async def test_second_life_takes_over(self, make: MakeRegistry) -> None:
        """Goal: two processes of one name do not both believe in themselves."""
        ours, theirs = await make(), await make()
        first = await ours.register("host-tier", "h", "0")
        second = await theirs.register("host-tier", "h", "0")
        async with asyncio.timeout(self.expires_within_s):
            await first.lost.wait()
        assert not second.lost.is_set()
        assert first.lost_to.startswith(f"host-tier.h.0: process {os.getpid()} took over; if")
        assert first.lost_to.endswith("two stacks have KVBM_HOST=h")
        assert second.lost_to == ""
        await first.revoke()
        (record,) = await theirs.list()
        assert record.epoch == second.epoch > first.epoch

    async def test_another_machine_of_the_same_name_is_named(
        self, make: MakeRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Goal: two machines with one KVBM_HOST end each other's services, and the log says why."""
        ours, theirs = await make(), await make()
        first = await ours.register("host-tier", "h", "0")
        monkeypatch.setattr(services, "machine_digest", lambda: "of another kernel")
        monkeypatch.setattr(platform, "node", lambda: "gpu-7")
        await theirs.register("host-tier", "h", "0")
        async with asyncio.timeout(self.expires_within_s):
            await first.lost.wait()
        assert "another machine, gpu-7:" in first.lost_to
        assert "KVBM_HOST=h" in first.lost_to
