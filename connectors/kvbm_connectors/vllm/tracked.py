"""Tracked request of the engine, as the scheduler half follows it: names, hits, loads and offers.

vLLM puts a block's hash into its prefix cache when the step that computes the block is *scheduled*.
A request that is admitted in the same step gets such a block as a hit, although nothing has been
written to it yet. So the blocks that a request has been given count as computed only when a step
of its own has finished: steps finish in the order in which they were scheduled, and the step that
wrote a hit was scheduled no later than the first step of the request that hit it.

There is one exception: vLLM may preempt a request in the very `schedule` call that has allocated
and hashed blocks for it. No step ever writes those blocks, and they keep their hashes.
`written` says where they begin, so that the scheduler side takes them out of vLLM's cache. So it
does with blocks whose load a step waits for, when their request is aborted during that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvbm_common.identity import Extras, ExtraTag, Hasher, SequenceHash

from kvbm_connectors.core.messages import Hit, OfferRun
from kvbm_connectors.vllm.engine_types import EngineRequest, Feature
from kvbm_connectors.vllm.kv_groups import KvGroup

DECODED_BLOCKS = 8
"""Blocks that a request fills token by token before they are offered together: an offer costs the
engine's step as much as several blocks, and nothing can load them while the request is new. What
is left is offered when it ends."""


def refusal_of_request(request: EngineRequest) -> str:
    """Return why the blocks of a request have no names; `""` if they have."""
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        return "streaming_input"
    adapter = "" if request.lora_request is None else str(request.lora_request.lora_name)
    media = request.mm_features or ()
    identifiers = (one.identifier for one in media)
    if not all(map(_is_text, (request.cache_salt or "", adapter, *identifiers))):
        return "no_text"
    return "overlapping_media" if _overlap(media) else ""


def _overlap(media: Iterable[Feature]) -> bool:
    """Return whether two items have a token in common, as a video and its sound may. vLLM's hash of
    a block inside of both has the first alone: its device hits may be of another sound or video."""
    places = (one.mm_position for one in media)
    return any(one.offset + one.length > after.offset for one, after in pairwise(places))


def _is_text(text: str) -> bool:
    """Return whether a string can be encoded: JSON lets lone surrogates through."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


