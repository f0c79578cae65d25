#!/usr/bin/env bash
# KVBM, a prefill worker with KVBM and NIXL, a decode worker with NIXL, and a proxy before both.
# usage: examples/vllm/disagg_1p1d.sh MODEL [ARGUMENT OF VLLM]...
set -euo pipefail

MODEL=${1:?usage: $0 MODEL [ARGUMENT OF VLLM]...}
shift
PORT=${PORT:-8000}                      # the proxy; the workers have the ports above it
NIXL_PORT=${NIXL_PORT:-5600}            # of the first worker; the others have those above it
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
KVBM='{"kv_connector":"KvbmConnector","kv_connector_module_path":"kvbm_connectors.vllm","kv_role":"kv_both"}'
NIXL=${NIXL:-'{"kv_connector":"NixlConnector","kv_role":"kv_both"}'}
BOTH='{"kv_connector":"PdConnector","kv_connector_module_path":"kvbm_connectors.vllm","kv_role":"kv_both","kv_connector_extra_config":{"connectors":['$KVBM,$NIXL']}}'

here=$(dirname "$0")
source "$here/common.sh"

start kvbm kvbm up

start prefill env CUDA_VISIBLE_DEVICES=0 VLLM_NIXL_SIDE_CHANNEL_PORT="$NIXL_PORT" \
  vllm serve "$MODEL" --port $((PORT + 1)) --kv-transfer-config "$BOTH" "$@"

start decode env CUDA_VISIBLE_DEVICES=1 VLLM_NIXL_SIDE_CHANNEL_PORT=$((NIXL_PORT + 1)) \
  vllm serve "$MODEL" --port $((PORT + 2)) --kv-transfer-config "$NIXL" "$@"

serving $((PORT + 1)) $((PORT + 2))

start proxy python3 "$here/disagg_proxy.py" --port "$PORT" \
  --prefill "http://127.0.0.1:$((PORT + 1))" --decode "http://127.0.0.1:$((PORT + 2))"
serving "$PORT"
stay "$PORT"
