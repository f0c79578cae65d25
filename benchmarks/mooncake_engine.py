"""The engine process of Mooncake's arm: as tests.vllm.engine_process, with an event for CPUs.

vLLM's connector to Mooncake's store waits for a CUDA event before it reads the KV cache. On a CPU
the step has computed everything by then, and torch without CUDA has no such event.
"""

from __future__ import annotations


class ReachedEvent:
    """An event of a device that is never behind."""

    def record(self) -> None:
        """Note nothing: the step has ended."""

    def synchronize(self) -> None:
        """Wait for nothing."""


def main() -> None:
    """Give torch the event, and serve."""
    import torch

    torch.cuda.Event = ReachedEvent

    from tests.vllm import engine_process

    engine_process.main()


if __name__ == "__main__":
    main()
