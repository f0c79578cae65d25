"""Streams that all services share: what the credential of one host can do to the others' data.

The attacker has the credential of a role of host `a`. It writes what it likes, as large and as
often as the server takes it.
"""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.access.roles import ADMIN
from kvbm_common.nats.bus import Bus
from kvbm_common.nats.jetstream import JetStreamError, call_api, publish_acknowledged
from kvbm_common.nats.streams import AUDIT, REGISTRY, REGISTRY_BUCKET, StreamSpec
from kvbm_common.wire.admin import audit_subject

from tests.security.guarded_nats import GuardedNats

HUGE, LARGE = b"x" * (7 << 20), b"x" * (9 << 10)
VICTIM = audit_subject("index", "b", "0")
OWN = audit_subject("host-tier", "a", "0")
FULL, MESSAGES_MAX = 10_077, 3_000
"""The server's error code for a stream that is full; and what fills each that a test has."""
KEY = f"$KV.{REGISTRY_BUCKET}.services"


async def subjects_of(bus: Bus, spec: StreamSpec) -> dict[str, int]:
    """Return the subjects that a stream holds, with the number of messages of each."""
    reply = await call_api(bus, f"STREAM.INFO.{spec.name}", {"subjects_filter": ">"})
    found: dict[str, int] = msgspec.json.decode(reply)["state"].get("subjects") or {}
    return found


async def shrink(admin: Bus, spec: StreamSpec) -> None:
    """Leave a stream 1 MiB, so that it is full soon."""
    now = msgspec.json.decode(await call_api(admin, f"STREAM.INFO.{spec.name}"))["config"]
    await call_api(admin, f"STREAM.UPDATE.{spec.name}", now | {"max_bytes": 1 << 20})


async def test_no_role_empties_the_audit(guarded: GuardedNats) -> None:
    """Goal: what others have done stays on record, however much one credential writes.

    1. A message of 7 MiB is refused. 2. Entries follow until the stream is full, 3. and more by
    JetStream, to the victim's own subject and to others. 4. The entry of another host is there, and
    is the oldest. 5. So is each of the rest.
    """
    async with (
        guarded.bus("host-tier") as attacker, guarded.bus("index") as victim,
        guarded.bus(ADMIN) as admin,
    ):  # fmt: skip
        await shrink(admin, AUDIT)
        await publish_acknowledged(victim, AUDIT, VICTIM, b"a change")
        with pytest.raises(JetStreamError, match="size"):
            await publish_acknowledged(attacker, AUDIT, OWN, HUGE)
        assert await filled(attacker, AUDIT, OWN, LARGE) > 90
        await attacker.request_raw(f"{KEY}.host-tier.a.0", LARGE, deadline_s=2)
        deputy = f"$JS.API.DIRECT.GET.{REGISTRY.name}.{KEY}.host-tier.a.0"
        for number in range(200):
            target = VICTIM if number % 2 else audit_subject("none", "b", str(number))
            await attacker.publish_raw(deputy, b"", reply=target)
        await attacker.request_raw(deputy, b"", deadline_s=2)  # By then all others are answered.
        found = await call_api(admin, f"STREAM.INFO.{AUDIT.name}")
        state = msgspec.json.decode(found)["state"]
        assert (state["first_seq"], state["messages"]) == (1, state["last_seq"])
        assert (await subjects_of(admin, AUDIT))[VICTIM] == 1


async def test_an_entry_of_the_registry_is_small(guarded: GuardedNats) -> None:
    """Three messages of 7 MiB had pushed out all services."""
    async with guarded.bus("host-tier") as attacker:
        await publish_acknowledged(attacker, REGISTRY, f"{KEY}.host-tier.a.0", b"x")
        with pytest.raises(JetStreamError, match="size"):
            await publish_acknowledged(attacker, REGISTRY, f"{KEY}.host-tier.a.0", HUGE)


async def test_a_full_registry_keeps_the_services_that_are_in_it(guarded: GuardedNats) -> None:
    """Goal: no service is taken for dead because another one fills the bucket.

    1. A consolidator enters engines without end, which have names of their own: at last it is
    refused. 2. The entry of another host is there, and is renewed. 3. The bucket has room again
    when its entries are gone.
    """
    victim_key = f"{KEY}.host-tier.b.0"
    async with (
        guarded.bus("consolidator") as attacker, guarded.bus("host-tier", host="b") as victim,
        guarded.bus(ADMIN) as admin,
    ):  # fmt: skip
        await publish_acknowledged(victim, REGISTRY, victim_key, b"alive")
        engines = f"{KEY}.engine.a."
        assert await filled(attacker, REGISTRY, engines, b"x" * (15 << 10)) > 900
        held = await subjects_of(admin, REGISTRY)
        assert held[victim_key] == 1
        await publish_acknowledged(victim, REGISTRY, victim_key, b"alive")
        await call_api(admin, f"STREAM.PURGE.{REGISTRY.name}", {"filter": f"{KEY}.engine.a.*"})
        await publish_acknowledged(victim, REGISTRY, f"{KEY}.host-tier.b.1", b"new")


async def filled(bus: Bus, spec: StreamSpec, subject: str, payload: bytes) -> int:
    """Publish until the server takes no more, and return how often it did.

    A subject that ends in a point gets another name each time.
    """
    for number in range(MESSAGES_MAX):
        target = f"{subject}{number}" if subject.endswith(".") else subject
        try:
            await publish_acknowledged(bus, spec, target, payload)
        except JetStreamError as error:
            if error.server_code != FULL:
                raise
            return number
    raise AssertionError(f"{spec.name} took {MESSAGES_MAX} messages")
