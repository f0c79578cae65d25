"""Identity: one name for a block, the same in every process, engine, tier and router.

A block's name is its `SequenceHash`: 16 bytes that stand for the whole prefix up to and including
the block. Two blocks share a name only if every token before them, every extra (LoRA, salt,
multimodal content) and everything in the `Namespace` is equal.

    hash(block) = BLAKE2b-128(key = namespace digest, parent ‖ tokens as LE u32 ‖ extras)

    parent   the hash of the block before it; for the first block `Namespace.root`, the first 16
             bytes of the namespace digest
    tokens   exactly `Namespace.block_tokens` of them, so no separator is needed
    extras   each as: tag u8 ‖ length LE u32 ‖ bytes, in ascending order of (tag, bytes)

The hash is cryptographic and keyed on purpose: a prompt that hits another tenant's blocks cannot be
constructed. BLAKE2b is RFC 7693. Test vectors: docs/wire.md, checked by tests/libs.
"""

from __future__ import annotations

import hashlib
import json
import struct
from binascii import unhexlify
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import NewType, cast

import msgspec
import numpy as np

from kvbm_common.errors import KvbmError
from kvbm_common.tenant_tag import TENANT, TENANT_MAX, digest_end

SequenceHash = NewType("SequenceHash", bytes)
"""16 raw bytes in Python; 32 lower-case hex digits in JSON, HTTP and logs."""

HASH_BYTES = 16
DIGEST_BYTES = 32
"""Bytes of a namespace's digest."""
JSON_HASH_BYTES = 2 * HASH_BYTES + len('"",')
"""Bytes of one hash in a JSON array."""
UNPACKED_BYTES = 256 * HASH_BYTES
"""Bytes unpacked by one struct, which is twice as large and kept; numpy is as fast with more."""
TOKEN_BYTES = 4
BLOCK_TOKENS_MAX = 65_536
"""KVBM's and every engine's largest page is smaller, but beside recurrent layers vLLM makes blocks
of attention as large as a state."""
NUMBER_MAX = 2**63 - 1
"""The largest number in a namespace: events carry no larger one."""
_NUMBERS = (
    ("tensor_parallel", 1), ("pipeline_parallel", 1), ("group", 0), ("layers", 0), ("heads", 0),
    ("head_dim", 0),
)  # fmt: skip
"""A namespace's numbers, and the least that each may be."""
TEXT_MAX = 4096
"""Characters of a namespace's text: a model may be called by its path."""
FORMAT = 3
"""The version of the rules by which blocks are named, part of every namespace.

1: weights by file names, sizes and times; LoRA by name alone; no generation.
2: the parts of ranks one after the other, where they are ordered by layers and heads now.
A tier or bucket may still hold blocks of those times: their bytes may not be what a name of today
stands for.
"""
TENANT_FORMAT = 4
"""The version of a namespace that names its tenant: that of FORMAT, with `tenant`, and with a
digest that tells the tenant. Namespaces without a tenant keep their digests."""


class IdentityError(KvbmError):
    """A hash, namespace or token sequence that cannot be named."""

    code = "bad_identity"


class ExtraTag(IntEnum):
    """The kind of an extra. The numbers are part of the hash: never change or reuse one."""

    LORA = 1
    SALT = 2
    MULTIMODAL = 3
    EMBEDDING = 4
    """Reserved: requests with embeddings in place of tokens are refused."""
    GENERATION = 5
    OTHER = 255


