"""The options of `kvbm demo`: what cannot be is refused at once, with its reason."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from kvbm_cli.demo import attached
from kvbm_cli.demo.attached import AttachedStack
from kvbm_cli.demo.command import BROKEN_OFF_DEADLINE_S, at_end
from kvbm_cli.stack import NATS_STOP_DEADLINE_S
from kvbm_common.nats.embedded_server import NatsServer
from kvbm_common.runtime.processes import free_port

START_DEADLINE_S = 60


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with options that it refuses."""
    code = "from kvbm_cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "demo", *options],
        capture_output=True, text=True, timeout=START_DEADLINE_S, input="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--seed", "-1"), "Input should be greater than or equal to 0"),
        (("--host-gb", "1e-9"), "do not fit into 1 bytes"),
        (("--disk-gb", "0.0001"), "do not fit into 100000 bytes"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: tuple[str, ...], reason: str) -> None:
    """Goal: no stack starts, and no traceback: the reason stands there."""
    done = demo(*options)
    assert done.returncode == 2, done
    assert reason in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_a_trace_without_requests_is_an_error(tmp_path: Path) -> None:
    """Goal: nothing was checked, so nothing has passed."""
    trace = tmp_path / "empty.jsonl"
    trace.touch()
    done = demo("--trace", str(trace))
    assert done.returncode == 1, done
    assert "empty.jsonl has no request" in done.stdout


def test_a_trace_in_a_pipe_is_refused() -> None:
    """Goal: nothing passes unchecked: a pipe is read once, and the demo reads its trace again."""
    done = demo("--trace", "/dev/stdin")
    assert done.returncode == 2, done
    assert "'/dev/stdin' is no regular file, and is read more than once" in done.stderr


@pytest.mark.parametrize(
    ("error", "deadline_s"),
    [(None, 9.0), (RuntimeError(), 9.0), (asyncio.CancelledError("15"), BROKEN_OFF_DEADLINE_S)],
)
async def test_a_signal_shortens_the_deadlines_of_the_end(
    error: BaseException | None, deadline_s: float
) -> None:
    """Goal: who ends a demo has the prompt within 3 s, and any other end is in order."""
    given: list[float] = []

    async def stop(*, deadline_s: float) -> None:
        given.append(deadline_s)

    async def run() -> None:
        async with AsyncExitStack() as cleanup:
            at_end(cleanup, stop, deadline_s=9.0)
            if error is not None:
                raise error

    await asyncio.gather(run(), return_exceptions=True)
    assert given == [deadline_s]
    assert 3 * BROKEN_OFF_DEADLINE_S + NATS_STOP_DEADLINE_S <= 3.0


@pytest.mark.slow
async def test_a_stack_that_is_not_there_is_named_soon(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: what is missing is named within seconds, while the demo waits for it.

    1. No NATS listens there. 2. It runs, and no service has joined.
    """
    for url, missing, deadline in (
        (f"nats://127.0.0.1:{free_port()}", "no answer from nats://", "CONNECT_DEADLINE_S"),
        (nats_server.url, "no consolidator or no host-tier on host ", "READY_DEADLINE_S"),
    ):
        monkeypatch.setenv("KVBM_NATS_URL", url)
        monkeypatch.setattr(attached, deadline, 600.0)
        said: asyncio.Queue[str] = asyncio.Queue()
        stack = AttachedStack(say=said.put_nowait)
        joining = asyncio.create_task(stack.__aenter__())
        try:
            text = await asyncio.wait_for(said.get(), 20)
        finally:
            joining.cancel()
            await asyncio.wait({joining}, timeout=20)
            await stack.__aexit__()
        assert text.startswith(missing), text
        assert text.endswith("; waiting 599 s more for a stack (`kvbm up` starts one)"), text
