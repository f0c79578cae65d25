"""Codecs: encoding and decoding with a size limit and one error type."""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from kvbm_common.errors import KvbmError
from kvbm_common.wire import VERSION

Message = TypeVar("Message")

MESSAGE_BYTES_MAX = 8 * 1024 * 1024
"""No message is larger: it is what nats-server accepts at most without a warning."""

SOCKET_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
"""The largest message that a ZMQ socket takes. One a little above the bounds is refused and counted
as `oversized`; above this, ZMQ drops the connection without a word."""

_FIELD = re.compile(r"missing required field `(\w+)`|`\$\.(\w+)|^(namespace\.\w+)")
"""The parts of messages in which msgspec and Namespace name the field at fault."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes of a stranger. The last two are for text that is not UTF-8
and for a thousand nested lists."""
_REFUSALS = (*UNREADABLE, KvbmError)


class _Version(msgspec.Struct):
    v: int = VERSION


_Decoder = msgspec.json.Decoder[Message] | msgspec.msgpack.Decoder[Message]


class WireError(KvbmError):
    """A message that does not follow the wire: malformed, oversized or of an unknown version."""

    code = "bad_message"

    def __init__(self, message: str, *, kind: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field or _field_in(message)
        self.kind = kind
        """`malformed`, `oversized` or `version`: the label of the drop counter."""


class _Codec(Generic[Message]):
    """Messages of one type (or union of tagged types) in one format of msgspec."""

    def __init__(self, library: Any, type_: Any) -> None:
        self._decoder: _Decoder[Message] = library.Decoder(type_)
        self._encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder = library.Encoder()
        self._peek: _Decoder[_Version] = library.Decoder(_Version)

    def encode(self, message: Message) -> bytes:
        """Encode a message into bytes."""
        return self._encoder.encode(message)

    def decode(self, payload: bytes) -> Message:
        """Decode a message from bytes; raises WireError."""
        if len(payload) > MESSAGE_BYTES_MAX:
            text = f"{len(payload)} bytes, more than the {MESSAGE_BYTES_MAX} allowed"
            raise WireError(text, kind="oversized")
        try:
            return self._decoder.decode(payload)
        except _REFUSALS as error:
            raise _refused(payload, error, self._peek) from error


class JsonCodec(_Codec[Message]):
    """JSON, as it travels on NATS."""

    def __init__(self, type_: Any) -> None:
        super().__init__(msgspec.json, type_)


class MsgpackCodec(_Codec[Message]):
    """msgpack, as it travels on ZMQ inside a host."""

    def __init__(self, type_: Any) -> None:
        super().__init__(msgspec.msgpack, type_)


def _field_in(text: str) -> str:
    found = _FIELD.search(text)
    return next(filter(None, found.groups()), "") if found else ""


def _refused(payload: bytes, error: Exception, peek: _Decoder[_Version]) -> WireError:
    """Return the error of a payload that did not decode. Mixed releases must show as `version`."""
    try:
        version = peek.decode(payload).v
    except _REFUSALS:
        version = VERSION
    if version != VERSION:
        text = f"version {version}, this side speaks {VERSION}"
        return WireError(text, kind="version", field="v")
    return WireError(str(error), kind="malformed")
