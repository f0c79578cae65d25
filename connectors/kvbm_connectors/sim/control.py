"""Control: what the driver and a sim engine say to each other, msgpack over ZMQ."""

from __future__ import annotations

import msgspec
from kvbm_common.wire.codec import MsgpackCodec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a sim engine process is started with."""

    name: str
    directory: str
    """For its sockets."""
    host_tier_endpoint: str
    consolidator_endpoint: str
    block_tokens: int = 16
    block_bytes: int = 131_072
    """Over all ranks."""
    block_count: int = 512
    ranks: int = 1
    prefill_us_per_token: float = 20.0
    running_max: int = 16
    """Requests that load or wait for compute at the same time."""
    verify: str = "always"
    onboard_mover: str = "auto"
    model: str = "sim"
    tenant: str = ""
    lease_ms: int = 5_000
    onboard_deadline_ms: int = 2_000
    offer_deadline_ms: int = 5_000
    device: str = "cpu"
    """`cuda`: the blocks are in the memory of the first GPU."""
    connector: bool = True
    """False: the engine without us, for comparison."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    pass


class Submit(_Message, frozen=True, kw_only=True):
    """A request: prompt and the tokens it will generate, as packed LE u32."""

    request: str
    prompt: bytes
    outputs: bytes = b""
    salt: str | None = None
    bypass: bool = False
    """Compute everything: neither the device's cache nor the connector is asked."""


class Ask(_Message, frozen=True, kw_only=True):
    """`dump`, `stats`, `reset` (the prefix cache) or `stop`."""

    what: str


class Started(_Message, frozen=True, kw_only=True):
    """The engine serves. Sent once the connector has attached, or has given up waiting."""

    attached: bool


class Finished(_Message, frozen=True, kw_only=True):
    """A request is done. Token and block counts are of the prompt."""

    request: str
    ttft_ms: float
    tokens: int
    blocks: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    verified: int
    mismatches: int
    failed_blocks: int
    """Promised by a lookup, not usable after the load."""
    error: str = ""


class Dump(_Message, frozen=True, kw_only=True):
    """The names of all blocks that can be found on the device, packed."""

    names: bytes


class Stats(_Message, frozen=True, kw_only=True):
    """The counters of the engine and its connector."""

    idle: bool
    counts: dict[str, int]
    load_seconds: float
    load_bytes: int


class Done(_Message, frozen=True, kw_only=True):
    """`reset` or `stop` was carried out; `ok` False: not now."""

    ok: bool = True


to_engine: MsgpackCodec[Submit | Ask] = MsgpackCodec(Submit | Ask)
from_engine: MsgpackCodec[Started | Finished | Dump | Stats | Done] = MsgpackCodec(
    Started | Finished | Dump | Stats | Done
)
