"""NKeys: Ed25519 keys as NATS writes them, made and used to sign a server's challenge.

A key is base32 of a prefix, the bytes and a CRC-16; see
https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/nkey_auth. The
seed stays in its file; a server's configuration has the public key only.
"""

from __future__ import annotations

import base64
import binascii
import os

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvbm_common.errors import KvbmError

SEED_BYTES = 32
_SEED = 18 << 3
"""The prefix whose first letter is S."""
KINDS = {"U": 20 << 3, "A": 0, "O": 14 << 3}
"""The prefixes of users, accounts and operators: the first letter of a public key."""


class BadKey(KvbmError):
    """A text that is no seed of an NKey. The text is not repeated."""

    code = "bad_key"


def make_seed(kind: str = "U") -> str:
    """Return the seed of a new key; of a user, unless another kind is wanted.

    >>> public_of(make_seed())[0], make_seed("A")[:2]
    ('U', 'SA')
    """
    prefix = KINDS[kind]
    first = bytes((_SEED | prefix >> 5, (prefix & 31) << 3))
    return _encode(first + os.urandom(SEED_BYTES))


def public_of(seed: str) -> str:
    """Return the public key of a seed; raises BadKey."""
    kind, key = _key_of(seed)
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return _encode(bytes((kind,)) + public)


def sign(seed: str, challenge: bytes) -> bytes:
    """Return the signature of a challenge; raises BadKey."""
    return _key_of(seed)[1].sign(challenge)


def _key_of(seed: str) -> tuple[int, Ed25519PrivateKey]:
    """Return the kind and the private key of a seed."""
    raw = _decode(seed.strip())
    if len(raw) != 2 + SEED_BYTES or raw[0] & 0xF8 != _SEED:
        raise BadKey("no seed of an NKey")
    kind = (raw[0] & 7) << 5 | raw[1] >> 3
    try:
        return kind, Ed25519PrivateKey.from_private_bytes(raw[2:])
    except UnsupportedAlgorithm as error:
        raise BadKey("the cryptography library of this machine has no Ed25519") from error


def _encode(raw: bytes) -> str:
    checked = raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(checked).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        checked = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError as error:
        raise BadKey("no base32 text") from error
    raw, crc = checked[:-2], checked[-2:]
    if binascii.crc_hqx(raw, 0).to_bytes(2, "little") != crc:
        raise BadKey("a letter is wrong, or missing")
    return raw
