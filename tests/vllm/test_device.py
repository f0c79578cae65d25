"""Every kind of KV group on vLLM's own scheduler and KV cache managers, and a device of ours.

No model runs, so that kinds count that vLLM cannot compute on CPU: an indexer beside latent
attention, windows over latents, states of every block. A block's bytes follow from its name: one
that is read for another prefix, group or boundary is seen (`tests/vllm/device`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.line_process import LineProcess
from tests.vllm.device.live_talk import SeedsCommand, SeedsReply
from tests.vllm.harness import ENVIRON, VLLM_PYTHON, vllm_minor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        VLLM_PYTHON.exists() and vllm_minor() != 32, reason="the device follows vLLM 0.32 alone"
    ),
]

PROGRAMS = 6
KINDS = (
    "plain", "heads outside", "heads inside", "repeated names", "repeated names, drafts",
    "gemma3", "gptoss", "gemma4", "mistral", "gathered", "retained", "llama4", "chunks", "gdn",
    "mamba2", "partial", "mamba",
    "dense states", "every state", "deepseek v3.2", "deepseek v4", "short windows", "odd sizes",
    "odd states", "all kinds", "drafts", "drafting layers", "guessing", "draft model", "aborted",
    "aborted drafts",
)  # fmt: skip


class DeviceProcess(LineProcess[SeedsCommand, SeedsReply]):
    """Runs programs on a device of ours, one kind after the other."""

    def __init__(self, model: str, log: Path) -> None:
        super().__init__(
            [VLLM_PYTHON, "-m", "tests.vllm.device.process", model], reply=SeedsReply, log=log,
            environ=ENVIRON | {"VLLM_LOGGING_LEVEL": "ERROR"}, reply_deadline_s=350.0,
        )  # fmt: skip

    def play(self, kind: str, seeds: range, plant: str = "") -> SeedsReply:
        """Run programs of a kind, perhaps with a defect put in."""
        return self.say(SeedsCommand(kind=kind, first=seeds.start, end=seeds.stop, plant=plant))


@pytest.fixture(scope="module")
def process(model: str, log_dir: Path) -> Iterator[DeviceProcess]:
    running = DeviceProcess(model, log_dir / "device-of-ours.log")
    yield running
    running.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_no_block_is_read_for_another(process: DeviceProcess, kind: str) -> None:
    """Goal: what attention looks at is there, and what is stored is what its name stands for.

    Conversations that share beginnings run with preemptions, aborts, resets, evictions, and loads
    that fail. At the end nothing is held.
    """
    reply = process.play(kind, range(PROGRAMS))
    assert not reply.error, reply.error
    counts = reply.counts
    assert counts["programs"] == PROGRAMS
    assert min(counts["loads"], counts["stored blocks"], counts["preemptions"]) > 0


@pytest.mark.parametrize(
    ("plant", "kind", "seeds", "sign"),
    [
        ("short-windows", "gemma3", range(40), "WrongBytes"),
        ("unheld-windows", "gemma3", range(40), "WrongBytes"),
        ("short-chunks", "llama4", range(40), "WrongBytes"),
        ("later-states", "gdn", range(40), "WrongBytes"),
        ("states-alone", "gdn", range(40), "WrongBytes"),
        ("one-size", "gemma4", range(40), "WrongBytes"),
        ("waiting-windows", "gathered", range(20), "do not end"),
        ("second-loads", "draft model", range(271, 272), "do not end"),
        ("early-drafts", "draft model", range(40), "WrongBytes"),
        ("freed-offers", "aborted", range(40), "WrongBytes"),
        ("freed-offers", "aborted drafts", range(40), "WrongBytes"),
    ],
)
def test_a_defect_is_seen(
    process: DeviceProcess, plant: str, kind: str, seeds: range, sign: str
) -> None:
    """Goal: the device notices what it is for."""
    reply = process.play(kind, seeds, plant)
    assert sign in reply.error, reply
