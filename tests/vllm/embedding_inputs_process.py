"""Say what embedding inputs vLLM takes beside a connector.

`python -m tests.vllm.embedding_inputs_process DIR KV_TRANSFER_CONFIG` writes a JSON object with two
settings of a small audio model, whose configuration it puts into the directory.
"""

from __future__ import annotations

import json
import os
import sys

SETTINGS = ("enable_mm_embeds", "allow_missing_mm_embeddings")


def main() -> None:
    """vLLM writes to stdout too: the answer goes to a copy of it."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    directory, transfer = sys.argv[1], json.loads(sys.argv[2])
    from transformers import Qwen2AudioConfig
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64}  # fmt: skip
    config = Qwen2AudioConfig(text_config=text, audio_token_index=60)
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    config.save_pretrained(directory)
    arguments = EngineArgs(
        model=directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=512, kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )  # fmt: skip
    inputs = arguments.create_engine_config().model_config.multimodal_config
    json.dump({name: getattr(inputs, name, None) for name in SETTINGS}, ours)
    ours.close()


if __name__ == "__main__":
    main()
