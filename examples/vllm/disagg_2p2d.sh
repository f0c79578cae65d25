#!/usr/bin/env bash
# KVBM, two prefill workers that share its tiers, two decode workers, and a proxy before them.
# usage: examples/vllm/disagg_2p2d.sh MODEL [ARGUMENT OF VLLM]...
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

worker() { # worker NUMBER NAME CONFIGURATION: on the GPU of that number
  start "$2" env CUDA_VISIBLE_DEVICES="$1" VLLM_NIXL_SIDE_CHANNEL_PORT=$((NIXL_PORT + $1)) \
    vllm serve "$MODEL" --port $((PORT + 1 + $1)) --kv-transfer-config "$3" "${arguments[@]}"
}
arguments=("$@")

start kvbm kvbm up
worker 0 prefill-0 "$BOTH"
worker 1 prefill-1 "$BOTH"
worker 2 decode-0 "$NIXL"
worker 3 decode-1 "$NIXL"
serving $((PORT + 1)) $((PORT + 2)) $((PORT + 3)) $((PORT + 4))

start proxy python3 "$here/disagg_proxy.py" --port "$PORT" \
  --prefill "http://127.0.0.1:$((PORT + 1))" "http://127.0.0.1:$((PORT + 2))" \
  --decode "http://127.0.0.1:$((PORT + 3))" "http://127.0.0.1:$((PORT + 4))"
serving "$PORT"
stay "$PORT"
