"""Make a tiny causal language model with random weights; nothing is downloaded.

`python tests/vllm/make_model.py DIRECTORY [--layers N] [--hidden H] …`

Random weights, with a spread wide enough that every token matters: with vLLM's `load_format=dummy`
the logits are flat and wrong KV goes unnoticed. Tests speak in token ids; the tokenizer, in which
token 7 is the word `t7`, is there because vLLM's server wants one.
The same arguments make the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def main() -> None:
    """Write config.json and model.safetensors into a directory."""
    arguments = parse()
    import torch

    torch.manual_seed(arguments.seed)
    model = KINDS[arguments.kind](arguments).to(getattr(torch, arguments.dtype))
    model.generation_config.eos_token_id = None  # Tests run to max_tokens.
    model.save_pretrained(arguments.directory)
    tokenizer(arguments.vocab).save_pretrained(arguments.directory)


def common(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all kinds are told."""
    return {
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "intermediate_size": 4 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "initializer_range": arguments.spread,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def full(arguments: argparse.Namespace) -> Any:
    """Full attention in every layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **common(arguments),
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
    )
    return Qwen3ForCausalLM(config)


def windowed(arguments: argparse.Namespace) -> Any:
    """Layers with a window of 64 tokens, and a last one with full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    local = ["sliding_attention"] * (arguments.layers - 1)
    config = Gemma3TextConfig(
        **common(arguments),
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        query_pre_attn_scalar=arguments.head_dim,
        sliding_window=64,
        layer_types=[*local, "full_attention"],
    )
    return Gemma3ForCausalLM(config)


def sliding(arguments: argparse.Namespace) -> Any:
    """A window of 64 tokens in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        **common(arguments),
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        sliding_window=64,
    )
    return MistralForCausalLM(config)


def latent(arguments: argparse.Namespace) -> Any:
    """Multi-head latent attention, without experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **common(arguments),
        num_key_value_heads=arguments.heads,
        first_k_dense_replace=arguments.layers,
        n_routed_experts=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    )
    return DeepseekV2ForCausalLM(config)


def sinks(arguments: argparse.Namespace) -> Any:
    """As gpt-oss: every second layer has a window of 64 tokens; attention has sinks, and experts
    compute."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **common(arguments) | {"num_hidden_layers": 4},
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return GptOssForCausalLM(config)


def chunks(arguments: argparse.Namespace) -> Any:
    """As Llama 4: attention within chunks of 64 tokens, and a last layer with full attention."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **common(arguments),
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        intermediate_size_mlp=4 * arguments.hidden,
        num_local_experts=2,
        interleave_moe_layer_step=100,
        moe_layers=[],
        attention_chunk_size=64,
        no_rope_layers=[*[1] * (arguments.layers - 1), 0],
        attn_temperature_tuning=False,
    )
    return Llama4ForCausalLM(config)


def sizes(arguments: argparse.Namespace) -> Any:
    """As Gemma 4: heads of the last layer, with full attention, are twice as wide as those of the
    layers with a window, whose blocks have twice as many tokens."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **common(arguments),
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        global_head_dim=2 * arguments.head_dim,
        sliding_window=64,
        vocab_size_per_layer_input=arguments.vocab,
        layer_types=[*["sliding_attention"] * (arguments.layers - 1), "full_attention"],
    )
    return Gemma4ForCausalLM(config)


def shared(arguments: argparse.Namespace) -> Any:
    """As Gemma 3n: windows beside full attention, and two last layers that read the KV of others
    and have none."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **common(arguments) | {"num_hidden_layers": 6, "tie_word_embeddings": True},
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=arguments.vocab,
        hidden_size_per_layer_input=32,
        altup_num_inputs=2,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * 6,
    )
    return Gemma3nForCausalLM(config)


def states(arguments: argparse.Namespace) -> Any:
    """As Granite 4: Mamba-2 layers, and a last one with full attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **common(arguments),
        num_key_value_heads=arguments.kv_heads,
        layer_types=[*["mamba"] * (arguments.layers - 1), "attention"],
        mamba_n_heads=8,
        mamba_d_head=2 * arguments.hidden // 8,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_chunk_size=32,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=2 * arguments.hidden,
        position_embedding_type="rope",
    )
    return GraniteMoeHybridForCausalLM(config)


def delta(arguments: argparse.Namespace) -> Any:
    """As Qwen3-Next: a gated delta net, and a last layer with full attention and experts. vLLM on
    CPU computes it in bfloat16 alone, and with heads of 128."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **common(arguments),
        num_key_value_heads=arguments.heads,
        head_dim=2 * arguments.head_dim,
        layer_types=[*["linear_attention"] * (arguments.layers - 1), "full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        mlp_only_layers=list(range(arguments.layers - 1)),
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config)


KINDS = {
    make.__name__: make
    for make in (full, windowed, sliding, latent, sinks, chunks, sizes, shared, states, delta)
}


def tokenizer(vocabulary: int) -> Any:
    """One word for each token, with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(vocabulary)}
    plain = Tokenizer(models.WordLevel(words, unk_token="t0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="t0",
        bos_token="t1",
        eos_token="t2",
        chat_template="{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}",
    )


def parse() -> argparse.Namespace:
    """The size of the model; the default has about a million parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=list(KINDS), default="full")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--spread", type=float, default=0.3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
