"""Harmless: which of TensorRT-LLM's arguments enter no block's name, and why.

Every other one enters, as for SGLang: an argument that a later release adds changes names, which
costs a recomputation, until it is looked at and listed here. Written against the sources of 1.2 and
of the main branch behind 1.3; a name that a release lacks does no harm.

A reason must hold for every value. What enters must be the same in all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

ARGUMENTS: Mapping[str, str] = {
    "enters by content, or a field of the namespace (identity.py)": (
        "model revision load_format dtype quant_config kv_cache_config parallel_config "
        "attn_backend tensor_parallel_size"
    ),
    "refused (identity.py), or of a load format that is": (
        "pipeline_parallel_size pp_partition context_parallel_size cp_config enable_attention_dp "
        "attention_dp_config enable_lm_head_tp_in_adp max_beam_width checkpoint_loader mx_config "
        "gms_config"
    ),
    "blocks are named by token ids, however they were made": (
        "tokenizer tokenizer_mode tokenizer_revision custom_tokenizer skip_tokenizer_init "
        "num_postprocess_workers postprocess_tokenizer_dir post_processor_hook"
    ),
    "what comes after the last layer": (
        "guided_decoding_backend batched_logits_processor sampler_type sampler_force_async_worker "
        "enable_in_graph_sampling enable_speculative_beam_history_d2h generation_config "
        "gather_generation_logits reasoning_parser stream_interval "
        "enable_early_first_token_response"
    ),
    "the server and its processes": (
        "gpus_per_node mpi_session orchestrator_type ray_placement_config num_serve_frontends "
        "garbage_collection_gen0_threshold enable_low_latency_host_dispatch"
    ),
    "logs, metrics and traces": (
        "iter_stats_max_iterations request_stats_max_iterations return_perf_metrics "
        "perf_metrics_output_dir perf_metrics_max_requests prometheus_metrics_config "
        "enable_energy_metrics otlp_traces_endpoint enable_iter_perf_stats enable_iter_req_stats "
        "print_iter_log enable_layerwise_nvtx_marker max_stats_len telemetry_config "
        "ray_worker_nsight_options"
    ),
    "when tokens are computed, and how many at once": (
        "max_batch_size max_num_tokens max_input_len enable_chunked_prefill scheduler_config "
        "batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio "
        "disable_overlap_scheduler reorder_policy_config enable_resource_governor "
        "fail_fast_on_attention_window_too_large encoder_max_batch_size encoder_max_num_tokens"
    ),
    "how the caches are managed, and how much there is": (
        "kv_connector_config sleep_config peft_cache_config"
    ),
    "CUDA graphs replay the same kernels": (
        "cuda_graph_config encoder_cuda_graph_config enable_encoder_decoder_mixed_cuda_graph"
    ),
    "of the former TensorRT backend": "build_config decoding_config",
    "disaggregation carries blocks elsewhere": "cache_transceiver_config",
    "how files are read, not which": "checkpoint_io_policy",
}
"""Names, separated by spaces, by the reason why they are harmless or enter in another way."""
CACHE_ARGUMENTS: Mapping[str, str] = {
    "a field of the namespace, or refused (identity.py)": (
        "dtype tokens_per_block use_kv_cache_manager_v2 enable_block_reuse enable_partial_reuse "
        "host_cache_size max_attention_window"
    ),
    "how the cache is managed, and how much there is": (
        "max_tokens free_gpu_memory_fraction max_gpu_total_bytes cross_kv_cache_fraction use_uvm "
        "secondary_offload_min_priority copy_on_partial_reuse onboard_blocks disk_cache_size "
        "disk_cache_path disk_prefetch_num_reqs max_util_for_resume pool_ratio avg_seq_len "
        "fp8_context_mla_kv_len_cap enable_kv_pool_rebalance kv_pool_rebalance_cooldown_secs "
        "kv_pool_rebalance_min_sampled_kv_caches kv_pool_rebalance_target_ratio_update_interval "
        "kv_pool_rebalance_ratio_threshold kv_pool_rebalance_moving_average_decay "
        "kv_pool_rebalance_check_interval"
    ),
    "events": (
        "event_buffer_max_size attention_dp_events_gather_period_ms kv_events_config "
        "kv_cache_event_hash_algo"
    ),
}
"""Arguments of `kv_cache_config` that change no KV bytes, by reason."""


def _names(arguments: Mapping[str, str]) -> frozenset[str]:
    return frozenset(name for names in arguments.values() for name in names.split())


HARMLESS = _names(ARGUMENTS)
HARMLESS_OF_CACHE = _names(CACHE_ARGUMENTS)
