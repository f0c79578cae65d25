"""Every argument and variable of the installed SGLang was looked at; page keys hold what we say."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from kvbm_connectors.sglang.harmless import HARMLESS, HARMLESS_VARIABLES
from kvbm_connectors.sglang.pushes import METHODS

from tests.sglang import entering
from tests.sglang.harness import ENVIRON, PYTHON, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ENTERING = (
    "model_loader_extra_config trust_remote_code context_length is_embedding enable_multimodal "
    "model_impl model_config_parser json_model_override_args dtype quantization kv_cache_dtype "
    "enable_fp32_lm_head modelopt_quant quantize_and_serve rl_quant_profile enable_tf32_matmul "
    "c128_page_size prefill_only_disable_kv_cache enable_page_major_kv_layout "
    "disable_chunked_prefix_cache attn_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj "
    "enable_prefill_cp cp_strategy enable_dsa_cache_layer_split enable_cp_decode_attn_tp "
    "enable_kv_cache_sharding enable_dp_attention enable_dp_attention_local_control_broadcast "
    "enable_dp_lm_head enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered "
    "enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp "
    "enable_layernorm_sp disable_attn_tp_gather enable_p2p_check device attention_backend "
    "decode_attention_backend enable_lean_attention prefill_attention_backend "
    "mm_attention_backend fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend "
    "dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend "
    "dsa_topk_backend mamba_backend enable_nccl_nvls enable_symm_mem "
    "triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
    "triton_attention_split_tile_size flashinfer_mla_disable_ragged enable_fused_qk_norm_rope "
    "enable_precise_embedding_interpolation enable_fused_moe_sum_all_reduce "
    "enable_deepseek_v4_fp4_indexer disable_custom_all_reduce enable_mscclpp "
    "enable_torch_symm_mem enable_scattered_sconv boundary_reduction enable_quant_communications "
    "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
    "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion speculative_algorithm "
    "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
    "speculative_dflash_block_size speculative_dspark_block_size "
    "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
    "speculative_dspark_align_verify_tokens_to_graph_tier speculative_token_map "
    "speculative_attention_mode speculative_draft_attention_backend speculative_dsa_topk_backend "
    "speculative_draft_kv_cache_dtype speculative_draft_window_size "
    "speculative_moe_runner_backend speculative_moe_a2a_backend "
    "speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization "
    "_speculative_draft_quantization_explicitly_set enable_multi_layer_eagle speculative_adaptive "
    "speculative_adaptive_config decoupled_spec_role moe_a2a_backend enable_w4a4_mxfp4_megamoe "
    "deepep_v2_mode moe_runner_backend flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode "
    "deepep_dispatcher_output_dtype deepep_config moe_dense_tp_size enable_waterfill "
    "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion "
    "enforce_shared_experts_fusion mamba_ssm_dtype enable_mamba_cache_stochastic_rounding "
    "mamba_cache_philox_rounds mamba_radix_cache_strategy uses_mamba_radix_cache "
    "mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend "
    "linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend "
    "enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec "
    "enable_unified_cache_external_linker unified_cache_external_linker_backend enable_hisparse "
    "hisparse_config mm_enable_dp_encoder mm_process_config trust_mm_content_hashes "
    "image_processor_backend disable_fast_image_processor lora_target_modules lora_backend "
    "experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
    "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold "
    "enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file kt_method kt_cpuinfer "
    "kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token dllm_algorithm "
    "dllm_algorithm_config dllm_fdfo encoder_only language_only language_model_only enable_pdmux "
    "pdmux_config_path sm_group_num startup_weight_load_mode custom_weight_loader "
    "checkpoint_engine_wait_weights_before_ready enable_deterministic_inference "
    "rl_on_policy_target debug_tensor_dump_input_file enable_mis weight_cache_mode forward_hooks "
    "msprobe_dump_config speculative_domino_candidate_pool_size flashinfer_a2a_dispatch_type "
    "prefill_kv_cache_dequant_dtype dsv4_attn_backend enable_linker_mla_dedup swa_prefix_tails "
    "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay qsa_indexer_dtype "
    "speculative_boundary_reduction speculative_draft_sink_size "
    "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode "
    "enable_amd_monokernel dsa_triton_union enable_dsa_fused_indexer enable_cp_tp_group_sharing "
    "enable_paged_experts paged_experts_num_resident enable_nvidia_megakernel "
    "enable_megamoe_for_layernorm_sp unified_cache_external_linker_config"
)
"""Arguments of SGLang 0.5.23 that enter names. One in neither list enters, and fails the test."""
PROGRAM = """
import json, os, sys
ours = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
from tests.sglang import hollow
hollow.install()
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed
from sglang.srt import environ, runtime_context
from sglang.srt.server_args import ServerArgs, record_fields
from types import SimpleNamespace as Place
from kvbm_connectors.sglang.backend import is_late, publisher_rank
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
arguments = ServerArgs(model_path=sys.argv[1], device="cpu", hicache_storage_backend="dynamic")
context = runtime_context.publish(arguments, role="scheduler")
late = [is_late(arguments)]
context.override("scheduler.detach_hicache", hicache_storage_backend=None)
late.append(is_late(arguments))
publishers = [publisher_rank(0)]
for size, rank, replica in ((1, 0, 1), (2, 1, None), (1, 0, None)):
    here = Place(attn_dp_size=size, attn_dp_rank=rank, dp_rank=replica)
    runtime_context.get_parallel = lambda here=here: here
    publishers.append(publisher_rank(0))
