"""Messages of NATS as they arrive, and how they are cut out of the bytes that were read.

The protocol: https://docs.nats.io/reference/reference-protocols/nats-protocol. A message is a line
(`MSG` or `HMSG`, subject, subscription, perhaps a subject to reply to, sizes), perhaps a block of
headers, the payload, and the end of a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LINE_END = b"\r\n"
LINE_ENDS = len(LINE_END)
VERSION = b"NATS/1.0"
"""The first bytes of a block of headers."""


class RawMessage(NamedTuple):
    """A message as it arrived."""

    subject: str
    payload: bytes
    reply: str
    block: bytes = b""
    """The headers as they arrived; empty without any."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, and what the server says in the first line: `Status`, `Description`."""
        if not self.block:
            return {}
        first, *lines = self.block.decode("utf-8", "replace").split("\r\n")
        status = first[len(VERSION) :].split(maxsplit=1)
        found = dict(zip(("Status", "Description"), status, strict=False))
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                found[name.strip()] = value.strip()
        return found


def cut_front(data: bytes, at: int) -> tuple[bytes, list[RawMessage], int]:
    """Cut off the whole messages from here on for one subscription, until something else comes.

    Returns the subscription, its messages and where they end. No message: `at`.
    """
    subscription, messages = b"", list[RawMessage]()
    subject, named = b"", ""
    find, new, known, size = data.find, tuple.__new__, _NUMBERS, len(data)
    while (line_end := find(LINE_END, at)) >= 0:
        words = data[at:line_end].split(b" ")
        sizes = _SIZES.get(words[0], 0)
        replying = len(words) == 4 + sizes
        if not sizes or not (replying or len(words) == 3 + sizes):
            break
        begin = line_end + LINE_ENDS
        try:
            end = begin + (known.get(words[-1]) or int(words[-1]))
            cut = begin if sizes == 1 else begin + (known.get(words[-2]) or int(words[-2]))
        except ValueError:
            break
        if end + LINE_ENDS > size or (words[2] != subscription and messages):
            break
        subscription = words[2]
        if words[1] != subject:
            subject, named = words[1], words[1].decode()
        reply = words[3].decode() if replying else ""
        # Past the constructor, which is a function in Python.
        messages.append(new(RawMessage, (named, data[cut:end], reply, data[begin:cut])))
        at = end + LINE_ENDS
    return subscription, messages, at


_SIZES: Mapping[bytes, int] = {b"MSG": 1, b"HMSG": 2}
"""Kind of message → sizes at the end of its line."""
_NUMBERS: Mapping[bytes, int] = {b"%d" % number: number for number in range(4096)}
"""Sizes as they are written: to look one up takes less than to read it."""
