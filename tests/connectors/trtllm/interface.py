"""The methods of TensorRT-LLM's two base classes, as read in its sources, by stage.

`1.2` is release 1.2 (_torch/pyexecutor/kv_cache_connector.py). The candidates of 1.3, and the main
branch after them, have the module in `connectors/`; their stages differ in what is optional.
"""

from __future__ import annotations

SCHEDULER = "KvCacheConnectorScheduler"
WORKER = "KvCacheConnectorWorker"

Methods = dict[str, dict[str, tuple[str, ...]]]

ABSTRACT: Methods = {
    SCHEDULER: {
        "build_connector_meta": ("scheduler_output",),
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "request_finished": ("request", "cache_block_ids"),
        "update_state_after_alloc": ("request", "block_ids"),
    },
    WORKER: {
        "register_kv_caches": ("kv_cache_tensor",),
        "start_load_kv": ("stream",),
        "wait_for_layer_load": ("layer_idx", "stream"),
        "save_kv_layer": ("layer_idx", "stream"),
        "wait_for_save": ("stream",),
        "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
    },
}
"""In 1.2 and in every stage of 1.3."""

OPTIONAL: Methods = {
    SCHEDULER: {
        "wait_for_initialization": (),
        "request_finished_by_layer_group": ("request", "cache_block_ids_by_layer_group"),
        "update_state_after_alloc_by_layer_group": ("request", "block_ids_by_layer_group"),
        "cancel_load": ("request", "start", "end"),
        "request_reset": ("request",),
    },
    WORKER: {"register_kv_cache_layout": ("layout",)},
}
"""With a default in the base class, and in some stage of 1.3 only."""

LEFT_TO_THE_BASE = {
    "wait_for_initialization",
    "request_finished_by_layer_group",
    "update_state_after_alloc_by_layer_group",
}
"""What the connector does not replace: nothing is to be waited for, and caches with several layer
groups are refused."""

REQUEST_DATA = {
    "1.2": ("request_id", "new_tokens", "new_block_ids", "computed_position",
            "num_scheduled_tokens"),
    "1.3": ("request_id", "new_tokens", "new_block_ids", "computed_position",
            "num_scheduled_tokens", "block_hashes", "priorities", "cache_salt",
            "new_block_ids_by_layer_group"),
}  # fmt: skip
"""Fields of `RequestData`; `SchedulerOutput` has got `attention_dp_rank` besides."""
