"""The launch scripts of `examples/vllm`, each as its README says, beside vLLM alone."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conversation import Ask
from tests.vllm.harness import EngineProcess, prompt
from tests.vllm.launched import Launched, cached_of, tokens_of
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [prompt(seed, 500) for seed in (81, 82)]
BLOCKS, CACHED = 15, 480
"""Whole blocks of such a prompt, and their tokens."""
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def alone(model: str, log_dir: Path) -> list[list[int]]:
    """What vLLM without a connector answers to the prompts."""
    engine = EngineProcess(model, None, log=log_dir / "alone.log")
    try:
        engine.wait_started()
        asks = [
            Ask(name=f"alone {number}", tokens=tokens, new_tokens=NEW_TOKENS)
            for number, tokens in enumerate(PROMPTS)
        ]
        return [answer.tokens for ask in asks for answer in engine.run(ask)]
    finally:
        engine.stop()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvbm-ex-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("script", "environ"),
    [
        pytest.param("agg.sh", {}, id="agg"),
        pytest.param("agg_tp.sh", {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, id="agg_tp"),
    ],
)
def test_aggregated(
    script: str, environ: dict[str, str], model: str, alone: list[list[int]], directory: Path
) -> None:
    """Goal: who types the README's lines gets vLLM's answers, and the second from the cache.

    1. The script says when it serves; an answer is the one of vLLM alone.
    2. The device is emptied: the same answer comes from host memory.
    3. SIGTERM ends the script and everything that it started.
    """
    launched = Launched(script, model, directory, environ)
    try:
        launched.wait_serving().wait_attached("vllm")
        for tries_left in (2, 1, 0):  # A stalled machine cuts the link: then nothing is stored.
            first = launched.curl(PROMPTS[0], max_tokens=NEW_TOKENS)
            assert tokens_of(first) == alone[0]
            assert cached_of(first) == 0
            try:
                launched.wait_counted("offload_blocks", BLOCKS)
                break
            except (AssertionError, TimeoutError):
                if not tries_left:
                    raise
            finally:
                launched.reset(0)
        second = launched.curl(PROMPTS[0], max_tokens=NEW_TOKENS)
        assert tokens_of(second) == alone[0]
        assert cached_of(second) == CACHED
        launched.wait_counted("loaded_blocks", BLOCKS)

        assert launched.output().startswith("kvbm: pid ")
        assert "ready in" in launched.log("kvbm")
        assert "KVBM passes through" not in launched.log("vllm")
        assert launched.end() == 128 + signal.SIGTERM
        assert launched.processes() == []
    finally:
        launched.close()


def test_disaggregated(model: str, alone: list[list[int]], directory: Path) -> None:
    """Goal: a prefill worker with KVBM, a decode worker, and the proxy answer as vLLM alone does.

    1. An answer through the proxy is the one of vLLM alone; so is a streamed one.
    2. Both devices are emptied: the prefill worker loads the prompt from host memory.
    3. A request that vLLM refuses is refused with vLLM's words.
    4. The decode worker is killed: the script says so, and ends everything.
    """
    launched = Launched("disagg_1p1d.sh", model, directory)
    try:
        launched.wait_serving().wait_attached("prefill")
        first = launched.curl(PROMPTS[0], max_tokens=NEW_TOKENS)
        assert tokens_of(first) == alone[0]
        launched.wait_counted("offload_blocks", BLOCKS, worker=1)
        launched.reset(1, 2)
        text = launched.curl_text(PROMPTS[0], max_tokens=NEW_TOKENS, stream=True)
        assert streamed_tokens(text) == alone[0]
        launched.wait_counted("loaded_blocks", BLOCKS, worker=1)

        refused = launched.curl(PROMPTS[0] * 9, max_tokens=NEW_TOKENS)
        assert "maximum" in refused["error"]["message"]
        assert "POST /v1/completions" in launched.log("proxy")
        launched.kill("decode")
        assert launched.wait_ended() == 1
        assert "decode has ended" in launched.output()
        assert launched.processes() == []
    finally:
        launched.close()


@pytest.mark.heavy
def test_workers_share_what_one_has_computed(
    model: str, alone: list[list[int]], directory: Path
) -> None:
    """Goal: two prefill workers share KVBM's tiers; two decode workers share the answers.

    1. The first request is computed by one prefill worker and stored.
    2. The second goes to the other one, which loads what the first has computed.
    3. Another prompt goes round the same way. Ctrl-C ends everything.
    """
    launched = Launched("disagg_2p2d.sh", model, directory)
    try:
        launched.wait_serving().wait_attached("prefill-0", "prefill-1")
        for number, tokens in enumerate(PROMPTS, 1):
            first = launched.curl(tokens, max_tokens=NEW_TOKENS)
            assert tokens_of(first) == alone[number - 1]
            launched.wait_counted("offload_blocks", BLOCKS * number, worker=1)
            second = launched.curl(tokens, max_tokens=NEW_TOKENS)
            assert tokens_of(second) == alone[number - 1]
            launched.wait_counted("loaded_blocks", BLOCKS * number, worker=2)
        assert launched.counted("loaded_blocks", worker=1) == 0
        for decode in ("decode-0", "decode-1"):
            assert launched.log(decode).count("POST /v1/completions") == 2
        assert launched.end(signal.SIGINT) == 128 + signal.SIGINT
        wait_for(lambda: not launched.processes())
    finally:
        launched.close()


def streamed_tokens(text: str) -> list[int]:
    """Return the tokens of an answer that came as server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return [token for choice in choices for token in choice["token_ids"] or []]