Extras = Iterable[tuple[ExtraTag, bytes]]
"""Extras of one block. LoRA, salt and generation belong to the first block of a sequence (the chain
carries them on); multimodal and embedding digests to every block that holds some of their content.

A generation stands for the weights of one engine since they were last replaced while it runs. It
is an extra, not a field of the namespace: the host tier checks the namespace when an engine
attaches, and what the engine has lent and offered by then stays valid across a reset.
"""


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Everything that makes the bytes of two engines incompatible.

    `digest` keys the hash, so a match across namespaces cannot happen. It travels readable beside
    its digest, so that an operator can see *why* two engines do not share.
    """

    model: str
    block_tokens: int
    revision: str = ""
    dtype: str = "bfloat16"
    quantisation: str = ""
    layout: str = "LBHNC"
    """Physical layout; on CPU with its instruction-set packing, e.g. `LBHNC/avx512`."""
    group: int = 0
    """KV cache group of a hybrid model."""
    layers: int = 0
    heads: int = 0
    head_dim: int = 0
    tensor_parallel: int = 1
    """Where blocks are not cut by heads: how many tensor-parallel ranks hold other bytes."""
    pipeline_parallel: int = 1
    parts: str = ""
    """The cut of a block (`tier/parts.py`): ranges, layers of each, head groups, as `4x8x8`. Empty:
    a part for each rank."""
    format: int = FORMAT
    """The naming rules, so that names of another release are never found: TENANT_FORMAT with a
    tenant, else FORMAT."""
    tenant: str | msgspec.UnsetType = msgspec.UNSET
    """The tenant of these blocks (KVBM_TENANT): see `of_tenant`. Unset: no tenant by name."""

    def __post_init__(self) -> None:
        tenant = self.tenant
        wanted = FORMAT if tenant is msgspec.UNSET else TENANT_FORMAT
        if self.format != wanted:
            having = "" if tenant is msgspec.UNSET else " with a tenant"
            raise IdentityError(
                f"namespace.format is {self.format}, this release names {wanted}{having}"
            )
        if tenant is not msgspec.UNSET and not TENANT.fullmatch(tenant):
            raise IdentityError(
                f"namespace.tenant is {tenant[:80]!r}, must be 1 to {TENANT_MAX} letters, digits, "
                "'-' or '_'"
            )
        if not self.model:
            raise IdentityError("namespace.model must not be empty")
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise IdentityError(
                f"namespace.block_tokens is {self.block_tokens}, must be 1..{BLOCK_TOKENS_MAX}"
            )
        for field, least in _NUMBERS:
            if not least <= (number := getattr(self, field)) <= NUMBER_MAX:
                raise IdentityError(f"namespace.{field} is {number}, must be ≥ {least} and < 2^63")
        for field in ("model", "revision", "dtype", "quantisation", "layout", "parts"):
            if (length := len(getattr(self, field))) > TEXT_MAX:
                raise IdentityError(
                    f"namespace.{field} has {length} characters, must have ≤ {TEXT_MAX}"
                )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: BLAKE2b-256 of the fields as JSON (sorted keys, no spaces, UTF-8).

        With a tenant 20 bytes are the fields', and the end tells the tenant (`tenant_tag`).
        """
        return namespace_digest(self)

    @property
    def root(self) -> SequenceHash:
        """The parent of every first block."""
        return SequenceHash(self.digest[:HASH_BYTES])


def namespace_digest(namespace: Namespace) -> bytes:
    """Return the 32-byte digest of a namespace; see `Namespace.digest`."""
    fields: dict[str, object] = msgspec.structs.asdict(namespace)
    end = b""
    if namespace.tenant is msgspec.UNSET:
        del fields["tenant"]
    else:
        end = digest_end(namespace.tenant)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    size = DIGEST_BYTES - len(end)
    return hashlib.blake2b(text.encode(), digest_size=size, person=b"kvbm-namespace").digest() + end


def of_tenant(namespace: Namespace, tenant: str) -> Namespace:
    """Return the namespace of this tenant's blocks, which no other tenant shares; `""`: as it is.

    Raises IdentityError for a tenant with other letters than a name has.
    """
    if not tenant:
        return namespace
    return msgspec.structs.replace(namespace, tenant=tenant, format=TENANT_FORMAT)