@dataclass(slots=True)
class Tracked:
    """A request and what is known of its blocks. Its groups have blocks of several sizes, so that
    positions in the sequence are numbers of tokens."""

    request: EngineRequest
    refused: str
    first_extras: tuple[tuple[ExtraTag, bytes], ...] = ()
    """Extras of the first block: salt, LoRA and generation (`request_extras.py`)."""
    names: dict[int, list[SequenceHash]] = field(default_factory=dict)
    """KV group → the names of its first full blocks, as far as they were asked for."""
    between: tuple[int, int, tuple[SequenceHash, ...]] = (0, 0, ())
    """Two tokens, and the names that were asked for between them."""
    local: int = 0
    """Tokens that the device's own prefix cache had when the request was last admitted."""
    left: int | None = None
    """Tokens at the end that it computes, although they might be loaded; None: not decided yet."""
    hit: Hit = field(default_factory=lambda: Hit(0))
    loaded: tuple[int, int] = (0, 0)
    """The tokens from which and up to which a load was made, or is being made."""
    loads_to: int = 0
    """The token up to which a load was made since the last admission."""
    unloadable: bool = False
    """A hit could not be loaded, or not as a whole: the request is computed."""
    gave_way: bool = False
    """Others were tried instead when it was last asked for."""
    lease: int | None = None
    """The lease of the load that is not over yet."""
    admitted: int | None = None
    """Tokens that the request was given (hits, loads) when a step first computed for it since its
    last admission; None until such a step is scheduled."""
    dispatched_tokens: int = 0
    """Tokens from the sequence's first on that hits or dispatched steps cover, drafts left out. A
    lower bound, as not every step is looked at; 0 from an admission to its first step."""
    step_tokens: int = 1
    """Tokens that each step makes at most, once the prompt is computed: drafts may be right."""
    decodes_from: int = 0
    """The tokens that there were when steps had been sent out for all of them: each new one is
    computed alone. 0 while more of the prompt is to be computed."""
    offered: int = 0
    """All blocks of the tokens before this one have been offered, or need not be."""
    offers: set[int] = field(default_factory=set)
    """Offers that are not over: as long as there are any, the blocks are held. A negative one waits
    after the mark of that number."""
    finished: bool = False
    boundaries: set[int] = field(default_factory=set)
    """Numbers of tokens at which other requests may hit, so that windows are held before them."""
    held: dict[int, dict[int, int]] = field(default_factory=dict)
    """Index of a group among the cached ones → index → device block, of blocks that leave their
    table before they can be offered: held until their step has ended."""
    looked_tokens: int = 0
    """Blocks of the tokens before this one were looked at, whether to hold them."""

    def first_names(self, hasher: Hasher, count: int) -> list[SequenceHash]:
        """Return the names of the first `count` blocks of a group, which must be full. Callers do
        not change the list."""
        names = self.names.setdefault(hasher.namespace.group, [])
        known = len(names)
        if count > known:
            size = hasher.namespace.block_tokens
            tokens = self.request.all_token_ids[known * size : count * size]
            names += hasher.chain(
                list(tokens),
                parent=names[-1] if names else None,
                extras=self._extras(known, count, size),
            )
        return names if len(names) == count else names[:count]

    def names_between(
        self, groups: Sequence[KvGroup], first: int, end: int
    ) -> tuple[SequenceHash, ...]:
        """Return the names of the blocks between two tokens, group after group.

        They are the same object as long as they are the same: a lookup that waits is asked for in
        each step, and long prompts have thousands.
        """
        if self.between[:2] != (first, end):
            names: list[SequenceHash] = []
            for group in groups:
                found = self.first_names(group.hasher, end // group.block_tokens)
                names += found[first // group.block_tokens :]
            self.between = first, end, tuple(names)
        return self.between[2]

    def _extras(self, first: int, end: int, size: int) -> Mapping[int, Extras]:
        """Return extras by block, counted from `first`, tagged as events are (hash_extras.py)."""
        is_first = first == 0 and self.first_extras
        extras: dict[int, Extras] = {0: self.first_extras} if is_first else {}
        for feature in self.request.mm_features or ():
            start = feature.mm_position.offset
            last = (start + feature.mm_position.length - 1) // size
            for block in range(max(first, start // size), min(end, last + 1)):
                text = f"{feature.identifier}:{start - block * size}"
                tagged = (ExtraTag.MULTIMODAL, text.encode())
                extras[block - first] = [*extras.get(block - first, ()), tagged]
        return extras

    def readmitted(self) -> None:
        """Forget what was computed: the engine admits the request (again)."""
        self.admitted, self.loads_to = None, 0
        self.dispatched_tokens = self.decodes_from = 0

    def load_begins(self, lease: int, end: int) -> None:
        """Note a load of the tokens before `end`, beyond those of the device."""
        self.lease, self.loads_to, self.loaded = lease, end, (self.local, end)

    def scheduled(self, tokens: int = 0, drafts: int = 0) -> None:
        """Note a step of `tokens` tokens, `drafts` of them drafts, before vLLM counts them."""
        request = self.request
        # Tokens in flight may be drafts, of this step's kind or of the step before, and rejected.
        may_be_rejected = drafts > 0 or self.step_tokens > 1
        self.step_tokens = 1 + drafts
        if self.admitted is None:
            self.admitted = request.num_computed_tokens
        in_flight = request.num_in_flight_tokens if may_be_rejected else 0
        certain = request.num_computed_tokens - in_flight
        self.dispatched_tokens = certain + tokens - drafts
        if self.dispatched_tokens < request.num_tokens:
            self.decodes_from = 0  # Not only at first: what a failed load left is computed again.
        elif not self.decodes_from:
            self.decodes_from = self.dispatched_tokens

    def steps_to_next_look(
        self, block_tokens: int, together: int = DECODED_BLOCKS, *, windows: bool = False
    ) -> int:
        """Return in how many steps of `step_tokens` at most the request is to be looked at: when
        the step that fills the last of its next blocks may have ended.

        So many decoded blocks are offered `together`. 0: the step that fills a block looks at the
        request, since it must hold the block. With `windows` each step with drafts does: several
        might pass a window's margin.
        """
        if self.step_tokens > 1 and windows:
            return 1
        dispatched = max(0, self.dispatched_tokens)
        full = dispatched // block_tokens
        until_full = (full + 1) * block_tokens - dispatched
        # An engine that plans ahead hears of a step's end when the next one is planned already.
        until_ended = 2 if self.request.num_in_flight_tokens else 1
        not_offered = full - self.offered // block_tokens
        # A few decoded ones wait for others; so many of them would go now if there were a table.
        waits = self.offers_decoded and not_offered < together
        if not self.refused and not_offered > 0 and not waits:
            return until_ended if together else min(until_ended, until_full)
        if not together:
            return until_full
        more = (together - 1) * block_tokens if self.decodes_from else 0
        return (until_full + more) // self.step_tokens + until_ended

    def steps_to_table(self, steps: int, block_tokens: int) -> int:
        """Return the least steps from `steps` on to one that begins a block, the only one with the
        request's table in some versions. With drafts each step may be."""
        if self.step_tokens > 1:
            return 1 if steps <= 2 else steps
        return steps + (1 - self.dispatched_tokens - steps) % block_tokens

    @property
    def offers_decoded(self) -> bool:
        """Tell whether all blocks that were not offered yet were computed token by token."""
        return 0 < self.decodes_from <= self.offered

    @property
    def written(self) -> int:
        """Return up to which token steps were sent out for a preempted request; tokens of a block
        that is not full may be missing."""
        # The last token of a request that decodes comes from the step that computed the one before.
        decoded = self.request.num_tokens - 1 if self.decodes_from else 0
        return max(0, self.dispatched_tokens, decoded)

    @property
    def waits_with_blocks(self) -> bool:
        """Return whether a load has brought blocks, or brings them, and no step has begun."""
        is_over = self.finished or self.unloadable
        return self.admitted is None and not is_over and self.holds_blocks

    @property
    def holds_blocks(self) -> bool:
        """Return whether the engine has device blocks for the request."""
        if self.lease is not None:
            return True
        return bool(self.offers) if self.finished else self.request.num_computed_tokens > 0

    def stop_at(self, tokens: int) -> None:
        """Have vLLM end a step there, and keep the recurrent state for prompts that share it."""
        assert tokens <= self.request.num_tokens, f"{tokens} of {self.request.num_tokens} tokens"
        boundary = self.request.shared_prefix_boundary
        self.request.shared_prefix_boundary = max(boundary, tokens)

    def computed(self) -> int:
        """Return the tokens whose KV is there: every step that wrote it has ended. Rejected
        speculative ones are not counted."""
        request = self.request
        if self.admitted is None or self.lease is not None:
            return 0
        tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        # Without a finished step of its own, even what the request was given may be unwritten.
        return tokens if tokens > self.admitted else 0

    def indices_to_offer(
        self,
        end: int,
        names: Sequence[SequenceHash],
        is_known: Callable[[SequenceHash], bool],
        block_tokens: int,
    ) -> Sequence[int]:
        """Return which of the blocks before `end` are to be offered: all but what was loaded, and
        what the device had and the host tier was offered before."""
        local, first = self.local // block_tokens, self.offered // block_tokens
        if self.offered >= max(self.local, self.loaded[1]):
            return range(first, end)  # The usual case: all of them were computed.
        return [
            index
            for index in range(first, end)
            if not self.was_loaded(index, block_tokens)
            and not (index < local and is_known(names[index]))
        ]

    def offer_again(self, hasher: Hasher, run: OfferRun) -> None:
        """Note that the blocks of a run, and those after it, are offered no longer."""
        names = self.names[hasher.namespace.group]
        first = names.index(run.hashes[0]) * hasher.namespace.block_tokens
        self.offered = min(self.offered, first)

    @property
    def hits_device(self) -> bool:
        """Return whether the engine's own cache gave it tokens when it was last admitted. Of those
        that fill no block a connector hears nothing before."""
        return self.admitted is not None and self.admitted > self.loads_to

    def was_loaded(self, index: int, block_tokens: int) -> bool:
        """Return whether a block came from the host tier."""
        return self.loaded[0] <= index * block_tokens < self.loaded[1]

    def take_held(self, at: int, end: int) -> dict[int, int]:
        """Take the held blocks before index `end` of the cached group at `at`, for an offer that
        keeps them held."""
        held = self.held.get(at, {})
        taken = {index: held.pop(index) for index in sorted(held) if index < end}
        if not held:
            self.held.pop(at, None)
        return taken


def users_of(requests: Iterable[Tracked], is_meant: Callable[[Any], bool]) -> Iterator[Tracked]:
    """Yield the requests that run, are not refused yet, and whose adapter is meant."""
    for one in requests:
        adapter = one.request.lora_request
        if adapter is not None and not one.refused and not one.finished and is_meant(adapter):
            yield one


def runs_to_offer(
    indices: Sequence[int],
    blocks: Mapping[int, int] | Sequence[int],
    names: Sequence[SequenceHash],
    root: SequenceHash,
) -> list[OfferRun]:
    """Return runs of consecutive blocks: `blocks` has the device block of each index."""
    runs: list[OfferRun] = []
    for first, after in _stretches(indices):
        parent = names[first - 1] if first else root
        if isinstance(blocks, Mapping):
            on_device = tuple(blocks[index] for index in range(first, after))
        else:
            on_device = tuple(blocks[first:after])
        runs.append(OfferRun(parent, tuple(names[first:after]), on_device))
    return runs


def _stretches(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers, as (first, end).

    >>> _stretches([1, 2, 5])
    [(1, 3), (5, 6)]
    """
    if isinstance(indices, range):
        return [(indices.start, indices.stop)] if indices else []
    stretches: list[tuple[int, int]] = []
    for index in indices:
        if stretches and stretches[-1][1] == index:
            stretches[-1] = (stretches[-1][0], index + 1)
        else:
            stretches.append((index, index + 1))
    return stretches
