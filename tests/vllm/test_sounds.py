"""Sounds in prompts on a real vLLM: their blocks are stored and loaded by what is heard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.vllm.conftest import run_maker
from tests.vllm.conversation import Answer, Ask
from tests.vllm.harness import BLOCK_TOKENS, EngineProcess, alike, live_stack, prompt
from tests.vllm.make_audio_model import BEGIN, END, SOUND

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIRST, SECOND, LONG = (1, 4.0), (2, 4.0), (3, 7.0)
"""Seed and seconds: the first two have as many tokens."""
SOUND_TOKENS_PER_S = 25
"""A token stands in a prompt for 40 ms of a sound."""
ARGUMENTS = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"audio": 2},
    # A sound is heard as a whole, and read by the text in pieces that end inside of blocks.
    "max_num_batched_tokens": 800,
    "long_prefill_token_threshold": 40,
}


def text(seed: int, tokens: int) -> list[int]:
    """Return a random text in which no token stands for a sound."""
    return [token if token > END else END + 1 for token in prompt(seed, tokens)]


def ask(name: str, *sounds: tuple[int, float], end: int = 2, salt: str | None = None) -> Ask:
    """Return a prompt: a text, sounds with a text after each, and another text."""
    tokens = text(1, 50)
    for _ in sounds:
        tokens += [BEGIN, SOUND, END, *text(3, 7)]
    return Ask(name=name, tokens=tokens + text(end, 60), sounds=list(sounds), salt=salt)


ASKS = (
    ask("one", FIRST),
    ask("another", SECOND),
    ask("both", FIRST, SECOND),
    ask("in turn", SECOND, FIRST),
    ask("twice", FIRST, FIRST),
    ask("longer", LONG, FIRST),
    ask("other end", FIRST, end=4),
    ask("salted", FIRST, salt="salt"),
)


SAME_TOKENS = (("one", "another"), ("both", "in turn"), ("both", "twice"), ("in turn", "twice"))
"""Prompts whose tokens are the same, and whose sounds are not."""


def whole_blocks(asked: Ask) -> int:
    """Return the tokens of all whole blocks before a prompt's last token, which is computed."""
    sounds = sum(int(seconds * SOUND_TOKENS_PER_S) - 1 for _, seconds in asked.sounds)
    return (len(asked.tokens) + sounds - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def one_by_one(engine: EngineProcess) -> list[Answer]:
    """Return the answers to all prompts, each with an empty device."""
    answers: list[Answer] = []
    for one in ASKS:
        engine.reset()
        answers += engine.run(one)
    return answers


def alone(model: str, log_dir: Path) -> Sequence[Answer]:
    """Return the answers of vLLM without a connector."""
    log = log_dir / "alone.log"
    engine = EngineProcess(model, None, log=log, blocks=256, arguments=ARGUMENTS).wait_started()
    try:
        return one_by_one(engine)
    finally:
        engine.stop()


def test_a_sound_is_loaded_where_the_same_one_was_heard(tmp_path: Path, log_dir: Path) -> None:
    """Goal: the tokens of two sounds are alike, and their KV is not.

    1. vLLM alone answers prompts whose tokens are the same, and whose sounds are not.
    2. With KVBM they come together, and then one by one to an empty device. Each answer is that of
       vLLM alone, and all whole blocks are loaded.
    """
    run_maker("make_audio_model", tmp_path / "model", str(tmp_path / "model"))
    model = str(tmp_path / "model")
    expected = alone(model, log_dir)
    by_name = {answer.name: answer for answer in expected}
    for one, other in SAME_TOKENS:
        assert not alike([by_name[one]], [by_name[other]]), f"{one} is answered as {other}"
    assert all(answer.cached == 0 for answer in expected)
    with live_stack({"cpu_cache_gb": 0.1}) as stack:
        engine = EngineProcess(
            model, stack.settings, log=log_dir / "sounds.log", blocks=256, arguments=ARGUMENTS
        ).wait_started()
        try:
            engine.wait_attached(stack)
            assert alike(engine.run(*ASKS), expected)
            before = engine.count("loaded_blocks")
            loaded = one_by_one(engine)
            assert alike(loaded, expected)
            assert [answer.cached for answer in loaded] == [whole_blocks(one) for one in ASKS]
            blocks = sum(answer.cached for answer in loaded) // BLOCK_TOKENS
            assert engine.count("loaded_blocks") - before == blocks
            assert engine.count("load_failed_blocks") == 0
        finally:
            engine.stop()
