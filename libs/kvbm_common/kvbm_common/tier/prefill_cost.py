"""The prefill cost: what an engine takes to compute tokens, as its connector has measured it.

A prompt token costs the same wherever it is, and a little more for each token before it, which it
attends to. A lookup says so, and a host tier compares it with what its loads take.
"""

from __future__ import annotations

import msgspec

NS_PER_MS = 1e6
FS_PER_MS = 1e12
MIB = 1 << 20


class PrefillCost(msgspec.Struct, frozen=True, array_like=True):
    """The cost of computing a token, and of copying bytes from host memory, for the engine.

    `before` tokens of the request are on the device, before the first block of the lookup.
    """

    token_ns: int
    pair_fs: int = 0
    """Additional time of a token for each token before it."""
    before: int = 0
    unused: int = 0
    """A time that earlier connectors send for each copy. No host tier uses it; the field keeps its
    place in the array."""
    load_mib_us: int = 0
    """Time to copy a MiB to the device, in microseconds."""
    start_us: int = 0
    """Time that each step takes beside its tokens, in microseconds."""
    step_tokens: int = 0
    """Tokens of a step at most; 0: not known."""

    @property
    def is_valid(self) -> bool:
        """Tell whether a peer's values are acceptable: nothing takes negative time."""
        copies = self.load_mib_us >= 0
        steps = min(self.start_us, self.step_tokens) >= 0
        return self.token_ns > 0 and min(self.pair_fs, self.before) >= 0 and copies and steps

    def compute_ms(self, first: int, end: int) -> float:
        """Return what the tokens from `first` to `end` of the lookup take to compute.

        A request computes some token in any case, so that one step has no start of its own.
        """
        assert 0 <= first <= end, f"tokens {first} to {end}"
        count = end - first
        pairs = (self.before + (first + end) / 2) * count
        steps = count // self.step_tokens if self.step_tokens else 0
        starts_ms = steps * self.start_us / 1000
        return starts_ms + count * self.token_ns / NS_PER_MS + pairs * self.pair_fs / FS_PER_MS

    def copy_ms(self, size: int) -> float:
        """Return what the bytes of more blocks take to be copied to the device."""
        assert size >= 0, f"a copy of {size} bytes"
        return size * self.load_mib_us / MIB / 1000
