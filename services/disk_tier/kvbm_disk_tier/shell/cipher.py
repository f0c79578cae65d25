"""Cipher: blocks at rest under AES-256-GCM, with a key per namespace.

A sealed slot is 4 KiB longer than the block's own:

    offset          size         field
    0               bytes        ciphertext
    bytes           16           tag
    slot_bytes + 16 12           nonce, random for each write

A sealed object is ciphertext, tag and nonce, without a gap.

The associated data are "kvbm-seal-2", namespace digest, sequence hash, bytes, checksum and number
of parts of the block: what was moved to another name does not open. The key of a namespace
is HKDF-SHA256(key, salt = none, info = "kvbm-seal-2" + namespace digest), so that two namespaces
never share one. What does not open (another key, another block, flipped bits) is a miss.

Only this module imports `cryptography`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from kvbm_common.errors import KvbmError
from kvbm_common.tier.slots import Block

from kvbm_disk_tier.shell.store_header import EXTRA_BYTES

TAG_BYTES = 16
NONCE_BYTES = 12
SEAL_BYTES = TAG_BYTES + NONCE_BYTES
"""The bytes by which an object is longer than its block."""
KEY_BYTES = 32
ID_BYTES = 8
_INFO = b"kvbm-seal-2"
_ID_INFO = b"kvbm-seal-2 id"
_SIZES = struct.Struct("<QQI")
_ENTRY = re.compile(r"(?:([0-9a-f]{8,64})=)?([0-9a-f]{64})")
ACCEPTS = (
    "64 hex digits, or NAMESPACE=64 hex digits, where NAMESPACE begins its digest "
    "(8 to 64 hex digits)"
)


class BadKeys(KvbmError):
    """The keys cannot be used; the text names the variable and what is accepted."""

    code = "bad_keys"


class Keys:
    """The keys that blocks are sealed with, by namespace. Never printed."""

    def __init__(self, by_prefix: Mapping[str, bytes]) -> None:
        """Hold keys of 32 bytes by the beginning of a namespace's digest.

        The key with the empty beginning is for all other namespaces.
        """
        # The longest beginning first: it says most.
        self._by_prefix = sorted(by_prefix.items(), key=lambda entry: -len(entry[0]))
        self._ciphers: dict[bytes, AESGCM | None] = {}
        self._ids: dict[bytes, str | None] = {}

    @classmethod
    def parse(cls, text: str, variable: str) -> Keys:
        """Parse entries with commas, blanks or line breaks between; raises BadKeys."""
        found: dict[str, bytes] = {}
        for number, entry in enumerate(filter(None, re.split(r"[\s,]+", text)), 1):
            matched = _ENTRY.fullmatch(entry.lower())
            if matched is None:
                # The entry itself may be a key with one digit too many: it is not shown.
                raise BadKeys(f"{variable}: entry {number} is not {ACCEPTS}")
            prefix = matched[1] or ""
            if prefix in found:
                raise BadKeys(f"{variable}: entry {number}: {prefix or 'the others'} have a key")
            found[prefix] = bytes.fromhex(matched[2])
        if not found:
            raise BadKeys(f"{variable} has no key; an entry is {ACCEPTS}")
        return cls(found)

    @classmethod
    def read(cls, path: Path, variable: str) -> Keys:
        """Read the keys in a file; raises BadKeys."""
        try:
            return cls.parse(path.read_text(encoding="ascii"), variable)
        except (OSError, UnicodeDecodeError) as error:
            raise BadKeys(f"{variable}: {path} cannot be read: {error}") from error

    def cipher(self, namespace: bytes) -> AESGCM | None:
        """Return the cipher of a namespace, or None if it has no key."""
        if namespace not in self._ciphers:
            self._ciphers[namespace] = self._derive(namespace)
        return self._ciphers[namespace]

    def id_of(self, namespace: bytes) -> str | None:
        """Return a name for the key of a namespace that reveals nothing of it; None: no key."""
        if namespace not in self._ids:  # A listing asks for every object.
            key = self._key(namespace)
            self._ids[namespace] = None if key is None else _id_of(key)
        return self._ids[namespace]

    def ids(self) -> list[str]:
        """Return the names of all keys, sorted."""
        return sorted({_id_of(key) for _, key in self._by_prefix})

    def _key(self, namespace: bytes) -> bytes | None:
        digest = namespace.hex()
        return next((key for prefix, key in self._by_prefix if digest.startswith(prefix)), None)

    def _derive(self, namespace: bytes) -> AESGCM | None:
        key = self._key(namespace)
        return None if key is None else AESGCM(_derived(key, _INFO + namespace, KEY_BYTES))


def _derived(key: bytes, info: bytes, length: int) -> bytes:
    return HKDF(SHA256(), length, salt=None, info=info).derive(key)


def _id_of(key: bytes) -> str:
    return _derived(key, _ID_INFO, ID_BYTES).hex()


def seal(keys: Keys, block: Block, plain: memoryview, sealed: memoryview) -> bool:
    """Seal a block into a slot of `slot_bytes + EXTRA_BYTES`; False: its namespace has no key.

    `plain` has at least the block's bytes, `sealed` is a whole sealed slot.
    """
    return _seal(keys, block, plain, sealed, _nonce_in_slot(sealed))


def unseal(keys: Keys, block: Block, sealed: memoryview, plain: memoryview) -> bool:
    """Open a sealed slot into a block's; False: it does not open, and `plain` is no block."""
    return _unseal(keys, block, sealed, plain, _nonce_in_slot(sealed))


def seal_object(keys: Keys, block: Block, plain: memoryview, sealed: memoryview) -> bool:
    """Seal a block into an object of `SEAL_BYTES` more; False: its namespace has no key."""
    return _seal(keys, block, plain, sealed, slice(-NONCE_BYTES, None))


def unseal_object(keys: Keys, block: Block, sealed: memoryview, plain: memoryview) -> bool:
    """Open a sealed object into a block; False: it does not open, and `plain` is no block."""
    return _unseal(keys, block, sealed, plain, slice(-NONCE_BYTES, None))


def _seal(keys: Keys, block: Block, plain: memoryview, sealed: memoryview, nonce_at: slice) -> bool:
    cipher = keys.cipher(block.namespace)
    if cipher is None:
        return False
    nonce = os.urandom(NONCE_BYTES)
    sealed[nonce_at] = nonce
    end = block.bytes + TAG_BYTES
    cipher.encrypt_into(nonce, plain[: block.bytes], _associated(block), sealed[:end])
    return True


def _unseal(
    keys: Keys, block: Block, sealed: memoryview, plain: memoryview, nonce_at: slice
) -> bool:
    cipher = keys.cipher(block.namespace)
    if cipher is None:
        return False
    nonce = bytes(sealed[nonce_at])
    end = block.bytes + TAG_BYTES
    try:
        cipher.decrypt_into(nonce, sealed[:end], _associated(block), plain[: block.bytes])
    except InvalidTag:
        return False
    return True


def _nonce_in_slot(sealed: memoryview) -> slice:
    start = len(sealed) - EXTRA_BYTES + TAG_BYTES
    return slice(start, start + NONCE_BYTES)


def _associated(block: Block) -> bytes:
    sizes = _SIZES.pack(block.bytes, block.checksum, block.code)
    return _INFO + block.namespace + block.hash + sizes
