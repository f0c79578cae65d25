"""The name of an object says all that a journal would: which block it is, and how to verify it.

    <prefix>/v2/<namespace>/<hash>.<parent>.<bytes>.<parts>.<checksum>

or, sealed with the key that has this id (kvbm_disk_tier.shell.cipher), so that other keys'
objects are foreign:

    <prefix>/s2/<key id>/<namespace>/<hash>.<parent>.<bytes>.<parts>.<checksum>

Namespace, hashes and checksum in lower-case hex of full length, bytes and number of parts in
decimal. What lies under `v1` and `s1` is of an older format and is not looked at. A listing of a
bucket is thus its whole table, whichever host has stored what, and a complete object stays valid
without end: the name is derived from the content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from kvbm_common.identity import SequenceHash
from kvbm_common.tier.parts import is_divisible
from kvbm_common.tier.slots import Block

FORMAT = "v2"
SEALED_FORMAT = "s2"

_NAME = re.compile(
    r"(?P<namespace>[0-9a-f]{64})/(?P<hash>[0-9a-f]{32})\.(?P<parent>[0-9a-f]{32})"
    r"\.(?P<bytes>[1-9][0-9]{0,11})\.(?P<parts>[1-9][0-9]{0,4})\.(?P<checksum>[0-9a-f]{16})"
)

_FOLDER = re.compile(r"(?P<namespace>[0-9a-f]{64})/")


class KeyIds(Protocol):
    """The keys, by the namespaces that they seal."""

    def id_of(self, namespace: bytes) -> str | None:
        """Return the id of the key that seals a namespace; None: it has no key."""

    def ids(self) -> Sequence[str]:
        """Return the ids of all keys."""


class Names:
    """Names under one prefix, of plain objects or of sealed ones."""

    def __init__(self, prefix: str, keys: KeyIds | None = None) -> None:
        self._prefix = prefix
        self._keys = keys
        self.roots: tuple[str, ...] = (f"{prefix}/{FORMAT}/",)
        """Everything of ours begins with one of these."""
        if keys is not None:
            self.roots = tuple(f"{prefix}/{SEALED_FORMAT}/{key_id}/" for key_id in keys.ids())
        assert len(set(self.roots)) == len(self.roots), self.roots

    def _root_of(self, namespace: bytes) -> str | None:
        if self._keys is None:
            return self.roots[0]
        key_id = self._keys.id_of(namespace)
        return None if key_id is None else f"{self._prefix}/{SEALED_FORMAT}/{key_id}/"

    def may_name(self, block: Block) -> bool:
        """Tell whether a block can be an object: in a sealed store its namespace needs a key."""
        return self._root_of(block.namespace) is not None

    def name_of(self, block: Block) -> str:
        """Return the name of the object that holds this block, one that may be named."""
        root = self._root_of(block.namespace)
        assert root is not None, "no key"
        return (
            f"{root}{block.namespace.hex()}/{block.hash.hex()}.{block.parent.hex()}"
            f".{block.bytes}.{block.code}.{block.checksum:016x}"
        )

    def namespace_of(self, folder: str) -> bytes | None:
        """Return the namespace whose blocks lie in a folder; None: it is foreign."""
        root = next((root for root in self.roots if folder.startswith(root)), None)
        found = None if root is None else _FOLDER.fullmatch(folder, len(root))
        if found is None:
            return None
        namespace = bytes.fromhex(found["namespace"])
        return namespace if self._root_of(namespace) == root else None

    def block_of(self, name: str) -> Block | None:
        """Return the block that an object of this name holds; None: it is not ours."""
        root = next((root for root in self.roots if name.startswith(root)), None)
        if root is None:
            return None
        block = self._block_of(name, len(root))
        # It may lie under the key of another namespace: ours would not open it.
        return block if block is not None and self._root_of(block.namespace) == root else None

    def _block_of(self, name: str, start: int) -> Block | None:
        found = _NAME.fullmatch(name, start)
        if found is None or not is_divisible(int(found["bytes"]), int(found["parts"])):
            return None
        return Block(
            SequenceHash(bytes.fromhex(found["hash"])),
            SequenceHash(bytes.fromhex(found["parent"])),
            bytes.fromhex(found["namespace"]),
            int(found["checksum"], 16),
            int(found["bytes"]),
            int(found["parts"]),
        )
