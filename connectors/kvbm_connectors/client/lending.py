"""Lending: an engine's device memory, and the GPU it is on, so that a host tier can read it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvbm_common.nixl.mover_thread import MoverThread, TransferError
from kvbm_common.runtime.logs import OncePerKind
from kvbm_common.wire.local import Region

from kvbm_connectors.client.arena_reader import CALL_DEADLINE_S

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

MakeGpu = Callable[[], "Gpu"]

_limiter = OncePerKind(logging.getLogger(__name__))


def lend(name: str, regions: Sequence[Region], gpu: Gpu | None) -> tuple[MoverThread, bytes]:
    """Return a mover with the memory registered, and what a host tier needs to read it.

    Raises KvbmError or TimeoutError; the mover is closed then.
    """
    mover = MoverThread(name)
    try:
        return mover, _registered(mover, regions, gpu)
    except BaseException:
        mover.close()
        raise


def _registered(mover: MoverThread, regions: Sequence[Region], gpu: Gpu | None) -> bytes:
    if gpu is not None:
        from kvbm_common.cuda.lending import wrap  # Only where there is a GPU.

        return wrap(_register_vram(mover, regions, gpu), gpu.export(regions))
    for region in regions:
        mover.register_memory(region.address, _reach(region)).result(CALL_DEADLINE_S)
    return mover.metadata().result(CALL_DEADLINE_S)


def _register_vram(mover: MoverThread, regions: Sequence[Region], gpu: Gpu) -> bytes:
    """Return NIXL's metadata: that from before where NIXL does not take the memory.

    The metadata of an agent that has failed to register something cannot be read.
    """
    device = gpu.runtime.device
    before = mover.metadata().result(CALL_DEADLINE_S)
    try:
        for region in regions:
            mover.register_memory(
                region.address, _reach(region), kind="VRAM", device=device
            ).result(CALL_DEADLINE_S)
    except TransferError as error:  # A host tier that shares the GPU needs CUDA IPC alone.
        _limiter.warning("vram", f"NIXL does not take the GPU's memory: {error}")
        return before
    return mover.metadata().result(CALL_DEADLINE_S)


def needs_owner(agent: bytes) -> bool:
    """Return whether reads of the memory that this agent lends may need its mover's polls: CUDA IPC
    does without, and each poll takes Python's lock from the engine."""
    from kvbm_common.cuda.lending import unwrap  # Only where there is a GPU.

    _, memory = unwrap(agent)
    return memory is None or not memory.allocations


def _reach(region: Region) -> int:
    """Return the bytes up to the last piece: regions may be interleaved to a storage's end."""
    return region.stride * (region.blocks - 1) + region.piece_bytes


def gpu_maker(device: Any) -> MakeGpu:
    """Return a function that makes the GPU of a torch device, and raises KvbmError.

    Call this in the engine's own thread: the stream that is current there is the one that computes.
    """
    torch: Any = importlib.import_module("torch")
    compute_stream = current_stream(device)
    index = device.index if device.index is not None else torch.cuda.current_device()

    def make() -> Gpu:
        from kvbm_common.cuda.reading import Gpu  # Only where there is a GPU.
        from kvbm_common.cuda.runtime import CupyRuntime

        return Gpu(CupyRuntime(index), compute_stream=compute_stream)

    return make


def current_stream(device: Any) -> int:
    """Return the stream of a torch device that the calling thread computes on."""
    torch: Any = importlib.import_module("torch")
    return int(torch.cuda.current_stream(device).cuda_stream)
