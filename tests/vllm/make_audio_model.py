"""Make a tiny model with random weights that hears: as Qwen2-Audio, with its processor.

`python tests/vllm/make_audio_model.py DIRECTORY`; the tokens 6, 5, 7 of a prompt stand for a sound.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.vllm.make_model import tokenizer

BEGIN, SOUND, END = 6, 5, 7
VOCABULARY = 1024
SPREAD = 0.3
MEL_BINS = 32


def main() -> None:
    """Write config.json, model.safetensors and what the processor reads."""
    import torch
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    directory = Path(sys.argv[1])
    torch.manual_seed(0)
    model = random_model()
    model.generation_config.eos_token_id = None  # Tests run to max_tokens.
    model.save_pretrained(directory)
    rename(directory / "model.safetensors")
    words = tokenizer(VOCABULARY)
    begin, sound, end = (f"t{token}" for token in (BEGIN, SOUND, END))
    words.add_special_tokens({"additional_special_tokens": [begin, sound, end]})
    extractor = WhisperFeatureExtractor(feature_size=MEL_BINS)
    Qwen2AudioProcessor(
        extractor, words, audio_token=sound, audio_bos_token=begin, audio_eos_token=end
    ).save_pretrained(directory)


def random_model() -> Any:
    """Return a model whose answers depend on every sound."""
    import torch
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    ear = {
        "d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "num_mel_bins": MEL_BINS, "max_source_positions": 1500, "init_std": SPREAD,
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": 128,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "initializer_range": SPREAD, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "use_sliding_window": False,
    }  # fmt: skip
    config = Qwen2AudioConfig(audio_config=ear, text_config=text, audio_token_index=SOUND)
    model = Qwen2AudioForConditionalGeneration(config).to(torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "multi_modal_projector" in name and weights.dim() > 1:
                weights.normal_(0, SPREAD)
    return model


def rename(path: Path) -> None:
    """Give the tensors the names under which vLLM looks for them."""
    from safetensors.torch import load_file, save_file

    inner = "language_model.model."
    tensors = {
        name.replace(f"{inner}model.", inner): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)


if __name__ == "__main__":
    main()
