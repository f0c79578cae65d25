"""CUDA: blocks between device memory and a pinned arena. Imported only where there is a GPU.

Nothing here imports msgspec, ZMQ or NIXL at its top, and cupy is imported when a `CupyRuntime` is
made: planning, pinning and ordering run, and are tested, on machines without CUDA.
"""
