#!/usr/bin/env bash
# KVBM and one vLLM server on several GPUs (tensor parallelism).
# usage: TP=2 examples/vllm/agg_tp.sh MODEL [ARGUMENT OF VLLM]...
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [ARGUMENT OF VLLM]...}
shift
TP=${TP:-2}
PORT=${PORT:-8000}
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
KVBM='{"kv_connector":"KvbmConnector","kv_connector_module_path":"kvbm_connectors.vllm","kv_role":"kv_both"}'

source "$(dirname "$0")/common.sh"

start kvbm kvbm up
start vllm vllm serve "$MODEL" --port "$PORT" --tensor-parallel-size "$TP" \
  --kv-transfer-config "$KVBM" "$@"
serving "$PORT"
stay "$PORT"
