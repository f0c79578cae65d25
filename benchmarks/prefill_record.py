"""Record what the prefill steps of a real vLLM take: `load_or_compute` replays them.

The time is that of the processor, of an engine in one process with one computing thread: so other
work on the machine is left out.

`.venv-vllm/bin/python -m benchmarks.prefill_record MODEL_DIRECTORY FILE` (the model: see
`tests/vllm/make_model.py`). No service is needed: the connector measures, and all is computed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS = (64, 96, 128, 200, 256, 384, 512, 768, 1_024, 1_500)
ROUNDS = 4
STEP_TOKENS = 512


def main() -> None:
    """Compute prompts of many lengths, one at a time, and write a line for each step."""
    model, file = sys.argv[1:]
    from kvbm_connectors.core.prefill_fit import PrefillFit
    from kvbm_connectors.vllm.step_meter import StepMeter
    from vllm import LLM, SamplingParams

    steps: list[tuple[float, float, float]] = []
    add = PrefillFit.add

    def noted(fit: PrefillFit, tokens: float, pairs: float, took_us: float) -> None:
        steps.append((tokens, pairs, took_us))
        add(fit, tokens, pairs, took_us)

    clock = StepMeter.__init__.__kwdefaults__
    assert clock is not None
    clock["clock_us"] = lambda: time.process_time_ns() // 1000
    setattr(PrefillFit, "add", noted)  # noqa: B010
    engine = LLM(
        model=model, enforce_eager=True, dtype="float32", max_model_len=8_192, block_size=32,
        max_num_batched_tokens=STEP_TOKENS,
        kv_transfer_config=connector(),
    )  # fmt: skip
    sampling, rng = SamplingParams(max_tokens=2, temperature=0), random.Random(0)
    for _ in range(ROUNDS):
        for length in rng.sample(LENGTHS, len(LENGTHS)):
            tokens = [rng.randrange(10, 500) for _ in range(length)]
            engine.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
        lines = ",\n".join(json.dumps([round(value) for value in step]) for step in steps)
        Path(file).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(steps)} steps")


def connector() -> Any:
    """Return vLLM's configuration of our connector."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="KvbmConnector", kv_connector_module_path="kvbm_connectors.vllm.connector",
        kv_role="kv_both", kv_load_failure_policy="recompute",
    )  # fmt: skip


if __name__ == "__main__":
    main()
