"""Harmless: arguments and variables of SGLang whose text is not hashed into page names, and why.

Every other one is: one that a later release adds changes names, which costs a recomputation,
until it is looked at and listed here. A test walks the arguments and variables of the release that
is installed. Written against SGLang 0.5.23; a name that a release lacks does no harm.

A reason must hold for every value. What is hashed must be the same in all ranks, on all hosts and
after a restart: ports, ranks and sizes that follow from memory are here, too.
"""

from __future__ import annotations

from kvbm_connectors.client.harmless import Reasons, names_of

PREFIXES = ("SGLANG_",)
OTHER_VARIABLES = frozenset({
    "AITER_FORCE_A8W4", "AITER_SITUV2_A4W4", "AITER_SITUV2_A8W4", "CK_MOE",
    "DEEP_NORMAL_MODE_USE_INT8_QUANT", "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
    "FLASHINFER_NVFP4_4OVER6", "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "FLA_USE_FAST_OPS",
    "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "ROCM_QUICK_REDUCE_QUANTIZATION",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH", "USE_ROCM_AITER_ROPE_BACKEND",
    "USE_TRITON_W8A8_FP8_KERNEL",
})  # fmt: skip
"""Variables with another prefix that SGLang's kernels look at."""
ARGUMENTS: Reasons = {
    "hashed by content (weights.py, adapters.py)": (
        "model_path revision load_format download_dir model_checksum speculative_draft_model_path "
        "speculative_draft_model_revision speculative_draft_load_format quantization_param_path "
        "kt_weight_path decrypted_config_file decrypted_draft_config_file uno_lora_path "
        "modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path "
        "enable_lora lora_paths"
    ),
    "a field of the namespace, or refused by SGLang": (
        "page_size tp_size pp_size dcp_size attn_cp_size hicache_mem_layout"
    ),
    "pages are named by token ids, however they were made": (
        "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num "
        "detokenizer_worker_num skip_tokenizer_init chat_template trust_request_chat_template "
        "hf_chat_template_name completion_template enable_dynamic_batch_tokenizer "
        "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        "enable_tokenizer_batch_encode disable_tokenizer_batch_decode default_chat_template_kwargs "
        "strip_thinking_cache allow_auto_truncate"
    ),
    "what comes after the last layer": (
        "reasoning_parser enable_strict_thinking tool_call_parser tool_server sampling_defaults "
        "sampling_backend grammar_backend preferred_sampling_params random_seed "
        "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
        "constrained_json_max_whitespace_cnt enable_custom_logit_processor "
        "enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts "
        "enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache "
        "enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
        "watermark_mixing_probability watermark_max_probability watermark_default_enabled "
        "watermark_enforce_all enable_return_aux_hidden_states aux_hidden_state_capture "
        "return_aux_hidden_state_layer_ids stream_interval batch_notify_size "
        "stream_response_default_include_usage incremental_streaming_output "
        "speculative_accept_threshold_single speculative_accept_threshold_acc "
        "speculative_use_rejection_sampling speculative_use_block_verification mlx_enable_sampling"
    ),
    "the server, its hosts, ports and processes": (
        "host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar "
        "sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams "
        "http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs "
        "ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name "
        "weight_version file_storage_path enable_cache_report return_input_ids return_output_ids "
        "asr_max_buffer_seconds asr_max_concurrent_sessions nccl_port dist_timeout dist_init_addr "
        "gated_launch_port nnodes node_rank base_gpu_id gpu_id_step watchdog_timeout "
        "soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler numa_node "
        "gc_threshold engine_info_bootstrap_port grpc_response_timeout_secs "
        "enable_http_worker_reuseport enable_response_store smg_http_sidecar_port "
        "enable_streaming_session enable_session_radix_cache"
    ),
    "logs, metrics, traces and events": (
        "log_level log_level_http log_requests log_requests_level log_requests_format "
        "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost "
        "enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers "
        "load_snapshot_publish_interval tokenizer_metrics_custom_labels_header "
        "tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token "
        "bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
        "generation_tokens_buckets gc_warning_threshold_secs decode_log_interval "
        "enable_request_time_stats_logging kv_events_config load_publish_endpoint "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name "
        "enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file "
        "export_metrics_to_file_dir stat_loggers spec_trace_dir expert_distribution_recorder_mode "
        "expert_distribution_recorder_buffer_size expert_balancedness_report_mode "
        "enable_layerwise_nvtx_marker debug_cuda_graph enable_profile_cuda_graph"
    ),
    "when tokens are computed, and how many at once": (
        "mem_fraction_static max_running_requests max_queued_requests max_total_tokens "
        "chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs "
        "enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy "
        "enable_priority_scheduling disable_priority_preemption default_priority_value "
        "abort_on_priority_when_disabled schedule_low_priority_values_first "
        "priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness "
        "disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval "
        "enable_mixed_chunk pp_max_micro_batch_size pp_async_batch_depth load_balance_method "
        "enable_prefill_delayer prefill_delayer_max_delay_passes "
        "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
        "prefill_delayer_max_delay_ms min_free_slots_delay dp_size moe_dp_size "
        "num_reserved_decode_tokens optimistic_prefill_attempts"
    ),
    "how the caches are managed, and how much there is": (
        "swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set disable_hybrid_swa_memory "
        "radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set "
        "disable_radix_cache enable_unified_memory radix_cache_backend enable_hierarchical_cache "
        "hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size "
        "hicache_write_policy hicache_io_backend hicache_storage_backend "
        "hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
        "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts "
        "max_mamba_cache_size mamba_max_states_per_path mamba_full_memory_ratio cpu_offload_gb "
        "offload_group_size offload_num_in_group offload_prefetch_step offload_mode "
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup"
    ),
    "limits and caches of multimodal content: its hash names it": (
        "mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb "
        "mm_preprocess_cache_size_mb limit_mm_data_per_request enable_mm_global_cache "
        "mm_global_cache_backend mm_feature_transport enable_broadcast_mm_inputs_process "
        "enable_prefix_mm_cache"
    ),
    "how many adapters there may be, and when they are loaded": (
        "enable_lora_overlap_loading max_lora_rank max_loaded_loras max_loras_per_batch "
        "lora_eviction_policy max_lora_chunk_size lora_drain_wait_threshold"
    ),
    "how files are read, not which": (
        "weight_loader_disable_mmap weight_loader_prefetch_checkpoints "
        "weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load "
        "delete_ckpt_after_loading"
    ),
    "CUDA graphs replay the same kernels, and compilation keeps what is computed": (
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill "
        "cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode "
        "cuda_graph_bs_prefill cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill "
        "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
        "disable_cuda_graph_padding enable_cudagraph_gc enable_torch_compile "
        "enable_torch_compile_debug_mode torch_compile_max_bs disable_flashinfer_autotune "
        "flashinfer_autotune_skip_ops pre_warm_nccl"
    ),
    "disaggregation carries pages elsewhere": (
        "disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port "
        "disaggregation_ib_device disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup "
        "disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
        "disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy "
        "disaggregation_enable_kv_checksum enable_pd_role_switch encoder_transfer_backend "
        "encoder_urls encoder_bootstrap_port encoder_register_urls "
        "enable_adaptive_dispatch_to_encoder mooncake_ib_device decoupled_spec_bind_endpoint "
        "decoupled_spec_connect_endpoints decoupled_spec_rank"
    ),
    "which guesses are taken from tokens": (
        "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
        "speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_external_corpus_max_tokens"
    ),
    "refused (weights.py), or of a load format that is": (
        "remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports "
        "remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config "
        "weight_cache_socket weight_cache_timeout"
    ),
    "where experts and weights lie; at most the last bit is rounded otherwise": (
        "ep_size ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb "
        "eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
        "eplb_min_rebalancing_utilization_threshold elastic_ep_backend "
        "enable_elastic_expert_backup ep_join_mode ep_join_rank_offset elastic_ep_initial_size "
        "max_ep_size elastic_ep_scale_timeout ple_offload_embedding ple_offload_backend "
        "ple_offload_dir"
    ),
    "debugging; none of it changes what is computed": (
        "debug_tensor_dump_output_folder debug_tensor_dump_layers kv_canary kv_canary_real_data "
        "kv_canary_sweep_interval"
    ),
}
"""Arguments whose text is not hashed, by reason."""
HARMLESS = names_of(ARGUMENTS)
VARIABLES: Reasons = {
    "processes, hosts, ports, ranks and names": (
        "SGLANG_USE_PICKLE_IPC SGLANG_LOG_PICKLE_IPC_OBJECTS SGLANG_ZMQ_ALLOWED_PEERS "
        "SGLANG_ZMQ_SOURCE_IP SGLANG_USE_MESSAGE_QUEUE_BROADCASTER SGLANG_TCP_STORE_PORT "
        "SGLANG_PORT SGLANG_BACKUP_PORT_BASE SGLANG_RUN_ID SGLANG_GRPC_ENDPOINT SGLANG_HOST_IP "
        "SGLANG_LOCAL_IP_NIC SGLANG_DP_RANK SGLANG_DP_SIZE SGLANG_BLOCK_NONZERO_RANK_CHILDREN "
        "SGLANG_ROLE_NAMESPACES SGLANG_ROLE_NAMESPACES_OUT SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS "
        "SGLANG_RAY_BUNDLE_INDICES SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE "
        "SGLANG_IS_FIRST_RANK_ON_NODE SGLANG_GRPC_PORT SGLANG_GRPC_WORKER_THREADS "
        "SGLANG_NCCL_SO_PATH SGLANG_SKIP_P2P_CHECK SGLANG_CPU_OMP_THREADS_BIND SGLANG_CPU_WORKERS "
        "SGLANG_IO_WORKERS SGLANG_GIT_COMMIT SGLANG_SET_CPU_AFFINITY SGLANG_NUMA_BIND_V2 "
        "SGLANG_AUTO_NUMA_BIND SGLANG_CRASH_ON_NUMA_BIND_FAILURE"
    ),
    "the server, its tokens and what clients ask": (
        "SGLANG_ENABLE_REQUEST_DECOMPRESSION SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES "
        "SGLANG_TIMEOUT_KEEP_ALIVE SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT "
        "SGLANG_HTTP_SERVER_APP_PATH SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION "
        "SGLANG_EXPOSE_OWN_ENV_VARS SGLANG_DIAG_BYPASS_HEALTH_GENERATE SGLANG_RUST_SERVER "
        "SGLANG_RUST_BUILD_MODE SGLANG_MAX_BATCH_REQS_PER_HTTP_REQ SGLANG_FORWARD_UNKNOWN_TOOLS "
        "SGLANG_EXA_NUM_RESULTS SGLANG_EXA_SEARCH_TYPE SGLANG_EXA_INCLUDE_HIGHLIGHTS "
        "SGLANG_TOOL_STRICT_LEVEL SGLANG_ENABLE_RESPONSE_TEMPLATE_TURN_GRAMMAR "
        "SGLANG_MAX_THINK_TOKENS SGLANG_PATCH_TOKENIZER SGLANG_BATCH_TOKENIZER_OUTPUTS "
        "SGLANG_PARALLEL_PROMPT_ENCODE SGLANG_PARALLEL_PROMPT_ENCODE_MIN_CHARS "
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT SGLANG_DEFAULT_THINKING SGLANG_WAIT_PORT_TIMEOUT "
        "SGLANG_HEALTH_CHECK_TIMEOUT SGLANG_DETOKENIZER_MAX_STATES SGLANG_WARMUP_TIMEOUT "
        "SGLANG_LOAD_SNAPSHOT_USE_ZMQ SGLANG_OLLAMA_CHAT_ROUTE SGLANG_OLLAMA_GENERATE_ROUTE "
        "SGLANG_OLLAMA_ROOT_ROUTE SGLANG_OLLAMA_SHOW_ROUTE SGLANG_OLLAMA_TAGS_ROUTE "
        "SGLANG_DSV4_REASONING_EFFORT SGLANG_DSV41_REASONING_EFFORT "
        "SGLANG_INKLING_DEFAULT_REASONING_EFFORT"
    ),
    "what comes after the last layer": (
        "SGLANG_GRAMMAR_POLL_INTERVAL SGLANG_GRAMMAR_MAX_POLL_ITERATIONS "
        "SGLANG_DISABLE_OUTLINES_DISK_CACHE SGLANG_RETURN_ORIGINAL_LOGPROB "
        "SGLANG_SANITIZE_NAN_LOGITS SGLANG_ENABLE_LOGPROB_CHUNK SGLANG_LOGPROB_CHUNK_SIZE "
        "SGLANG_ENABLE_FAST_INPUT_LOGPROBS SGLANG_ENABLE_NAN_LOGITS_CHECK"
    ),
    "logs, metrics, traces, dumps and tests": (
        "SGLANG_LOG_GC SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_DECODE_GRAPH_KEY SGLANG_LOG_MS "
        "SGLANG_LOG_REQUEST_EXCEEDED_MS SGLANG_LOG_REQUEST_HEADERS "
        "SGLANG_LOG_SCHEDULER_STATUS_TARGET SGLANG_LOG_SCHEDULER_STATUS_INTERVAL "
        "SGLANG_JIT_LOG_LEVEL SGLANG_ENABLE_RANK_CONSENSUS_CHECKER SGLANG_CUDA_COREDUMP "
        "SGLANG_CUDA_COREDUMP_DIR SGLANG_FORCE_SHUTDOWN SGLANG_PYSPY_DUMP_BEFORE_CRASH "
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS "
        "SGLANG_PROFILE_WITH_STACK SGLANG_PROFILE_RECORD_SHAPES SGLANG_PROFILE_V2 "
        "SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS SGLANG_ENABLE_NVTX_SCHEDULER "
        "SGLANG_ENABLE_NVTX_OPERATIONS SGLANG_RECORD_STEP_TIME "
        "SGLANG_ENABLE_CUDA_GRAPH_CAPTURE_TRACE SGLANG_GRAPH_BATCH_CAPTURE "
        "SGLANG_TORCH_PROFILER_DIR SGLANG_MEM_PROFILE_MAX_ENTRIES "
        "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE "
        "SGLANG_TRACE_ASYNC SGLANG_TRACE_ASYNC_FLUSH_THRESHOLD SGLANG_ENABLE_METRICS_DEVICE_TIMER "
        "SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_TRACE_LOGITS_E2E SGLANG_TRACE_LOGITS_E2E_SYNC "
        "SGLANG_TRACE_SAMPLER_E2E SGLANG_TRACE_QWEN_MOE_DEEPEP_E2E SGLANG_DEEPEP_V2_TRACE_CONTIG "
        "SGLANG_DEEPEP_V2_TRACE_MASKED SGLANG_IS_IN_CI SGLANG_IS_IN_CI_AMD SGLANG_TEST_MAX_RETRY "
        "SGLANG_TEST_TI2I_INPUT_IMAGE SGLANG_JIT_KERNEL_RUN_FULL_TESTS SGLANG_TEST_METRICS_FILE "
        "SGLANG_TEST_STUCK_DETOKENIZER SGLANG_TEST_STUCK_DP_CONTROLLER "
        "SGLANG_TEST_STUCK_SCHEDULER_INIT SGLANG_TEST_STUCK_TOKENIZER "
        "SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS SGLANG_TEST_REQUEST_TIME_STATS "
        "SGLANG_TEST_DISAGG_FAILURE_PROB SGLANG_TEST_DISAGG_KV_CHECKSUM_MISMATCH_PROB "
        "SGLANG_TEST_RETRACT SGLANG_TEST_RETRACT_INTERVAL SGLANG_TEST_RETRACT_NO_PREFILL_BS "
        "SGLANG_TEST_MAMBA_LAZY_ALLOC_FAIL SGLANG_TEST_SKIP_CACHE_HIT_ASSERT "
        "SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES SGLANG_TEST_PD_DISAGG_BACKEND "
        "SGLANG_TEST_PD_DISAGG_DEVICES SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB "
        "SGLANG_TEST_SCRIPTED_RUNTIME SGLANG_TEST_SCRIPTED_RUNTIME_IPC_ADDR "
        "SGLANG_TEST_SCRIPTED_RUNTIME_OUT_OF_BAND_ERROR_PATH "
        "SGLANG_TEST_SCRIPTED_RUNTIME_SYS_PATH_ENTRY SGLANG_LOGGING_CONFIG_PATH "
        "SGLANG_TRACE_LEVEL SGLANG_NSYS_PROFILING SGLANG_PREFILL_DELAYER_DEBUG_LOG "
        "SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG SGLANG_RINGBUFFER_WARNING_INTERVAL "
        "SGLANG_DETECT_SLOW_RANK SGLANG_DEBUG_MEMORY_POOL SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK "
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE "
        "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK SGLANG_LOG_LAZY_COMPACTION_STATS "
        "SGLANG_LOG_LAZY_COMPACTION_STATS_INTERVAL_SEC SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY "
        "SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB "
        "SGLANG_CRASH_ON_JIT_COMPILE SGLANG_DEBUG_SYMM_MEM SGLANG_KERNEL_API_LOGDEST "
        "SGLANG_KERNEL_API_LOGLEVEL SGLANG_EXPERT_LOCATION_UPDATER_LOG_INPUT "
        "SGLANG_EXPERT_LOCATION_UPDATER_CANARY SGLANG_EXPERT_LOCATION_UPDATER_LOG_METRICS "
        "SGLANG_LOG_EXPERT_LOCATION_METADATA SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR "
        "SGLANG_EPLB_HEATMAP_COLLECTION_INTERVAL"
    ),
    "when tokens are computed, and how many at once": (
        "SGLANG_ENABLE_WAITING_PREFIX_REFRESH SGLANG_INIT_NEW_TOKEN_RATIO "
        "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS "
        "SGLANG_RETRACT_DECODE_STEPS SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION "
        "SGLANG_MAX_NEW_TOKENS_LIMIT SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR "
        "SGLANG_CACHE_HIT_RATE_WINDOW_SECONDS SGLANG_PREFILL_DELAYER_MAX_DELAY_PASSES "
        "SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK SGLANG_DATA_PARALLEL_BUDGET_INTERVAL "
        "SGLANG_PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE SGLANG_EXACT_CHUNK_FILL "
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE "
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY "
        "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE SGLANG_EMPTY_CACHE_INTERVAL "
        "SGLANG_SCHEDULER_MAX_RECV_PER_POLL SGLANG_SCHEDULER_SKIP_ALL_GATHER "
        "SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION "
        "SGLANG_REQ_WAITING_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT SGLANG_FORCE_STREAM_INTERVAL"
    ),
    "how the caches are managed, and how much there is": (
        "SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB SGLANG_HICACHE_HF3FS_CONFIG_PATH "
        "SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM "
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE "
        "SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE "
        "SGLANG_HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE "
        "SGLANG_HICACHE_FILE_BACKEND_METADATA_TTL SGLANG_HICACHE_BUFFER_ANCHOR_LOCK_CAP "
        "SGLANG_ENABLE_HICACHE_SWA_TAIL_ONLY_BACKUP SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR "
        "SGLANG_HICACHE_NIXL_USE_DIRECT_IO SGLANG_HUGEPAGE_SIZE "
        "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY "
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE SGLANG_HICACHE_MOONCAKE_CONFIG_PATH "
        "SGLANG_HICACHE_MOONCAKE_REUSE_TE SGLANG_HICACHE_MEMCACHE_CONFIG_PATH "
        "SGLANG_NPU_MEMCACHE_ENABLE_WARMUP SGLANG_HICACHE_HOST_HUGEPAGE "
        "SGLANG_HICACHE_HOST_HUGEPAGE_SIZE SGLANG_HICACHE_HOST_MEM_BACKEND "
        "SGLANG_HICACHE_HOST_NUMA_NODE SGLANG_HICACHE_HOST_PREFAULT "
        "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN SGLANG_HICACHE_SIMM_CONFIG_PATH "
        "SGLANG_RADIX_FORCE_MISS SGLANG_SWA_EVICTION_INTERVAL "
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS "
        "SGLANG_SYMM_MEM_PREALLOC_GB_SIZE SGLANG_FLASHINFER_WORKSPACE_SIZE "
        "SGLANG_QWEN4_PLE_FILE_DIR SGLANG_QWEN4_PLE_FILE_PREFETCH "
        "SGLANG_QWEN4_PLE_FILE_SKIP_DEVICE_CHECK SGLANG_QWEN4_PLE_FILE_RSS_BUDGET_GB "
        "SGLANG_QWEN4_PLE_FILE_RSS_INTERVAL_S"
    ),
    "disaggregation carries pages elsewhere": (
        "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE SGLANG_DISAGGREGATION_QUEUE_SIZE "
        "SGLANG_ENABLE_DISAGG_SAMPLING_MASK SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS "
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT "
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE "
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT "
        "SGLANG_DISAGGREGATION_NIXL_BACKEND SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS "
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS "
        "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER "
        "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK "
        "SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL "
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE "
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT SGLANG_DISAGG_STAGING_BUFFER "
        "SGLANG_DISAGG_STAGING_POOL_SIZE_MB SGLANG_STAGING_USE_TORCH "
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES "
        "SGLANG_MOONCAKE_SEND_AUX_TCP SGLANG_ENABLE_FAILED_SESSION_PROBE "
        "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S "
        "SGLANG_FAILED_SESSION_IDLE_TIMEOUT_S SGLANG_ENCODER_GRPC_TIMEOUT_SECS "
        "SGLANG_ENCODER_MM_RECEIVER_MODE SGLANG_ENCODER_RECV_TIMEOUT SGLANG_ENCODER_SEND_TIMEOUT "
        "SGLANG_ENCODER_HTTP_TIMEOUT SGLANG_ENCODER_REQ_TIMEOUT SGLANG_ENCODER_DISPATCH_MIN_ITEMS "
        "SGLANG_ENCODER_MAX_BATCH_SIZE SGLANG_ENCODER_PREPROC_WORKERS "
        "SGLANG_ENCODER_MM_LOAD_WORKERS SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL "
        "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL "
        "SGLANG_EMBEDDING_POOL_SIZE_MB SGLANG_ENCODER_DP_WORKER_MAX_INFLIGHT "
        "SGLANG_DISAGG_STARTUP_TIMEOUT SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING"
    ),
    "how files are read, not which, and where kernels and caches of them lie": (
        "SGLANG_SORT_WEIGHT_FILES SGLANG_PREFETCH_BLOCK_SIZE_MB "
        "SGLANG_MOE_COPY_WEIGHT_VIEWS_BEFORE_H2D SGLANG_WAIT_WEIGHTS_READY_TIMEOUT "
        "SGLANG_CACHE_DIR SGLANG_CUTE_AOT_CACHE_DIR SGLANG_JIT_CACHE_DIR SGLANG_JIT_CACHE_DEBUG "
        "SGLANG_JIT_CACHE_KEEP SGLANG_JIT_FORCE_RECOMPILE SGLANG_JIT_LOG_RESOURCE_USAGE "
        "SGLANG_DG_CACHE_DIR SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_JIT_DEEPGEMM_FAST_WARMUP "
        "SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP "
        "SGLANG_FLASHINFER_AUTOTUNE_CACHE"
    ),
    "CUDA graphs replay the same kernels, and compilation keeps what is computed": (
        "SGLANG_ENABLE_TORCH_COMPILE SGLANG_USE_BREAKABLE_CUDA_GRAPH "
        "SGLANG_ENABLE_CUDA_GRAPH_DEDUP SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    ),
    "multimodal content is named by its hash, however it is brought here": (
        "SGLANG_USE_CUDA_IPC_TRANSPORT SGLANG_USE_IPC_POOL_HANDLE_CACHE "
        "SGLANG_MM_FEATURE_CACHE_MB SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC "
        "SGLANG_VLM_CACHE_SIZE_MB SGLANG_MM_BUFFER_SIZE_MB SGLANG_MM_LOAD_MAX_RETRIES"
    ),
}
"""Variables that begin with `SGLANG_`, as above. SGLang sets some itself, others differ by rank."""
HARMLESS_VARIABLES = names_of(VARIABLES)
