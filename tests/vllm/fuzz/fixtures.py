"""What engines load: two checkpoints of one shape, and four LoRA adapters. Made once per machine.

`python tests/vllm/fuzz/fixtures.py DIRECTORY` in vLLM's environment; `made` from ours.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = 2
ADAPTERS = 4
WEIGHTS = ("a", "b")
SCRIPT = Path(__file__)
TESTS = SCRIPT.parents[1]


def made(python: Path, kind: str) -> Path:
    """A directory with `a`, `b`, and `lora0` to `lora3`, of one kind of model."""
    directory = Path(tempfile.gettempdir()) / f"kvbm-fuzz-{os.getuid()}-{VERSION}-{kind}"
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            unfinished = Path(f"{directory}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
            for seed, name in enumerate(WEIGHTS):
                script, target = TESTS / "make_model.py", unfinished / name
                subprocess.run(
                    [python, script, target, "--kind", kind, "--seed", str(seed)],
                    check=True, env=environ, capture_output=True,
                )  # fmt: skip
            subprocess.run([python, SCRIPT, unfinished], check=True, env=environ)
            unfinished.rename(directory)
    return directory


def put_weights(source: Path, target: Path, *, same_times: bool) -> None:
    """Copy a checkpoint over another, perhaps with the other's times: as some tools copy."""
    for path in sorted(source.iterdir()):
        old = target / path.name
        stat = old.stat() if old.exists() else path.stat()
        shutil.copyfile(path, old)
        if same_times:
            os.utime(old, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def make_adapter(directory: Path, model: Path, seed: int) -> None:
    """A LoRA adapter with random weights, far enough from nothing that it changes answers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    directory.mkdir(parents=True)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    width, narrow = heads * head, config["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(100 + seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", width), ("v_proj", narrow)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (8, hidden), "lora_B": (size, 8)}
            for part, shape in shapes.items():
                drawn = torch.randn(*shape, generator=generator) * 0.5
                tensors[f"{prefix}.{part}.weight"] = drawn
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "a",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    for number in range(ADAPTERS):
        make_adapter(Path(sys.argv[1]) / f"lora{number}", Path(sys.argv[1]) / "a", number)
