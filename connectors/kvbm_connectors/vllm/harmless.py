"""Harmless: fields and variables of vLLM whose text is not hashed into block names, and why.

Everything else is: a field or a variable that a later release adds changes names, which costs
a recomputation, until it is looked at and listed here. A test walks the fields and variables of the
release that is installed. Written against vLLM 0.32; a name that a release lacks does no harm.

A reason must hold for every value. What is hashed must be the same in all processes of an engine,
on all hosts and after a restart: ports, paths, ranks and sizes that follow from memory are here,
too.
"""

from __future__ import annotations

from kvbm_connectors.client.harmless import Reasons, names_of

PREFIXES = ("VLLM_",)
OTHER_VARIABLES = frozenset({
    "AITER_BF16_FP8_MOE_BOUND", "INKLING_GFX950_GLUON", "XPU_USE_TRITON_KERNEL",
    "K_SCALE_CONSTANT", "Q_SCALE_CONSTANT", "V_SCALE_CONSTANT",
})  # fmt: skip
"""Variables with another prefix that vLLM's kernels look at."""

MODEL: Reasons = {
    "a path or revision: weights and configuration count by content": (
        "model model_weights hf_config_path revision"
    ),
    "follows from hf_config": "hf_text_config",
    "a field of the namespace": "dtype",
    "enters where it changes anything: where rope is scaled, and for Llama 4": (
        "max_model_len spec_target_max_model_len"
    ),
    "a block is named by its token ids, however they were made": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers "
        "io_processor_plugin"
    ),
    "what comes after the last layer": (
        "seed max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel logits_processors "
        "pooler_config word_embeddings_untied_by_checkpoint enable_trace_replay"
    ),
    "a path; the file counts by its content (loading.py, `beside`)": "generation_config",
    "access, and what clients call the model": (
        "allowed_local_media_path allowed_media_domains served_model_name hf_token "
        "allow_deprecated_quantization"
    ),
    "requests that use it are refused": "enable_prompt_embeds",
    "when and where it is computed": (
        "enforce_eager enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator"
    ),
    "limits, caches and ways of multimodal content: its identifier names it": (
        "multimodal_config.limit_per_prompt multimodal_config.mm_processor_cache_gb "
        "multimodal_config.mm_processor_cache_type multimodal_config.mm_hasher_algorithm "
        "multimodal_config.mm_shm_cache_max_object_size_mb multimodal_config.skip_mm_profiling "
        "multimodal_config.mm_tensor_ipc multimodal_config.mm_ipc_gpu_memory_gb"
    ),
    "a path; scales count by their content (`beside`)": (
        "multimodal_config.mm_encoder_fp8_scale_path "
        "multimodal_config.mm_encoder_fp8_scale_save_path "
        "multimodal_config.mm_encoder_fp8_scale_save_margin"
    ),
}
"""Fields of ModelConfig that do not change KV bytes; also those of a draft's."""
LOAD: Reasons = {
    "how files are read, not which": (
        "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location device"
    ),
}
CACHE: Reasons = {
    "a field of the namespace": "block_size cache_dtype kv_cache_layout",
    "how the cache is managed, and how much there is": (
        "user_specified_block_size prefix_match_unit gpu_memory_utilization swap_space "
        "num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo "
        "prefix_cache_retention_interval num_gpu_blocks num_cpu_blocks cpu_offload_gb "
        "effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency "
        "hash_block_size cache_hit_alignment_tokens kv_cache_memory_bytes kv_offloading_size "
        "kv_offloading_backend _block_size_resolved skip_page_size_padded "
        "cpu_kvcache_space_bytes"
    ),
    "states' shapes, types, pages and blocks name the grouping": (
        "mamba_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype"
    ),
    "which states are kept": "mamba_cache_mode enable_mamba_shared_prefix_checkpoint",
    "vLLM refuses it beside a connector": "replayssm_buffer_len use_replayssm use_kda_recoverssm",
    "follows from hf_config": "is_attention_free",
}
PARALLEL: Reasons = {
    "the namespace says how blocks are cut": "tensor_parallel_size pipeline_parallel_size",
    "refused": (
        "decode_context_parallel_size prefill_context_parallel_size dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
        "_allow_auto_resolve_cp_interleave_size"
    ),
    "ranks, hosts and ports": (
        "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_index data_parallel_master_ip data_parallel_master_port "
        "data_parallel_rpc_port data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb _data_parallel_master_port_list _coord_store_port master_addr "
        "master_port node_rank nnodes world_size rank _api_process_count _api_process_rank "
        "placement_group ray_runtime_env ray_workers_use_nsight assigned_physical_gpu_ids "
        "numa_bind numa_bind_nodes numa_bind_cpus distributed_executor_backend "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds max_parallel_loading_workers "
        "dp_sync_interval"
    ),
    "follows from hf_config": "is_moe_model",
    "where experts and batches are computed; at most the last bit is rounded otherwise": (
        "enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb "
        "eplb_config expert_placement_strategy enable_elastic_ep elastic_ep_max_dp_size enable_dbo "
        "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
        "disable_nccl_for_dp_synchronization disable_custom_all_reduce enable_shm_tensor_arena "
        "enable_fault_tolerance fault_tolerance_config"
    ),
}
SPECULATIVE: Reasons = {
    "the engine's own, which enter by themselves": (
        "target_model_config target_parallel_config draft_parallel_config"
    ),
    "a path or revision, or a number of ranks": (
        "model revision draft_tensor_parallel_size tensor_parallel_size max_model_len"
    ),
    "which guesses are made and taken": (
        "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification "
        "enforce_eager use_local_argmax_reduction"
    ),
}
SCHEDULER: Reasons = {
    "when tokens are computed, and how many at once": (
        "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens "
        "enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy "
        "disable_chunked_mm_input scheduler_cls disable_hybrid_kv_cache_manager "
        "scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling "
        "stream_interval"
    ),
    "follows from hf_config": "is_multimodal_model",
}
LORA: Reasons = {
    "how many adapters there may be, and the largest rank": (
        "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels"
    ),
    "how the work is divided": "fully_sharded_loras specialize_active_lora",
    "brings a request its adapter, which then is in its name": "default_mm_loras",
}
"""Fields of LoRAConfig that change no KV bytes, for the name of an adapter (adapters.py)."""
KERNEL: Reasons = {
    "how a kernel is warmed up, and which of equal tactics is the fastest": (
        "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup "
        "enable_jit_warmup"
    ),
    "implementations of one operation; at most the last bit is rounded otherwise": (
        "ir_op_priority"
    ),
}
ENGINE: Reasons = {
    "part of the names of a request's blocks": "lora_config",
    "what is reported, and where": (
        "observability_config logging_config profiler_config kv_events_config aux_output_config"
    ),
    "what leaves the last layer": ("structured_outputs_config reasoning_config watermark_config"),
    "carries blocks, embeddings and weights; weights have a name, or the caches are reset": (
        "kv_transfer_config ec_transfer_config ec_manager_config weight_transfer_config"
    ),
    "where weights lie": "offload_config",
    "the compiler and CUDA graphs keep what is computed, but for the last bit; much is what a "
    "process has done so far. Passes of an operator enter (computation.py)": ("compilation_config"),
    "this engine's life": "instance_id shutdown_timeout",
    "a device's number may be in it; its type enters": "device_config.device",
    "choose among settings of scheduling, compilation and CUDA graphs": (
        "optimization_level performance_mode"
    ),
}

