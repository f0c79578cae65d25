"""Many registered instances, which answer what one real host tier has said."""

from __future__ import annotations

import asyncio

from kvbm_common.nats.bus import Bus, VerbHandler
from kvbm_common.registry.nats_kv import NatsRegistry
from kvbm_common.wire.verbs import verb_subject

VERBS = ("stats", "metrics")
KIND = "host-tier"


async def recorded(bus: Bus, host: str) -> dict[str, bytes]:
    """What a host tier says of itself, by verb."""
    subjects = {verb: verb_subject(KIND, verb, host=host, instance="0") for verb in VERBS}
    return {
        verb: await bus.request(subject, b"{}", deadline_s=5) for verb, subject in subjects.items()
    }


async def serve_fleet(
    bus: Bus, registry: NatsRegistry, said: dict[str, bytes], *, count: int
) -> None:
    """Register so many host tiers, and answer for them; returns when the registry has them all."""
    for number in range(count):
        host = f"host-{number}"
        verbs = {verb: _saying(payload) for verb, payload in said.items()}
        await bus.add_verbs(KIND, "0", host, verbs)
        await registry.register(KIND, host, "0")
    async with asyncio.timeout(20):
        while len(await registry.list(KIND)) < count:  # noqa: ASYNC110 - it has no event.
            await asyncio.sleep(0.05)


def _saying(payload: bytes) -> VerbHandler:
    async def say(_request: bytes) -> bytes:
        return payload

    return say
