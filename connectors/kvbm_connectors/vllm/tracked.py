"""One request of the engine, as the scheduler half follows it: names, hits, loads and offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbm_common.identity import Extras, ExtraTag, Hasher, SequenceHash, request_extras

from kvbm_connectors.messages import Hit, OfferRun
from kvbm_connectors.vllm.engine_types import EngineRequest


def refusal_of_request(request: EngineRequest) -> str:
    """Why the blocks of a request have no names; `""` if they have."""
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        return "streaming_input"
    return ""


@dataclass(slots=True)
class Tracked:
    """A request and what is known of its blocks. Indices count blocks from its first token."""

    request: EngineRequest
    refused: str
    names: list[SequenceHash] = field(default_factory=list)
    """Of the first full blocks, as far as they were asked for."""
    local: int = 0
    """Blocks that the device's own prefix cache had when the request was last admitted."""
    hit: Hit = field(default_factory=lambda: Hit(0))
    loaded: tuple[int, int] = (0, 0)
    """First and end of the blocks that were loaded, or are being loaded."""
    lease: int | None = None
    """Of the load that is not over yet."""
    sync: bool = False
    offered: int = 0
    """All blocks before this one have been offered, or need not be."""
    offers: set[int] = field(default_factory=set)
    """Offers that are not over: as long as there are any, the blocks are held."""
    finished: bool = False

    def first_names(self, hasher: Hasher, count: int) -> list[SequenceHash]:
        """The names of the first `count` blocks. They must be full."""
        known = len(self.names)
        if count > known:
            size = hasher.namespace.block_tokens
            tokens = self.request.all_token_ids[known * size : count * size]
            self.names += hasher.chain(
                list(tokens),
                parent=self.names[-1] if self.names else None,
                extras=self._extras(known, count, size),
            )
        return self.names[:count]

    def _extras(self, first: int, end: int, size: int) -> Mapping[int, Extras]:
        """By block, counted from `first`. What vLLM's events say is tagged alike (naming.py)."""
        lora, salt = self.request.lora_request, self.request.cache_salt
        extras: dict[int, Extras] = {}
        if first == 0:
            extras |= request_extras(lora=lora.lora_name if lora is not None else None, salt=salt)
        for feature in self.request.mm_features or ():
            start = feature.mm_position.offset
            last = (start + feature.mm_position.length - 1) // size
            for block in range(max(first, start // size), min(end, last + 1)):
                text = f"{feature.identifier}:{start - block * size}"
                tagged = (ExtraTag.MULTIMODAL, text.encode())
                extras[block - first] = [*extras.get(block - first, ()), tagged]
        return extras

    def computed(self, block_tokens: int) -> int:
        """Full blocks whose content is there: every step that wrote them has ended."""
        request = self.request
        if self.lease is not None and (not self.sync or request.num_in_flight_tokens):
            return 0
        tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        return tokens // block_tokens

    def runs_to_offer(
        self,
        end: int,
        *,
        hasher: Hasher,
        blocks: list[int],
        is_known: Callable[[SequenceHash], bool],
    ) -> list[OfferRun]:
        """What is to be offered of the blocks before `end`: all but what was loaded, and what
        the device had and the host tier was offered before."""
        names = self.first_names(hasher, end)
        wanted = [
            index
            for index in range(self.offered, min(end, len(blocks)))
            if not self.loaded[0] <= index < self.loaded[1]
            and not (index < self.local and is_known(names[index]))
        ]
        self.offered = end
        runs: list[OfferRun] = []
        for first, after in _stretches(wanted):
            parent = names[first - 1] if first else hasher.root
            runs.append(OfferRun(parent, tuple(names[first:after]), tuple(blocks[first:after])))
        return runs


def _stretches(indices: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as (first, end).

    >>> _stretches([1, 2, 5])
    [(1, 3), (5, 6)]
    """
    stretches: list[tuple[int, int]] = []
    for index in indices:
        if stretches and stretches[-1][1] == index:
            stretches[-1] = (stretches[-1][0], index + 1)
        else:
            stretches.append((index, index + 1))
    return stretches
