"""What vLLM's configuration says of an engine that offers blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvbm_connectors.vllm.namespace import refusal_of, rewritten_by_drafts


@pytest.mark.parametrize(
    ("method", "lookahead", "rewritten"),
    [(None, 0, None), ("ngram", 0, None), ("eagle", 1, 0), ("draft_model", None, 0), ("mtp", 3, 2)],
)
def test_modules_of_a_draft_model_but_the_first_write_again(
    method: str | None, lookahead: int | None, rewritten: int | None
) -> None:
    """As vLLM's `num_reprefillable_tokens`; a vLLM without it has draft models of one module."""
    speculative = SimpleNamespace(method=method) if method else None
    config = SimpleNamespace(speculative_config=speculative)
    if lookahead is not None:
        config.num_prefill_lookahead_tokens = lookahead
    assert rewritten_by_drafts(config) == rewritten


def test_ranks_with_schedulers_of_their_own_are_not_cached() -> None:
    """Goal: no load, and no mark, waits for a rank that reports to another scheduler."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            distributed_executor_backend="external_launcher", world_size=2
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_diffusion=False),
    )
    assert "hears of no other rank" in refusal_of(config, None)


def test_models_that_compute_tokens_again_are_not_cached() -> None:
    """Goal: no block is offered whose bytes the next step changes."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(is_diffusion=True),
    )
    assert "again with each step" in refusal_of(config, None)
