"""Programs on vLLM's scheduler and a device of ours: `python -m tests.vllm.device.process MODEL …`.

`MODEL KIND FIRST END` runs the programs of these seeds, and prints what happened as JSON. A failure
ends it with the seed. The environment may name a defect that is put in (`plants.py` of the fuzzer).
Runs in vLLM's environment.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.vllm.device.engine import (
    MODEL_TOKENS,
    STEP_TOKENS,
    VOCABULARY,
    DeviceConnector,
    Engine,
)
from tests.vllm.device.kinds import KINDS, Kind
from tests.vllm.fuzz import plants

ANSWER_MAX = 20
STEPS_MAX = 240


def vllm_config_of(
    model: str,
    kind: Kind,
    *,
    overlaps: bool,
    connector: str = DeviceConnector.__name__,
    module: str = DeviceConnector.__module__,
    options: Mapping[str, object] = MappingProxyType({"revision": "device"}),
) -> Any:
    """Return vLLM's configuration for a kind; of the model, only the configuration counts.

    `options` are the connector's.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    drafts = {"method": "ngram", "num_speculative_tokens": kind.drafts,
              "prompt_lookup_max": 2, "prompt_lookup_min": 1}  # fmt: skip
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=MODEL_TOKENS, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=6,
        enable_prefix_caching=True, async_scheduling=overlaps,
        speculative_config=drafts if kind.drafts else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_connector_module_path=module,
            kv_role="kv_both", kv_connector_extra_config=dict(options),
        ),
    )  # fmt: skip
    config = arguments.create_engine_config()
    groups = kind.groups()
    config.cache_config.block_size = max(int(spec.block_size) for spec in groups)
    modes = {getattr(spec, "mamba_cache_mode", "") for spec in groups} - {""}
    if modes:
        config.cache_config.mamba_cache_mode = modes.pop()
    return config


def play(engine: Engine, *, aborts_preempted: bool) -> None:
    """Draw what happens: conversations that share beginnings, aborts, resets, evictions."""
    rng = engine.rng
    if aborts_preempted:
        engine.tiers.patience = 0.9
    systems = [[rng.randrange(VOCABULARY) for _ in range(rng.choice((8, 16, 33, 50)))]
               for _ in range(3)]  # fmt: skip
    texts: list[list[int]] = []
    names: list[str] = []
    for _ in range(rng.randrange(40, STEPS_MAX)):
        if rng.random() < 0.4 and len(engine.names) < 6:
            prompt = prompt_of(rng, systems, texts)
            texts.append(prompt)
            names.append(engine.submit(prompt, rng.randrange(1, ANSWER_MAX)))
        if names and rng.random() < 0.15:
            texts.append(engine.spoken(rng.choice(names))[: MODEL_TOKENS - 60])
        if engine.names and rng.random() < 0.02:
            engine.abort(rng.choice(engine.names))
        if rng.random() < 0.08:
            engine.reset(running=rng.random() < 0.3)
        if aborts_preempted and engine.names and rng.random() < 0.1:
            engine.reset(running=True)
            engine.abort(rng.choice(engine.names))
        if rng.random() < 0.03:
            engine.tiers.evict(rng.random)
        engine.step()
    engine.settle()


def prompt_of(rng: random.Random, systems: list[list[int]], texts: list[list[int]]) -> list[int]:
    """A prompt: an earlier text or a system prompt, then a tail of its own."""
    before = rng.choice(texts) if texts and rng.random() < 0.6 else rng.choice(systems)
    if rng.random() < 0.2:
        before = before[: rng.randrange(1, len(before) + 1)]
    tail = [rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 3, 8, 20, 40)))]
    return [*before, *tail][: MODEL_TOKENS - 40] or [1]


def main() -> None:
    """Run the programs of the seeds."""
    model, name, first, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    kind = KINDS[name]
    plants.arrange()
    counts: Counter[str] = Counter()
    for seed in range(first, end):
        rng = random.Random(f"{name}/{seed}")
        overlaps = not kind.drafts and rng.random() < 0.5
        config = vllm_config_of(model, kind, overlaps=overlaps)
        engine = Engine(kind, config, seed)
        try:
            play(engine, aborts_preempted=kind.aborts_preempted)
        except BaseException:
            print(f"kind {name!r}, seed {seed}, overlaps {overlaps}", file=sys.stderr, flush=True)
            raise
        counts += engine.counts
        counts.update({f"side {key}": value for key, value in engine.connector.counts().items()})
        counts["programs"] += 1
    print(json.dumps({"kind": name} | dict(sorted(counts.items()))))


if __name__ == "__main__":
    main()
