#!/usr/bin/env bash
# KVBM and one vLLM server.
# usage: examples/vllm/agg.sh MODEL [ARGUMENT OF VLLM]...
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [ARGUMENT OF VLLM]...}
shift
PORT=${PORT:-8000}
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
KVBM='{"kv_connector":"KvbmConnector","kv_connector_module_path":"kvbm_connectors.vllm","kv_role":"kv_both"}'

source "$(dirname "$0")/common.sh"

start kvbm kvbm up
start vllm vllm serve "$MODEL" --port "$PORT" --kv-transfer-config "$KVBM" "$@"
serving "$PORT"
stay "$PORT"
