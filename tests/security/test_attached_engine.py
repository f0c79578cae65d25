"""An attached engine that asks for more than it may: blocks by name, and messages beyond limits.

The host tier and its sockets are real. ada's engine stores a block; bob's is of another model, is
attached to the same host tier, and has learned the name of ada's block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from kvbm_common.config.settings import Settings
from kvbm_common.identity import Namespace
from kvbm_common.nats.bus import Bus
from kvbm_common.tier.kv_groups import GROUPS_MAX, GroupRun
from kvbm_common.wire.index_verbs import MATCH_BLOCKS_MAX
from kvbm_common.wire.local import Lookup, Release, ToHostTier, to_host_tier

from tests.services.host_tier.conftest import engine, host, settings  # noqa: F401
from tests.services.host_tier.engine import RealEngine
from tests.services.host_tier.helpers import NAMESPACE, name
from tests.services.host_tier.running import held, stats_of

replace = msgspec.structs.replace
OTHER = Namespace(model="other", block_tokens=4)


@pytest.fixture
async def bob(settings: Settings, engine: RealEngine) -> AsyncIterator[RealEngine]:  # noqa: F811
    """An engine of another model beside ada's."""
    async with RealEngine.living(settings, engine="bob", namespace=OTHER) as attached:
        yield attached


async def test_a_name_does_not_open_another_models_block(
    engine: RealEngine,  # noqa: F811
    bob: RealEngine,
    bus: Bus,
) -> None:
    """1. bob asks by name for ada's block: a miss, with a reason, and no lease. 2. bob asks in
    ada's namespace: refused. 3. ada's own lookup finds the block."""
    await engine.store(bus, 1)
    assert len((await engine.found(1)).slots) == 1
    found = await bob.look_up(1)
    assert (found.slots, found.lease, found.reason) == ([], 0, "other_namespace")
    asked = replace(bob.lookup([name(1)]), namespace=NAMESPACE.digest)
    refused = await bob.refused(asked)
    assert (refused.about, refused.code, refused.field) == ("lookup", "namespace", "namespace")
    assert (await stats_of(bus)).figures["refused.lookup_namespace"] == 1
    assert len((await engine.found(1)).slots) == 1


def oversized(engine: RealEngine, lease: int) -> dict[str, ToHostTier]:  # noqa: F811
    """Return a message for each field that has a limit, with one entry too many."""
    lookup = engine.lookup([name(1)])
    release = Release(engine="ada", incarnation=engine.incarnation, lease=lease, corrupt=[])
    return {
        "groups": replace(lookup, groups=[GroupRun(4, 0)] * (GROUPS_MAX + 1)),
        "hashes": replace(lookup, hashes=bytes(16 * MATCH_BLOCKS_MAX + 1)),
        "corrupt": replace(release, corrupt=[0] * (MATCH_BLOCKS_MAX + 1)),
    }


@pytest.mark.parametrize("field", ["groups", "hashes", "corrupt"])
async def test_a_message_beyond_its_limit_is_refused_before_it_is_read(
    engine: RealEngine,  # noqa: F811
    bus: Bus,
    field: str,
) -> None:
    """Goal: the decoder refuses, by field, and nothing is half done: the lease and block stay."""
    await engine.store(bus, 1)
    found = await engine.found(1)
    refused = await engine.refused(oversized(engine, found.lease)[field])
    assert (refused.about, refused.code, refused.field) == ("message", "bad_message", field)
    assert (await stats_of(bus)).leases == 1
    assert await held(bus) == {1}
    await engine.release(found)


def test_what_is_allowed_fits_the_limits() -> None:
    """The largest lookup and the largest release that an engine may send are taken."""
    groups = [GroupRun(4, 0)] * GROUPS_MAX
    lookup = Lookup(
        engine="ada", incarnation="0" * 16, lookup=1, namespace=bytes(32), groups=groups,
        hashes=bytes(16 * MATCH_BLOCKS_MAX), lease_ms=1, deadline_ms=1,
    )  # fmt: skip
    corrupt = list(range(MATCH_BLOCKS_MAX))
    release = Release(engine="ada", incarnation="0" * 16, lease=1, corrupt=corrupt)
    for message in (lookup, release):
        assert to_host_tier.decode(to_host_tier.encode(message)) == message
