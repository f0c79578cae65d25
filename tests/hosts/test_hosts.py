"""Two and three hosts of network namespaces: blocks travel between them, and wires are cut."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from kvbm_cli.demo.check import wait_until

from tests.hosts.network import reason_not_here
from tests.hosts.running import (
    PROMPT_BLOCKS,
    Hosts,
    OneHost,
    running,
    wait_indexed,
    wait_peers,
    wait_sent,
)

WHY_NOT = reason_not_here()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be made"),
    pytest.mark.timeout(150),
]
INDEXED_S = 5.0
"""Until a prompt is known to the index; before its engine is attached again none is stored."""
PULLS_AGAIN_S = 60.0


async def pulled(host: OneHost) -> int:
    """How many blocks it has had from other hosts."""
    return int(await host.figure("peer_pulled_blocks"))


async def held(host: OneHost) -> set[str]:
    """What its host tier has announced, as the index knows it."""
    return {name for one in await host.view.dump() if one.tier == "host" for name in one.hashes}


async def check_all(hosts: Hosts) -> None:
    """Nothing has leaked, and the index knows what every host has."""
    for host in hosts:
        verdict = await host.check()
        assert verdict.differences == []
        assert verdict.leases_left == verdict.staged_left == 0
        assert await host.figure("peer_slots_unsettled") == 0


async def test_blocks_of_one_host_are_onboarded_on_two_others() -> None:
    """Goal: what one host has computed no other computes again, nor copies without reason.

    1. h1 computes a prompt. h2 and h3 onboard all of it from h1, and announce nothing of it.
    2. h2 wants it again: it has it now, and announces it; nothing is pulled twice.
    """
    async with running(3) as hosts:
        h1, h2, h3 = hosts
        await wait_peers(hosts)
        await h1.run(1, request="a")
        await wait_indexed(h1, PROMPT_BLOCKS)
        for host in (h2, h3):
            finished = await host.run(1, request="b")
            assert await pulled(host) == finished.verified == PROMPT_BLOCKS
            assert not await held(host) & await held(h1)

        await h2.forget()
        await h2.run(1, request="again")
        assert await pulled(h2) == PROMPT_BLOCKS
        await wait_indexed(h2, PROMPT_BLOCKS)
        assert await held(h2) >= await held(h1)
        assert not await held(h3) & await held(h1)
        await check_all(hosts)


async def test_a_wire_that_is_cut_in_a_pull_and_heals_costs_nothing_but_cache() -> None:
    """1. h1's wire is slow; in the middle of a pull by h2 it is cut. h2's request ends, unharmed.

    2. h2 serves on, alone, and hears that h1 is gone. 3. The wire heals: h1 is there again, the
    index knows its blocks, and h2 onboards another prompt from it.
    """
    async with running(2) as hosts:
        h1, h2 = hosts
        await wait_peers(hosts)
        for prompt in (1, 2):
            await h1.run(prompt, request=f"p{prompt}")
        await wait_indexed(h1, 2 * PROMPT_BLOCKS)

        hosts.network.slow_down("h1")
        request = asyncio.create_task(h2.run(1, request="cut"))
        await wait_sent(hosts.network, "h1", 500_000)
        hosts.network.cut("h1")
        await request
        assert await pulled(h2) < PROMPT_BLOCKS
        await h2.run(3, request="alone")

        async def alone() -> bool:
            return await h2.figure("peers") == 0

        await wait_until(alone, "h2 has not noticed")
        hosts.network.heal("h1")
        hosts.network.speed_up("h1")
        await wait_peers(hosts)
        await wait_indexed(h1, 2 * PROMPT_BLOCKS)
        before = await pulled(h2)
        await h2.run(2, request="healed")
        assert await pulled(h2) == before + PROMPT_BLOCKS
        await check_all(hosts)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["h1", "h2"])
async def test_blocks_are_pulled_again_once_a_killed_host_tier_is_back(killed: str) -> None:
    """1. h2 onboards a prompt from h1. 2. The host tier of one of them is killed, and comes back
    with another arena. 3. h2 onboards a prompt from h1 again: so in three lives."""
    async with running(2) as hosts:
        h1, h2 = hosts
        prompts = itertools.count(1)

        async def onboards_a_new_prompt() -> bool:
            prompt, before = next(prompts), len(await held(h1))
            await h1.forget()
            await h1.run(prompt, request=f"first-{prompt}")

            async def is_indexed() -> bool:
                return len(await held(h1)) >= before + PROMPT_BLOCKS

            await wait_until(is_indexed, "h1 has not stored the prompt", deadline_s=INDEXED_S)
            pulled_before = await pulled(h2)
            await h2.run(prompt, request=f"second-{prompt}")
            return await pulled(h2) == pulled_before + PROMPT_BLOCKS

        for life in range(3):
            if life:
                await hosts.restart_host_tier(next(one for one in hosts if one.name == killed))
            await wait_peers(hosts)
            await wait_until(onboards_a_new_prompt, "h2 pulls nothing", deadline_s=PULLS_AGAIN_S)
        await check_all(hosts)
