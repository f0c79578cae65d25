"""Programs on vLLM's scheduler and a device of ours: `python -m tests.vllm.device.process MODEL …`.

`MODEL KIND FIRST END` runs the programs of these seeds, and prints what happened as JSON. A failure
ends it with the seed. The environment may name a defect that is put in (`plants.py` of the fuzzer).
`MODEL` alone serves: lines of JSON on stdin, `SeedsCommand`, whose start of ten seconds is paid
once. Runs in vLLM's environment.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tests.vllm.device.engine import (
    MODEL_TOKENS,
    STEP_TOKENS,
    VOCABULARY,
    DeviceConnector,
    Engine,
)
from tests.vllm.device.kinds import KINDS, Kind
from tests.vllm.device.live_talk import SeedsCommand, SeedsReply
from tests.vllm.fuzz import plants

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


def play(engine: Engine, *, aborts_preempted: bool, answer_max: int) -> None:
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
            names.append(engine.submit(prompt, rng.randrange(1, answer_max)))
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


def run(model: str, name: str, seeds: range) -> dict[str, int]:
    """Run programs of a kind; returns what happened. A failure says its seed."""
    kind, counts = KINDS[name], Counter[str]()
    for seed in seeds:
        rng = random.Random(f"{name}/{seed}")
        overlaps = not kind.drafts and rng.random() < 0.5
        config = vllm_config_of(model, kind, overlaps=overlaps)
        engine = Engine(kind, config, seed)
        try:
            play(engine, aborts_preempted=kind.aborts_preempted, answer_max=kind.answer_max)
        except BaseException as error:
            error.add_note(f"kind {name!r}, seed {seed}, overlaps {overlaps}")
            raise
        counts += engine.counts
        counts.update({f"side {key}": value for key, value in engine.connector.counts().items()})
        counts["programs"] += 1
    return dict(sorted(counts.items()))


def answer(model: str, command: SeedsCommand) -> SeedsReply:
    """Run what a command asks for; an exception is the reply."""
    plants.arrange(command.plant)
    try:
        return SeedsReply(counts=run(model, command.kind, range(command.first, command.end)))
    except Exception:
        return SeedsReply(error=traceback.format_exc())


def main() -> None:
    """Run the programs of one command line, or serve. vLLM writes to stdout too: our lines go to a
    copy."""
    model, *rest = sys.argv[1:]
    if rest:
        name, first, end = rest
        plants.arrange()
        counts = run(model, name, range(int(first), int(end)))
        print(json.dumps({"kind": name} | counts))
        return
    faulthandler.register(signal.SIGUSR1)
    ours = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in os.fdopen(0, "rb", buffering=0):
        reply = answer(model, msgspec.json.decode(line, type=SeedsCommand))
        ours.write(msgspec.json.encode(reply) + b"\n")


if __name__ == "__main__":
    main()
