"""Extra keys of SGLang: a request has one, its pages are its own, and its events do not say it.

With `"format":"dynamo"` SGLang's hashes hold the key, so that one can be told from none: the hash
of a prompt's first page is then another than what its tokens and its salt give.

    page      SHA-256(seed ‖ tokens, u32 LE)     no seed without a salt
    seed      SHA-256("sglang-cache-salt-v1" ‖ 0 ‖ salt)
    hash      its first 64 bits
    keyed     SHA-256(SHA-256(tag ‖ key ‖ salt) ‖ hash), its first 64 bits

In the default format only a salt is in a hash, and no key. A request with an adapter has the
adapter's id in its key, which no event says: the adapter's name stands for it.

The back end compares SGLang's own hashes with these when it attaches: see `Attach`.
"""

from __future__ import annotations

import hashlib

from kvbm_common.identity import IdentityError, pack_tokens
from kvbm_common.wire.engine_events import BlockStored

HASH_BYTES = 8
_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"


def unsaid_key(event: BlockStored) -> str:
    """Return what stands for the extra key of a prompt that begins with this event of SGLang's.

    It is the engine's hash of the first page. Empty: the event says all that the hash holds, or
    its prompt began before.
    """
    assert event.block_hashes, "an event without blocks is named"
    first = event.block_hashes[0]
    if event.parent is not None or event.lora_name or not isinstance(first, int):
        return ""
    try:
        tokens = pack_tokens(event.token_ids[: event.block_size])
    except IdentityError:
        return ""
    found = first.to_bytes(HASH_BYTES, "big")
    return "" if found in _hashes_without_key(tokens, event.cache_salt) else f"sglang:{found.hex()}"


def _hashes_without_key(tokens: bytes, salt: str | None) -> tuple[bytes, ...]:
    """Return what SGLang calls a prompt's first page without an extra key, in each format."""
    assert tokens, "a page has tokens"
    if not salt:
        return (_hash(tokens),)
    seed = hashlib.sha256(_SALT_TAG + salt.encode()).digest()
    default = _hash(seed + tokens)
    return default, _hash(_namespace(salt.encode()) + default)


def _namespace(salt: bytes) -> bytes:
    """Return the seed of hashes with a salt and no extra key, in the format `dynamo`."""
    assert salt, "a namespace is made of a salt"
    no_key = b"\x00"
    length = len(salt).to_bytes(8, "little")
    return hashlib.sha256(_NAMESPACE_TAG + no_key + b"\x01" + length + salt).digest()


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:HASH_BYTES]
