"""Harmless: arguments and variables of TensorRT-LLM whose text is not hashed into names, and why.

Every other one is, as for SGLang: one that a later release adds changes names, which
costs a recomputation, until it is looked at and listed here. Written against the sources of 1.2 and
of the main branch after 1.3; a name that a release lacks does no harm.

A reason must hold for every value. What is hashed must be the same in all ranks.
"""

from __future__ import annotations

from kvbm_connectors.client.harmless import Reasons, names_of

PREFIXES = ("TRTLLM_", "TLLM_")
OTHER_VARIABLES = frozenset({"ENABLE_PERFECT_ROUTER", "FLA_USE_FAST_OPS", "OVERRIDE_QUANT_ALGO"})
"""Variables with another prefix that change what is computed."""
ARGUMENTS: Reasons = {
    "hashed by content, or a field of the namespace (identity.py)": (
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
"""Arguments whose text is not hashed, by reason."""
CACHE_ARGUMENTS: Reasons = {
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

HARMLESS = names_of(ARGUMENTS)
HARMLESS_OF_CACHE = names_of(CACHE_ARGUMENTS)
VARIABLES: Reasons = {
    "processes, hosts and ranks": (
        "TLLM_DISABLE_MPI TLLM_DISAGG_INSTANCE_IDX TLLM_DISAGG_RUN_REMOTE_MPI_SESSION_CLIENT "
        "TLLM_LLMAPI_ZMQ_PAIR TLLM_NUMA_AWARE_WORKER_AFFINITY TLLM_RAY_FORCE_LOCAL_CLUSTER "
        "TLLM_SPAWN_PROXY_PROCESS TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR "
        "TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY_FD "
        "TLLM_WORKER_USE_SINGLE_PROCESS TRTLLM_EPLB_SHM_NAME TRTLLM_RAY_BUNDLE_INDICES "
        "TRTLLM_RAY_PER_WORKER_GPUS TRTLLM_DISAGG_SERVER_DISABLE_GC TRTLLM_SERVER_DISABLE_GC "
        "TRTLLM_WORKER_DISABLE_GC"
    ),
    "the server, tokens and sampling: blocks are named by token ids": (
        "TLLM_ALLOW_N_GREEDY_DECODING TLLM_EXECUTOR_PERIODICAL_RESP_IN_AWAIT "
        "TLLM_INCREMENTAL_DETOKENIZATION_BACKEND TLLM_STREAM_INTERVAL_THRESHOLD "
        "TRTLLM_RESPONSES_API_DISABLE_STORE TRTLLM_XGUIDANCE_LENIENT"
    ),
    "logs, metrics and traces": (
        "TLLM_AUTOTUNER_LOG_LEVEL_DEBUG_TO_INFO TLLM_KV_CACHE_MANAGER_V2_DEBUG "
        "TLLM_LLMAPI_ENABLE_DEBUG TLLM_LLMAPI_ENABLE_NVTX TLLM_LLMAPI_ZMQ_DEBUG "
        "TLLM_LLM_ENABLE_DEBUG TLLM_LLM_ENABLE_TRACER TLLM_LOG_LEVEL TLLM_NVTX_DEBUG "
        "TLLM_PROFILE_RECORD_GC TLLM_PROFILE_START_STOP TLLM_TORCH_PROFILE_TRACE "
        "TLLM_TRACE_EXECUTOR_LOOP TLLM_TRACE_MODEL_FORWARD TRTLLM_KVCACHE_TIME_OUTPUT_PATH "
        "TRTLLM_PRINT_SKIP_SOFTMAX_STAT TRTLLM_PRINT_STACKS_PERIOD "
        "TRTLLM_WORKER_PRINT_STACKS_PERIOD"
    ),
    "when tokens are computed, and caches of builds": (
        "TLLM_AUTOTUNER_CACHE_PATH TLLM_LLMAPI_BUILD_CACHE TLLM_LLMAPI_BUILD_CACHE_ROOT "
        "TLLM_PP_SCHEDULER_MAX_RETRY_COUNT TLLM_USE_PYTHON_SCHEDULER"
    ),
    "disaggregation carries blocks elsewhere": (
        "TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP TRTLLM_USE_MOONCAKE_KVCACHE "
        "TRTLLM_USE_MPI_KVCACHE TRTLLM_USE_PY_NIXL_KVCACHE TRTLLM_USE_UCX_KVCACHE"
    ),
}
"""Variables that begin with `TRTLLM_` or `TLLM_`, as above: those of the main branch's registry."""
HARMLESS_VARIABLES = names_of(VARIABLES)
