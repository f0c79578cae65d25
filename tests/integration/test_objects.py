"""The object tier end to end: hosts that share a bucket, and a bucket that comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvbm_cli.demo.check import check_stack, wait_until
from kvbm_common.runtime.processes import free_port

from tests.integration.running import Running, running
from tests.services.disk_tier.s3_server import S3Server


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    """A server that a test may kill."""
    server = S3Server(free_port(), tmp_path / "moto.log")
    server.start()
    yield server
    server.kill()


def settings(s3: S3Server, bucket: str, **changes: object) -> dict[str, object]:
    """A host cache, no disk, and a bucket for everything."""
    return {
        "cpu_cache_gb": 0.2, "object_enabled": True, "object_bucket": bucket,
        "object_endpoint": s3.endpoint, "object_access_key": "key", "object_secret_key": "secret",
        "disable_object_offload_filter": True,
    } | changes  # fmt: skip


async def stored(run: Running) -> int:
    """Blocks that the object tier would read."""
    slots = (await run.view.stats("object-tier")).slots
    return slots["inactive"] + slots["active"]


async def quiet(run: Running) -> bool:
    """Everything that was computed is in the bucket."""
    stats = await run.view.stats("object-tier")
    host = await run.view.stats("host-tier")
    waits = stats.figures["writes"] + stats.figures["writes_pending"]
    return not waits and await stored(run) >= host.slots["inactive"] > 0


def directory(path: Path) -> dict[str, object]:
    """The same with a directory that hosts share."""
    path.mkdir()
    shared = {"object_url": f"file://{path}", "disable_object_offload_filter": True}
    return {"cpu_cache_gb": 0.2} | shared


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["bucket", "directory"])
async def test_what_one_host_has_stored_another_onboards(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """Two hosts, one after the other, and nothing between them but the store."""
    if kind == "directory":
        shared = directory(tmp_path / "shared")
    else:
        s3: S3Server = request.getfixturevalue("s3")
        shared = settings(s3, s3.make_bucket())
    async with running(shared, engines=1) as run:
        await run.run(requests=8)
        await wait_until(lambda: quiet(run), "not everything is stored")
        count = await stored(run)
        assert (await run.view.stats("object-tier")).figures["offload_blocks_d2o"] == count
        assert run.mismatches() == 0
    async with running(shared, engines=1) as other:

        async def listed() -> bool:
            return await stored(other) == count

        await wait_until(listed, "the bucket is not listed")
        holders = [holder.source for holder in await other.view.dump()]
        assert holders == ["object-tier-0"], "the index knows before anybody has asked"
        await other.run(requests=8)
        host = await other.view.stats("host-tier")
        assert host.figures["onboard_blocks_o2d"] > 0
        assert host.figures["object_cache_hit_rate"] > 0
        assert other.mismatches() == 0
        assert other.errors() == set()
        verdict = await check_stack(other.view, other.engines, with_disk=False)
        assert verdict.differences == []


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_bucket_that_dies_under_load_harms_nobody(s3: S3Server) -> None:
    """The server is killed amid requests: engines go on, and the tier says why it is out."""
    bucket = s3.make_bucket()
    small = settings(s3, bucket, cpu_cache_gb=0.03, object_list_s=1.0)
    async with running(small, engines=1) as run:
        run.on_count[10] = s3.kill
        await run.run(requests=40)
        assert run.mismatches() == 0
        assert run.errors() == set()

        async def is_down() -> bool:
            reasons = (await run.view.stats("object-tier")).reasons
            return any("DYN_KVBM_OBJECT_ENDPOINT" in reason for reason in reasons)

        await wait_until(is_down, "nobody says that the store is away")
        s3.start()
        s3.client.create_bucket(Bucket=bucket)

        async def is_up() -> bool:
            return (await run.view.stats("object-tier")).ready

        await wait_until(is_up, "the store is not found again")
        await run.run(requests=20, seed=2, prefix="after")
        assert run.mismatches() == 0
        assert run.errors() == set()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_bucket_alone_is_a_cache(s3: S3Server) -> None:
    """Neither host cache nor disk: blocks pass through a small arena into the bucket and back."""
    alone = settings(s3, s3.make_bucket(), cpu_cache_gb=0.0, staging_gb=0.01)
    async with running(alone, engines=1) as run:
        for seed in (1, 2):  # The second one drives the first out of the arena.
            await run.run(requests=8, seed=seed, prefix=f"r{seed}")
            await wait_until(run.engines[0].reset, "the engine is not idle")
            await wait_until(lambda: quiet(run), "not everything is stored")
        await run.run(requests=8, seed=1, prefix="again")
        host = await run.view.stats("host-tier")
        assert host.figures["onboard_blocks_o2d"] > 0
        assert (await run.view.stats("object-tier")).figures["offload_blocks_d2o"] > 0
        assert run.mismatches() == 0
        assert run.errors() == set()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_object_tier_that_is_killed_comes_back_with_everything(s3: S3Server) -> None:
    """kill -9 amid requests: the bucket is the table."""
    async with running(settings(s3, s3.make_bucket()), engines=1) as run:
        await run.run(requests=8)
        await wait_until(lambda: quiet(run), "not everything is stored")
        before = await stored(run)
        await run.stack.kill("object-tier")
        await run.run(requests=4, seed=2, prefix="meanwhile")
        await run.stack.start("object-tier")
        await run.stack.wait_ready("object-tier")

        async def is_back() -> bool:
            return await stored(run) >= before

        await wait_until(is_back, "the bucket is not listed")
        verdict = await check_stack(run.view, run.engines, with_disk=False)
        assert verdict.differences == []
        assert run.mismatches() == 0
        assert run.errors() == set()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_idle_object_tier_says_that_its_directory_is_gone(tmp_path: Path) -> None:
    """No engine asks for a block, and no listing is due: readiness tells all the same."""
    shared = tmp_path / "shared"
    async with running(directory(shared), engines=1) as run:
        shared.rename(tmp_path / "away")

        async def is_out() -> bool:
            reasons = (await run.view.stats("object-tier")).reasons
            return any(f"KVBM_OBJECT_URL file://{shared}" in reason for reason in reasons)

        await wait_until(is_out, "the tier is ready without its directory")
        (tmp_path / "away").rename(shared)

        async def is_up() -> bool:
            return (await run.view.stats("object-tier")).ready

        await wait_until(is_up, "the directory is not found again")