class Hasher:
    """Names blocks of one namespace. Immutable and safe to share between threads."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.root = namespace.root
        self._base = hashlib.blake2b(key=namespace.digest, digest_size=HASH_BYTES)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block's token ids."""
        return self.namespace.block_tokens * TOKEN_BYTES

    def chain(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        parent: SequenceHash | None = None,
        extras: Mapping[int, Extras] | None = None,
    ) -> list[SequenceHash]:
        """Return the hashes of the full blocks of `tokens` (a last partial block has none).

        `parent` is the block before the first token, None for the start of a sequence. `extras`
        maps a block index, counted from the first token here, to that block's extras.
        """
        packed = pack_tokens(tokens)
        size = self.block_bytes
        # A tenth faster than slices: this loop is the price of every lookup and every event.
        pieces = struct.iter_unpack(f"{size}s", packed[: len(packed) // size * size])
        tails = {i: pack_extras(e) for i, e in extras.items()} if extras else {}
        if tails:
            pieces = ((piece + tails.get(i, b""),) for i, (piece,) in enumerate(pieces))
        previous: bytes = self.root if parent is None else check_hash(parent)
        hashes: list[bytes] = []
        copy, append = self._base.copy, hashes.append
        for (piece,) in pieces:
            state = copy()
            state.update(previous + piece)  # One call for two: a fifth of the whole.
            previous = state.digest()
            append(previous)
        assert len(hashes) == len(packed) // size, f"{len(hashes)} blocks of {len(packed)} bytes"
        return cast("list[SequenceHash]", hashes)


def request_extras(
    *, lora: str | None = None, salt: str | None = None, generation: str | None = None
) -> dict[int, Extras]:
    """Return the extras of a whole request, all in its first block.

    `lora` is what an engine calls an adapter and its content (`lora_extra`), `generation` is hex.
    An empty string is the same as None: absent.
    """
    first = [
        (tag, text.encode()) for tag, text in ((ExtraTag.LORA, lora), (ExtraTag.SALT, salt)) if text
    ]
    if generation:
        first.append((ExtraTag.GENERATION, bytes.fromhex(generation)))
    return {0: first} if first else {}


def lora_extra(name: str, content: str) -> str:
    """Return the value of a LoRA extra: an adapter's name and the digest of its content.

    >>> lora_extra("sql", "00ff")
    'sql@00ff'
    """
    return f"{name}@{content}"


def content_digest(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Return 16 bytes that stand for a block's tokens alone, whatever their salt and namespace.

    Only to say *why* two blocks have different names: nothing is found by it.
    """
    packed = pack_tokens(tokens)
    return hashlib.blake2b(packed, digest_size=HASH_BYTES, person=b"kvbm-content").digest()


def pack_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Pack token ids as little-endian u32. Raises IdentityError for ids outside 0..2**32-1."""
    if isinstance(tokens, memoryview) and tokens.format == "I":
        return tokens.tobytes()
    if isinstance(tokens, list | tuple):
        # A fifth of numpy's time; what it does not take is looked at below.
        try:
            return _token_packer(len(tokens))(*tokens)
        except struct.error:
            pass
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise IdentityError("tokens must be a flat sequence of integers")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFF_FFFF):
        raise IdentityError("token ids must be 0..4294967295")
    return ids.astype("<u4", copy=False).tobytes()


@lru_cache(maxsize=1024)
def _token_packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}I").pack


def pack_extras(extras: Extras) -> bytes:
    """Encode one block's extras, tagged and length-prefixed, in canonical order."""
    return b"".join(struct.pack("<BI", tag, len(value)) + value for tag, value in sorted(extras))


def check_hash(value: bytes) -> SequenceHash:
    """Return `value` as a SequenceHash; raises IdentityError unless it is 16 bytes."""
    if len(value) != HASH_BYTES:
        raise IdentityError(f"a sequence hash has {HASH_BYTES} bytes, got {len(value)}")
    return SequenceHash(value)


def hash_from_hex(text: str) -> SequenceHash:
    """Return the hash of 32 hex digits; raises IdentityError otherwise."""
    try:
        return check_hash(bytes.fromhex(text))
    except ValueError as error:
        raise IdentityError(f"not a hex sequence hash: {text[:64]!r}") from error


def hashes_to_hex(values: Iterable[SequenceHash]) -> list[str]:
    """Return many hashes as hex, 32 digits each."""
    return [value.hex() for value in values]


def hashes_from_hex(texts: Sequence[str]) -> list[SequenceHash]:
    """Return the hashes of many hex texts; raises IdentityError when one is malformed."""
    return unpack_hashes(packed_from_hex(texts))


def packed_from_hex(texts: Sequence[str]) -> bytes:
    """Return the hashes of many hex texts, back to back; raises IdentityError if one is bad."""
    try:
        packed = bytes.fromhex("".join(texts))
    except ValueError as error:
        raise IdentityError("a sequence hash has only hex digits") from error
    # `fromhex` skips blanks, so the sum is checked as well: no hash may shift into the next.
    if len(packed) != HASH_BYTES * len(texts) or not {*map(len, texts)} <= {2 * HASH_BYTES}:
        raise IdentityError("a sequence hash has 32 hex digits")
    return packed


def packed_from_json(text: bytes) -> bytes | None:
    """Return the hashes of a JSON array without blanks, back to back; None for any other text.

    It takes a quarter of the time of a decoder and `packed_from_hex`. `text` is valid JSON of some
    kind; other kinds than ours are for a decoder, which says why.
    """
    count, rest = divmod(len(text), JSON_HASH_BYTES)
    if count == 1:  # Half of what it takes to look at the layout of more.
        return _unhex(text[2:-2], 1) if text[:2] == b'["' and text[-2:] == b'"]' else None
    commas, quotes = _layout(count)
    if (
        rest != 1
        or text[::JSON_HASH_BYTES] != commas
        or text[1::JSON_HASH_BYTES] != quotes
        or text[JSON_HASH_BYTES - 1 :: JSON_HASH_BYTES] != quotes
    ):
        return None
    # If the sum is right, nothing but what stood in its place was deleted.
    return _unhex(text.translate(None, b'[",]'), count)


def _unhex(digits: bytes, count: int) -> bytes | None:
    try:
        packed = unhexlify(digits)
    except ValueError:
        return None
    return packed if len(packed) == HASH_BYTES * count else None


@lru_cache(maxsize=1024)
def _layout(count: int) -> tuple[bytes, bytes]:
    """Return what is at the ends of hashes in a JSON array: brackets with commas, and quotes."""
    return b"[" + b"," * (count - 1) + b"]", b'"' * count


def pack_hashes(values: Iterable[SequenceHash]) -> bytes:
    """Pack hashes back to back, 16 bytes each: how they travel on ZMQ."""
    packed = b"".join(values)
    assert len(packed) % HASH_BYTES == 0, f"{len(packed)} bytes: a value of these is no hash"
    return packed


def unpack_hashes(packed: bytes | bytearray) -> list[SequenceHash]:
    """Return the hashes that `pack_hashes` has packed; raises IdentityError on a partial hash."""
    size = len(packed)
    if size % HASH_BYTES:
        raise IdentityError(f"packed hashes must be a multiple of 16 bytes, got {size}")
    # Half the time of slices; this is most of what an event costs the index.
    if size <= UNPACKED_BYTES:
        return list(_unpacker(size)(packed))
    found: list[SequenceHash] = np.frombuffer(packed, dtype=_HASH).tolist()
    return found


@lru_cache(maxsize=UNPACKED_BYTES // HASH_BYTES + 1)
def _unpacker(size: int) -> Callable[[bytes | bytearray], tuple[SequenceHash, ...]]:
    return struct.Struct(f"{HASH_BYTES}s" * (size // HASH_BYTES)).unpack


_HASH = np.dtype(f"V{HASH_BYTES}")
"""The type whose items numpy turns into `bytes`."""