VARIABLES: Reasons = {
    "how vLLM is built and which release it calls itself": (
        "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST "
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT "
        "VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_SKIP_VERSION_SUFFIX "
        "VLLM_NCCL_INCLUDE_PATH VLLM_HAS_FLASHINFER_CUBIN VLLM_ENABLE_CUDA_COMPATIBILITY"
    ),
    "paths, hosts, ports, ranks and names of processes": (
        "VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH "
        "VLLM_NCCL_SO_PATH VLLM_CUDART_SO_PATH VLLM_DEBUG_DUMP_PATH VLLM_XLA_CACHE_PATH "
        "VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE "
        "VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_RAY_DP_PLACEMENT_NODE_IPS "
        "VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES "
        "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST "
        "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
        "VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_DIST_IDENT "
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_CUDA_COMPATIBILITY_PATH VLLM_RUST_FRONTEND_PATH "
        "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_ASSETS_CACHE "
        "VLLM_MEDIA_CACHE VLLM_TUNED_CONFIG_FOLDER VLLM_GPU_NIC_PCIE_MAPPING "
        "VLLM_NIC_SELECTION_VARS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_MODEL_REDIRECT_PATH"
    ),
    "processes, threads, memory and deadlines": (
        "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_READY_TIMEOUT_S "
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS "
        "VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND "
        "VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE "
        "VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD "
        "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
        "VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND "
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_SKIP_P2P_CHECK VLLM_ENABLE_STARTUP_PLAN "
        "VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY "
        "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_USE_SPINLOOP_EXT "
        "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DBO_COMM_SMS "
        "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS "
        "VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_SNAPSHOT_TIMEOUT_S VLLM_XPU_PP_MICROBATCH"
    ),
    "the API, tokens and sampling: blocks are named by token ids": (
        "VLLM_API_KEY VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH VLLM_SERVER_DEV_MODE "
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_USE_FASTOKENS "
        "VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS "
        "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_USE_FLASHINFER_SAMPLER "
        "VLLM_XPU_USE_SAMPLER_KERNEL VLLM_XGRAMMAR_CACHE_MB VLLM_REGEX_COMPILATION_TIMEOUT_S "
        "VLLM_V1_USE_OUTLINES_CACHE VLLM_V1_OUTPUT_PROC_CHUNK_SIZE "
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
        "VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API "
        "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
        "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS "
        "VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    ),
    "how media is brought here, not what becomes of it": (
        "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT "
        "VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES "
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_URL_ALLOW_REDIRECTS "
        "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB "
        "VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_EMBED_DECODE_BYTES "
        "VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_ASSETS_CACHE_MODEL_CLEAN"
    ),
    "logs, metrics, traces and events": (
        "VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE "
        "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM "
        "VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR VLLM_LOG_STATS_INTERVAL VLLM_TRACE_FUNCTION "
        "VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS "
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DISABLE_LOG_LOGO VLLM_GC_DEBUG "
        "VLLM_DEBUG_WORKSPACE VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG "
        "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_MOONCAKE_STORE_TIER_LOG"
    ),
    "other connectors and offloading": (
        "VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S "
        "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_LOAD_RECV_THREADS "
        "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT "
        "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD "
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
    ),
    "compilation and CUDA graphs keep what is computed": (
        "VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BREAKABLE_CUDAGRAPH "
        "VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK VLLM_FORCE_AOT_LOAD "
        "VLLM_USE_MEGA_AOT_ARTIFACT VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT "
        "VLLM_USE_LAYERNAME VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE "
        "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_TRITON_JIT_WARMUP_NUM_THREADS "
        "VLLM_DEEP_GEMM_WARMUP VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_XLA_CHECK_RECOMPILATION"
    ),
    "a state's shape follows from it, and names the grouping": "VLLM_SSM_CONV_STATE_LAYOUT",
    "the namespace says the layout, and how blocks are cut": (
        "VLLM_KV_CACHE_LAYOUT VLLM_PP_LAYER_PARTITION"
    ),
    "streams and sums in another order; vLLM sets some of them in workers alone": (
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
        "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_LORA_ENABLE_DUAL_STREAM "
        "VLLM_LORA_DISABLE_PDL VLLM_DISABLE_PYNCCL VLLM_USE_NCCL_SYMM_MEM "
        "VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_CUSTOM_ALLREDUCE_ALGO VLLM_ROCM_USE_SKINNY_GEMM"
    ),
}
"""Variables that begin with `VLLM_` and change no KV bytes."""
OF_LORA = names_of(LORA)
FIELDS = frozenset((
    *names_of(ENGINE),
    *names_of(MODEL, "model_config."),
    *names_of(LOAD, "load_config."),
    *names_of(CACHE, "cache_config."),
    *names_of(PARALLEL, "parallel_config."),
    *names_of(SCHEDULER, "scheduler_config."),
    *names_of(KERNEL, "kernel_config."),
    *names_of(SPECULATIVE, "speculative_config."),
    *names_of(MODEL, "speculative_config.draft_model_config."),
    *names_of(LOAD, "speculative_config.draft_load_config."),
))  # fmt: skip
"""Paths below VllmConfig, of fields or of whole parts."""
HARMLESS_VARIABLES = names_of(VARIABLES)
