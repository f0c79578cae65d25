"""Lending: how a worker's device memory travels to the host tier, inside its agent metadata.

A worker on a GPU says `MAGIC` and a msgpack pair: NIXL's metadata as before, and the allocations
that its regions are in, each with a handle of CUDA IPC. Other workers say NIXL's metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbm_common.cuda.copies import Lent
from kvbm_common.cuda.runtime import Allocation, Runtime
from kvbm_common.nixl.transfers import BadPeerMetadata
from kvbm_common.wire.codec import UNREADABLE

MAGIC = b"kvbm-cuda-1\0"


class DeviceMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the GPU at `bus_id`: ordinals differ between processes, this name does not.

    `device` is the worker's ordinal, by which NIXL knows what the worker has registered.
    """

    bus_id: str
    device: int
    allocations: list[Allocation]


_codec = msgspec.msgpack.Decoder(tuple[bytes, DeviceMemory])


def export(runtime: Runtime, regions: Iterable[Lent]) -> DeviceMemory:
    """Export every allocation that some region is in, once. Raises CudaError."""
    found: dict[int, Allocation] = {}
    for region in regions:
        known = found.values()
        if not any(a.address <= region.address < a.address + a.size for a in known):
            allocation = runtime.export(region.address)
            found[allocation.address] = allocation
    return DeviceMemory(runtime.bus_id(), runtime.device, list(found.values()))


def wrap(agent: bytes, memory: DeviceMemory) -> bytes:
    """Wrap NIXL's metadata and the device memory into one blob of agent metadata."""
    return MAGIC + msgspec.msgpack.encode((agent, memory))


def unwrap(agent: bytes) -> tuple[bytes, DeviceMemory | None]:
    """Return NIXL's metadata, and the device memory if there is any. Raises BadPeerMetadata."""
    if not agent.startswith(MAGIC):
        return agent, None
    try:
        return _codec.decode(agent[len(MAGIC) :])
    except UNREADABLE as error:
        raise BadPeerMetadata(f"device memory that cannot be read: {error}") from error
