"""Requests to the index: decoded, or refused with the field that is at fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import msgspec
from kvbm_common.errors import KvbmError
from kvbm_common.identity import (
    Hasher,
    IdentityError,
    Namespace,
    SequenceHash,
    hashes_from_hex,
    request_extras,
)
from kvbm_common.wire.codec import MESSAGE_BYTES_MAX, JsonCodec, WireError
from kvbm_common.wire.index_verbs import MatchRequest

HASHERS_MAX = 64
"""Namespaces whose hashers are kept."""

Request = TypeVar("Request")


class BadRequest(KvbmError):
    """A request that cannot be answered; `field` is at fault."""

    code = "bad_request"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ReplyTooLarge(KvbmError):
    """The answer does not fit in a message; ask for one source."""

    code = "reply_too_large"


def decoded(codec: JsonCodec[Request], payload: bytes) -> Request:
    """Decode a request; raises BadRequest that names the field where one is at fault."""
    try:
        return codec.decode(payload or b"{}")
    except WireError as error:
        raise BadRequest(str(error), error.field) from error


def hashes_of(
    request: MatchRequest, hasher_of: Callable[[Namespace], Hasher]
) -> Sequence[SequenceHash]:
    """Return the blocks that a request asks for, named by `hasher_of`; raises BadRequest."""
    if request.hashes is not None and request.tokens is not None:
        raise BadRequest("give hashes or tokens, not both", "tokens")
    try:
        if request.hashes is not None:
            return hashes_from_hex(request.hashes)
        if request.tokens is None:
            raise BadRequest("give hashes, or tokens with a namespace", "hashes")
        if request.namespace is None:
            raise BadRequest("tokens need a namespace", "namespace")
        extras = request_extras(lora=request.lora, salt=request.salt)
        found = _kept(hasher_of, request.namespace).chain(request.tokens, extras=extras)
        assert len(found) == len(request.tokens) // request.namespace.block_tokens, len(found)
        return found
    except IdentityError as error:
        raise BadRequest(str(error), "tokens" if request.hashes is None else "hashes") from error


@lru_cache(maxsize=HASHERS_MAX)
def _kept(hasher_of: Callable[[Namespace], Hasher], namespace: Namespace) -> Hasher:
    return hasher_of(namespace)


def encoded(reply: msgspec.Struct) -> bytes:
    """Encode a reply as it travels; raises ReplyTooLarge."""
    payload = msgspec.json.encode(reply)
    if len(payload) > MESSAGE_BYTES_MAX:
        raise ReplyTooLarge(f"{len(payload)} bytes; ask for one source, or for `holders`")
    return payload
