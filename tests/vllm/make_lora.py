"""Make a LoRA adapter with random weights for the model that make_model.py makes.

`python tests/vllm/make_lora.py MODEL DIRECTORY [SEED [broken]]`; `broken`: the last layer's weights
have another shape, so that a load fails when it has put those of others in their places.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RANK = 8
SPREAD = 0.5
"""Wide enough that the adapter changes answers."""


def main() -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    directory = Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    torch.manual_seed(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden) * SPREAD
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK) * SPREAD
    if sys.argv[4:] == ["broken"]:
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(2 * width, RANK)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
        "target_modules": ["q_proj"], "bias": "none", "base_model_name_or_path": sys.argv[1],
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
