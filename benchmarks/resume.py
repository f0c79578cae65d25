"""Resume: a session that waits for a tool while ten others run, on a real vLLM on one core.

Each round a session asks, and again at once: the device hit. Then ten noisy sessions take the
device and host memory, and the session resumes: with a pin, and without a hint. The tool takes as
long as the noise does. Both kinds of session have their turn in every round.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Row, info_row
from benchmarks.vllm_arms import BLOCK_BYTES, ENGINE, make_model
from tests.vllm.conversation import Ask
from tests.vllm.harness import ONE_THREAD, EngineProcess, LiveStack, live_stack, prompt, wait_for

ROUNDS = 5
SLOTS = 120
"""Of host memory, and no other tier. A session may pin 48."""
TOKENS, BLOCKS = 2_000, 31
NOISY, NOISE_TOKENS, NOISE_BLOCKS = 10, 1_000, 15
"""Ten sessions with 150 blocks: more than the device has, and than host memory beside a pin."""
TTL = "10m"
TARGET = 1.3
_seeds = itertools.count(1)


@dataclass(slots=True)
class Samples:
    """Times to first token of one kind of session, in ms."""

    device: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    tool_s: list[float] = field(default_factory=list)
    """How long the noise took."""


def run() -> list[Row]:
    """Start one engine, and have sessions of both kinds wait for tools."""
    found = {"pinned": Samples(), "plain": Samples()}
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-bench-") as directory,
        live_stack({"cpu_cache_override_num_blocks": SLOTS}) as stack,
    ):
        engine = EngineProcess(
            make_model(Path(directory)), stack.settings, log=Path(directory) / "resume.log",
            arguments=ENGINE, environ=ONE_THREAD,
        )  # fmt: skip
        try:
            engine.wait_started()
            engine.wait_attached(stack)
            for number in range(ROUNDS + 1):
                for kind in sorted(found, reverse=bool(number % 2)):
                    _round(engine, stack, found[kind], pins=kind == "pinned")
                if number == 0:
                    found = {kind: Samples() for kind in found}  # The first time of each path.
        finally:
            engine.stop()
    return _rows(found)


def _round(engine: EngineProcess, stack: LiveStack, samples: Samples, *, pins: bool) -> None:
    """Have one session ask, wait and resume."""
    seed = next(_seeds)
    tokens = prompt(seed, TOKENS)
    _ttft_ms(engine, seed, tokens, TTL if pins else "", cached=False)
    if pins:
        wait_for(
            lambda: stack.figures("host-tier").get("hint_pinned_bytes", 0) >= BLOCKS * BLOCK_BYTES,
            "the session is not pinned",
        )
    device_ms = _ttft_ms(engine, seed, tokens, TTL if pins else "", cached=True)
    started_s = time.monotonic()
    before = stack.figures("host-tier").get("offload_blocks_d2h", 0)
    for _ in range(NOISY):
        other = next(_seeds)
        _ttft_ms(engine, other, prompt(other, NOISE_TOKENS), "", cached=False)
    stored = before + NOISY * NOISE_BLOCKS
    wait_for(
        lambda: stack.figures("host-tier").get("offload_blocks_d2h", 0) >= stored,
        "the noise is not stored",
    )
    samples.tool_s.append(time.monotonic() - started_s)
    samples.device.append(device_ms)
    samples.resumed.append(_ttft_ms(engine, seed, tokens, 0 if pins else "", cached=pins))


def _ttft_ms(
    engine: EngineProcess, session: int, tokens: list[int], ttl: str | int, *, cached: bool
) -> float:
    """Return the time to first token; `ttl`: "" for a request without a hint."""
    hint: dict[str, object] = {
        "session_id": f"agent-{session}", "cache_control": {"type": "ephemeral", "ttl": ttl},
    }  # fmt: skip
    ask = Ask(name=f"ask {next(_seeds)}", tokens=tokens, new_tokens=1,
              transfer={} if ttl == "" else hint)  # fmt: skip
    (answer,) = engine.run(ask)
    hit = answer.cached >= 0.9 * len(tokens)
    assert hit == cached, f"{answer.cached} of {len(tokens)} tokens were cached, pin: {ttl!r}"
    return answer.seconds * 1000


def _rows(found: dict[str, Samples]) -> list[Row]:
    rows: list[Row] = []
    for kind, samples in found.items():
        pairs = list(zip(samples.resumed, samples.device, strict=True))
        ratio = statistics.median(resumed / device for resumed, device in pairs)
        has_goal = kind == "pinned"
        what = "with a pin" if has_goal else "without a hint"
        rows.append(Row(
            name=f"TTFT of a session that resumes {what} (reference: its device hit)", unit="ms",
            value=round(statistics.median(samples.resumed), 2),
            reference=round(statistics.median(samples.device), 2), ratio=round(ratio, 3),
            target=TARGET if has_goal else None, met=ratio <= TARGET if has_goal else None,
        ))  # fmt: skip
    waited = [seconds for samples in found.values() for seconds in samples.tool_s]
    rows.append(info_row("the tool's time, with ten noisy sessions", statistics.median(waited),
                         unit="s"))  # fmt: skip
    return rows
