"""Harmless: which of SGLang's arguments enter no page's name, and why.

Every other one enters: an argument that a later release adds changes names, which costs a
recomputation, until it is looked at and listed here. A test walks the arguments of the release that
is installed. Written against SGLang 0.5.23; a name that a release lacks does no harm.

A reason must hold for every value. What enters must be the same in all ranks, on all hosts and
after a restart: ports, ranks and sizes that follow from memory are here, too.
"""

from __future__ import annotations

from collections.abc import Mapping

ARGUMENTS: Mapping[str, str] = {
    "enters by content (weights.py, adapters.py)": (
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
"""Names, separated by spaces, by the reason why they are harmless or enter in another way."""
HARMLESS = frozenset(name for names in ARGUMENTS.values() for name in names.split())
