"""Tracked request, as the leader follows it: names, priorities, promised blocks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbm_common.identity import Extras, ExtraTag, Hasher, SequenceHash, request_extras

from kvbm_connectors.core.messages import OfferRun
from kvbm_connectors.trtllm.protocols import BAD_PAGE, DEFAULT_PRIORITY, Request

MULTIMODAL = (
    "multimodal_hashes", "multimodal_positions", "multimodal_embedding", "mrope_rotary_cos_sin",
    "py_multimodal_data",
)  # fmt: skip
"""Fields of a request with images or sound. There are no hashes where the engine could not make
them: the placeholders in its tokens are those of every other image then."""
PROMPT_TUNING = ("prompt_vocab_size", "prompt_embedding_table")


def refusal_of_request(request: Request) -> str:
    """Return why the blocks of a request have no names: something gives its tokens another meaning.
    `""` if they have."""
    if getattr(request, "is_dummy_request", False):
        return "dummy"
    if getattr(request, "lora_task_id", None) is not None:
        return "lora"  # A number, which means another adapter in the next engine.
    if any(_has(request, name) for name in MULTIMODAL):
        return "multimodal"
    return "prompt_tuning" if any(_has(request, name) for name in PROMPT_TUNING) else ""


def _has(request: Request, name: str) -> bool:
    """Tell whether a field is set; none may also be 0, or an empty list or dictionary."""
    value = getattr(request, name, None)
    return bool(value) if isinstance(value, int | list | dict) else value is not None


def extras_of(request: Request) -> dict[int, Extras]:
    """Return the salt of a request, in the first block. Up to 1.2 a request shows only a 64-bit
    digest of it."""
    salt = getattr(request, "cache_salt", None)
    if salt:
        return request_extras(salt=salt)
    number = getattr(request, "cache_salt_id", None)
    if number is None:
        return {}
    return {0: [(ExtraTag.OTHER, b"cache_salt_id" + struct.pack("<Q", number))]}


@dataclass(slots=True)
class PromisedRequest:
    """A request and what is known of its blocks. Indices count blocks from its first token."""

    refused: str = ""
    names: list[SequenceHash] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    """Its device blocks, as far as the engine has reported them."""
    priorities: list[int | None] = field(default_factory=list)
    """The priorities of the same blocks; None: the engine has said nothing."""
    local: int = 0
    """Blocks that the device's own cache had."""
    promised: tuple[int, ...] = ()
    """Slots of the blocks after them, until a plan hands them out."""
    loaded: int = 0
    """The number of blocks that were handed out."""
    offers: set[int] = field(default_factory=set)
    finished: bool = False

    def cut(self, start: int, end: int, block_tokens: int) -> tuple[int, ...]:
        """Return the promised slots of the tokens from `start` to `end`; they are promised no more.

        The tokens are a beginning of what is promised, its end or all of it. A block is kept while
        some of its tokens are still counted on.
        """
        first = max(0, -(-start // block_tokens) - self.local)
        count = min(len(self.promised), end // block_tokens - self.local)
        if first >= count:
            return ()
        if first or count == len(self.promised):
            self.promised, cut = self.promised[:first], self.promised[first:]
        else:
            self.promised, cut = self.promised[count:], self.promised[:count]
            self.local += count
        return cut

    def first_names(
        self, hasher: Hasher, request: Request, tokens: Sequence[int], count: int
    ) -> list[SequenceHash]:
        """Return the names of the first `count` blocks, which must be full."""
        known, size = len(self.names), hasher.namespace.block_tokens
        if count > known:
            self.names += hasher.chain(
                list(tokens[known * size : count * size]),
                parent=self.names[-1] if self.names else None,
                extras=extras_of(request) if known == 0 else None,
            )
        return self.names[:count]

    def deserving(self, min_priority: int) -> int:
        """Return how many blocks come before the first one below this priority: the prefix
        counts."""
        if not min_priority:
            return len(self.table)
        below = (
            index
            for index, priority in enumerate(self.priorities)
            if (DEFAULT_PRIORITY if priority is None else priority) < min_priority
        )
        return next(below, len(self.priorities))

    def run_to_offer(self, hasher: Hasher, blocks: Sequence[int], first: int, end: int) -> OfferRun:
        """Return the blocks from `first` to `end`, or to the first of them that has no page, as a
        run."""
        bad = (index for index in range(first, end) if blocks[index] == BAD_PAGE)
        end = next(bad, end)
        parent = self.names[first - 1] if first else hasher.root
        return OfferRun(parent, tuple(self.names[first:end]), tuple(blocks[first:end]))
