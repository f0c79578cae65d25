"""The name of an object says all that a journal would: which block it is, and how to verify it.

    <prefix>/v1/<namespace>/<hash>.<parent>.<bytes>.<checksum>

Namespace, hashes and checksum in lower-case hex of full length, bytes in decimal. A listing of a
bucket is thus its whole table, whoever has stored what, and an object that is complete is valid
for ever: the name is derived from the content.
"""

from __future__ import annotations

import re

from kvbm_common.identity import SequenceHash
from kvbm_common.slots import Block

FORMAT = "v1"

_NAME = re.compile(
    r"(?P<namespace>[0-9a-f]{64})/(?P<hash>[0-9a-f]{32})\.(?P<parent>[0-9a-f]{32})"
    r"\.(?P<bytes>[1-9][0-9]{0,11})\.(?P<checksum>[0-9a-f]{16})"
)


class Names:
    """Names under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}/{FORMAT}/"
        """Everything of ours begins with this."""

    def name_of(self, block: Block) -> str:
        """The name of the object that holds this block."""
        return (
            f"{self.root}{block.namespace.hex()}/{block.hash.hex()}.{block.parent.hex()}"
            f".{block.bytes}.{block.checksum:016x}"
        )

    def block_of(self, name: str) -> Block | None:
        """The block that an object of this name holds; None: it is none of ours."""
        if not name.startswith(self.root):
            return None
        found = _NAME.fullmatch(name, len(self.root))
        if found is None:
            return None
        return Block(
            SequenceHash(bytes.fromhex(found["hash"])),
            SequenceHash(bytes.fromhex(found["parent"])),
            bytes.fromhex(found["namespace"]),
            int(found["checksum"], 16),
            int(found["bytes"]),
        )
