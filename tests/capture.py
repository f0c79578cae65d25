"""The capture of a real vLLM's event stream in tests/golden, and what was asked of it.

The `.kvcap` file: `KVCAP1\\n`, then records of u64 LE receive time (ns), u8 number of frames, and
per frame u32 LE length and bytes. The requests are the ground truth: 240 of them, with tokens and
salts, from vLLM 0.32.0 on CPU with 64 device blocks of 32 tokens.
"""

from __future__ import annotations

import gzip
import struct
from functools import cache
from pathlib import Path

import msgspec
from kvbm_common.identity import Namespace

DIRECTORY = Path(__file__).parent / "golden" / "vllm_events"
MAGIC = b"KVCAP1\n"
NAMESPACE = Namespace(model="tiny", block_tokens=32)
DEVICE_BLOCKS = 64


class Usage(msgspec.Struct, frozen=True):
    """The part of a request's accounting that we read."""

    class Details(msgspec.Struct, frozen=True):
        """How much of the prompt vLLM found in its cache."""

        cached_tokens: int

    prompt_tokens_details: Details


class Request(msgspec.Struct, frozen=True):
    """One request and its outcome; times are wall clock, ns."""

    n: int
    start_ns: int
    end_ns: int
    cache_salt: str | None
    prompt: list[int]
    output: list[int]
    usage: Usage

    @property
    def computed(self) -> list[int]:
        """The tokens whose keys and values exist: the last one was never fed back."""
        return (self.prompt + self.output)[:-1]

    @property
    def cached_blocks(self) -> int:
        """Blocks that vLLM found in its cache."""
        return self.usage.prompt_tokens_details.cached_tokens // NAMESPACE.block_tokens


@cache
def load_messages() -> list[tuple[int, list[bytes]]]:
    """Every published message: receive time (ns) and frames."""
    data = (DIRECTORY / "tiny_bs32_blocks64.kvcap").read_bytes()
    assert data.startswith(MAGIC)
    offset, messages = len(MAGIC), []
    while offset < len(data):
        received_ns, frame_count = struct.unpack_from("<QB", data, offset)
        offset += 9
        frames = []
        for _ in range(frame_count):
            (length,) = struct.unpack_from("<I", data, offset)
            frames.append(data[offset + 4 : offset + 4 + length])
            offset += 4 + length
        messages.append((received_ns, frames))
    return messages


@cache
def load_requests() -> list[Request]:
    """The ground truth, in the order of the requests."""
    lines = gzip.decompress((DIRECTORY / "tiny_bs32_blocks64.requests.jsonl.gz").read_bytes())
    return [msgspec.json.decode(line, type=Request) for line in lines.splitlines()]
