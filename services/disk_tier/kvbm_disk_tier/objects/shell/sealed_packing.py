"""Sealed objects: ciphertext, tag and nonce, as `kvbm_disk_tier.shell.cipher` has them.

Apart from `packing`, because who does not seal needs no library for it.
"""

from __future__ import annotations

import numpy as np
from kvbm_common.tier.slots import Block

from kvbm_disk_tier.objects.core.packing import Bytes, Unpacked
from kvbm_disk_tier.shell.cipher import SEAL_BYTES, Keys, seal_object, unseal_object


class Sealed:
    """An object is its block, sealed."""

    extra_bytes = SEAL_BYTES

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def pack(self, source: Bytes, packed: Bytes, block: Block) -> bool:
        # A copy first: what is summed up and what is sealed must be the same bytes.
        plain = source.copy()
        if block.sums_in(plain) is None:
            return False
        return seal_object(self._keys, block, plain.data, packed.data)

    def unpack(self, packed: Bytes, block: Block) -> Unpacked | None:
        plain = np.empty(block.bytes, dtype=np.uint8)
        if not unseal_object(self._keys, block, packed.data, plain.data):
            return None
        sums = block.sums_in(plain)
        return None if sums is None else (plain, sums)
