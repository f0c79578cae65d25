"""Entering: the fields and variables of vLLM 0.32 that were looked at and found to enter names.

What is neither here nor in `kvbm_connectors/vllm/harmless.py` enters as well, and fails a test: a
release has brought it, and a person decides in which of the two lists it belongs.
"""

from __future__ import annotations

FIELDS = {
    "": ("additional_config quant_config"),
    "attention_config": (
        "backend backend_per_kind disable_flashinfer_q_quantization "
        "flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m "
        "flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size indexer_kv_dtype "
        "indexer_sparse_logits minimax_m3_msa_decode_backend mla_prefill_backend "
        "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_non_causal use_prefill_query_quantization "
        "use_trtllm_attention"
    ),
    "attention_config.hisparse_config": ("device_buffer_size eager_host_mirror"),
    "cache_config": (
        "kv_cache_dtype_skip_layers kv_sharing_fast_prefill sliding_window swa_bounded_replay"
    ),
    "device_config": ("device_type"),
    "diffusion_config": ("canvas_length max_denoising_steps"),
    "engram_config": ("cpu_offload dp_shared_memory embedding_across_dp use_thp"),
    "kernel_config": (
        "linear_backend linear_backend_per_quant moe_backend sparse_indexer_topk_backend"
    ),
    "load_config": ("ignore_patterns load_format model_loader_extra_config"),
    "mamba_config": (
        "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds"
    ),
    "model_config": (
        "code_revision config_format convert disable_cascade_attn disable_sliding_window "
        "hf_config hf_overrides is_submodel_config model_class_overrides model_impl "
        "override_generation_config quantization quantization_config runner trust_remote_code"
    ),
    "model_config.multimodal_config": (
        "allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings language_model_only "
        "media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_only mm_encoder_tp_mode mm_processor_kwargs video_pruning_method "
        "video_pruning_rate"
    ),
    "parallel_config": ("all2all_backend enable_hc_sp worker_cls worker_extension_cls"),
    "scheduler_config": ("runner_type"),
    "speculative_config": (
        "attention_backend code_revision disable_eagle_block_drop disable_padded_drafter_batch "
        "draft_sample_method dspark_draft_topk index_share_for_mtp_iteration kv_cache_dtype "
        "method moe_backend num_speculative_tokens parallel_drafting quantization "
        "use_heterogeneous_vocab"
    ),
}
"""By the part of VllmConfig; a draft has the same fields as the model."""
VARIABLES = (
    "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN "
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_ALLREDUCE_USE_FLASHINFER "
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT "
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8 "
    "VLLM_DCP_Q_REPLICATE VLLM_DEEPEPLL_NVFP4_DISPATCH "
    "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
    "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION "
    "VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DISABLED_KERNELS "
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE "
    "VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS VLLM_FLASHINFER_ALLREDUCE_BACKEND "
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION "
    "VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_MOE_GEMM_TYPE "
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM "
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT "
    "VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD "
    "VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_IMAGE_PIXELS VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
    "VLLM_MEDIA_CONNECTOR VLLM_MLA_DISABLE VLLM_MOE_ROUTING_SIMULATION_STRATEGY "
    "VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD "
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_PLUGINS "
    "VLLM_REPLICATE_EMBED VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS "
    "VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MLA_DCP_VERIFY "
    "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_FP8_PADDING "
    "VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 "
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB "
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB "
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR "
    "VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM "
    "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR "
    "VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA "
    "VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2 "
    "VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE "
    "VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION "
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_TEST_FORCE_LOAD_FORMAT "
    "VLLM_TPU_USING_PATHWAYS VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_USE_TD "
    "VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES "
    "VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER "
    "VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC "
    "VLLM_USE_MODELSCOPE VLLM_USE_OINK_OPS VLLM_USE_TRITON_AWQ VLLM_USE_V2_MODEL_RUNNER "
    "VLLM_VIDEO_LOADER_BACKEND VLLM_XLA_USE_SPMD VLLM_XPU_FORCE_N_CONTIG_WEIGHT "
    "VLLM_XPU_INC_WNA16_BACKEND VLLM_ZENTORCH_WEIGHT_PREPACK"
)
LORA = (
    "enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora "
    "lora_dtype target_modules"
)
"""Of LoRAConfig, for an adapter's name."""