def key(lora): return get_hash_str([1, 2], storage_namespace_seed(lora, None))
found = {
    "fields": [field.name for field in record_fields(ServerArgs)],
    "variables": [n for n, v in vars(environ.Envs).items() if isinstance(v, environ.EnvField)],
    "late": late,
    "publishers": publishers,
    "updater": [n for n, v in vars(WeightUpdater).items() if callable(v) and n[0] != "_"],
    "resolves": hasattr(ServerArgs, "resolved_dict"),
    "at_the_start": [key(LoRARef.deterministic_id("poet", "/srv/poet")) for _ in range(2)],
    "while_it_serves": [key(LoRARef(lora_name="poet", lora_path="/srv").lora_id) for _ in range(2)],
}
json.dump(found, ours); ours.flush(); os._exit(0)
"""


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang itself says."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    found = subprocess.run(
        [PYTHON, "-c", PROGRAM, model], stdout=subprocess.PIPE, check=True, cwd=ROOT,
        env=dict(os.environ) | ENVIRON,
    ).stdout  # fmt: skip
    answer: dict[str, Any] = json.loads(found)
    return answer


def test_every_argument_was_looked_at(known: dict[str, Any]) -> None:
    """One in neither list changes names already; put it where it belongs."""
    assert len(known["fields"]) > 500
    assert set(known["fields"]) - HARMLESS == set("".join(ENTERING).split())
    assert known["resolves"]


def test_every_variable_was_looked_at(known: dict[str, Any]) -> None:
    """One of SGLang's registry is in one list; some that are read elsewhere are harmless, too."""
    registered = {name for name in known["variables"] if name.startswith("SGLANG_")}
    assert len(registered) > 500
    assert registered - HARMLESS_VARIABLES == set(entering.VARIABLES.split())


def test_a_storage_that_is_attached_late_is_told_from_one_of_the_start(
    known: dict[str, Any],
) -> None:
    """Weights may have been updated before the later one."""
    assert known["late"] == [False, True]


def test_every_way_that_weights_are_written_is_watched(known: dict[str, Any]) -> None:
    """The others leave a group, and receive what is loaded afterwards."""
    others = {"destroy_weights_update_group", "receive_weights_from_distributed"}
    assert set(known["updater"]) == {*METHODS} | others


def test_replicas_publish_on_ports_of_their_own(known: dict[str, Any]) -> None:
    """By SGLang's own rule: without DP attention by replica, with it by the rank there. Outside a
    server it is what the storage's configuration says."""
    assert known["publishers"] == [0, 1, 1, 0]


def test_page_keys_hold_an_adapter_s_id_and_not_its_content(known: dict[str, Any]) -> None:
    """An adapter of the start has the same keys in every life, a later one has its own."""
    first, again = known["at_the_start"]
    assert first == again
    one, other = known["while_it_serves"]
    assert len({one, other, first}) == 3
