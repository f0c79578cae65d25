"""The GPU that an engine's KV tensors are on, and the stream that it computes on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbm_common.cuda.reading import Gpu

MakeGpu = Callable[[], "Gpu"]


def gpu_maker(device: Any) -> MakeGpu:
    """Return a function that makes the GPU of a torch device, and raises KvbmError.

    Call this in the engine's own thread: the stream that is current there is the one that computes.
    """
    torch: Any = importlib.import_module("torch")
    compute_stream = int(torch.cuda.current_stream(device).cuda_stream)
    index = device.index if device.index is not None else torch.cuda.current_device()

    def make() -> Gpu:
        from kvbm_common.cuda.reading import Gpu  # Only where there is a GPU.
        from kvbm_common.cuda.runtime import CupyRuntime

        return Gpu(CupyRuntime(index), compute_stream=compute_stream)

    return make
