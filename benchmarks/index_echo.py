"""A micro service that knows nothing: what a question costs on the bus before anybody looks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvbm_common.nats.bus import Bus
from kvbm_common.service.garbage import Garbage
from kvbm_common.wire.verbs import verb_subject

KIND, VERB = "echo", "match"
SUBJECT = verb_subject(KIND, VERB)
READY_DEADLINE_S = 10.0


async def _serve(url: str, instance: str, reply: bytes) -> None:
    bus = await Bus.connect(url, f"echo-{instance}", deadline_s=5)

    async def answer(_question: bytes) -> bytes:
        return reply

    await bus.add_verbs(KIND, instance, "bench", {VERB: answer}, shared=True)
    print("ready", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def replicas(url: str, reply: bytes, count: int = 2) -> AsyncIterator[None]:
    """So many processes that answer every question with these bytes."""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.index_echo", url, str(number), reply.hex(),
            stdout=asyncio.subprocess.PIPE,
        )
        for number in range(count)
    ]  # fmt: skip
    try:
        async with asyncio.timeout(READY_DEADLINE_S):
            for process in processes:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()


def main() -> None:
    """Until killed."""
    Garbage().start()  # As every service does.
    url, instance, reply = sys.argv[1:]
    asyncio.run(_serve(url, instance, bytes.fromhex(reply)))


if __name__ == "__main__":
    main()
