"""Compare the names of blocks with images: the connector's, and those of vLLM's own events.

`python -m tests.vllm.multimodal_process SEEDS` draws so many prompts, and writes a JSON object:
`differ` lists the seeds whose names differ; `blocks` and `with_images` count what was compared;
`inside_of_both` is what vLLM hashes of a block that is inside of two items.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from kvbm_common.identity import Hasher, Namespace, SequenceHash, lora_extra, request_extras
from kvbm_common.wire.engine_events import BlockStored
from kvbm_connectors.consolidator.core.hash_extras import extras_of
from kvbm_connectors.vllm.tracked import Tracked

SIZES, TOKENS_MAX, IMAGES_MAX = (1, 4, 16), 90, 4
CONTENT, GENERATION = "00ff", "00000000000000f1"


def prompt(rng: random.Random) -> SimpleNamespace:
    """A prompt whose images lie one after the other, some without a token between them."""
    tokens = rng.randint(1, TOKENS_MAX)
    edges = sorted(rng.sample(range(tokens + 1), min(tokens + 1, 2 * rng.randint(0, IMAGES_MAX))))
    images = [
        SimpleNamespace(
            identifier=rng.choice("abc"),
            mm_position=SimpleNamespace(offset=start, length=end - start),
        )
        for start, end in zip(edges[::2], edges[1::2], strict=False)
    ]
    return SimpleNamespace(
        all_token_ids=[rng.randint(0, 1) for _ in range(tokens)],
        num_tokens=tokens,
        mm_features=images,
        lora_request=rng.choice((None, SimpleNamespace(lora_name="poet", lora_path="/poet"))),
        cache_salt=rng.choice((None, "salt")),
        prompt_embeds=None,
    )


def of_events(
    hasher: Hasher, request: SimpleNamespace, lora: str | None, *, tagged: bool
) -> list[SequenceHash]:
    """The names by what vLLM says in events: a prompt's blocks come in several. `tagged`: by the
    keys that it hashes, which newer events may have."""
    from vllm.v1.core import kv_cache_utils

    size, lora_request = hasher.namespace.block_tokens, request.lora_request
    without_tags = getattr(kv_cache_utils, "to_event_extra_keys", list)
    keys, at = list[Any](), 0
    for start in range(0, request.num_tokens // size * size, size):
        found, at = kv_cache_utils.generate_block_hash_extra_keys(
            cast("Any", request), start, start + size, at
        )
        keys += [found] if tagged else without_tags([found])
    names: list[SequenceHash] = []
    for first, end in _pieces(len(keys)):
        event = BlockStored(
            block_hashes=tuple(range(first, end)),
            parent=first - 1 if first else None,
            token_ids=tuple(request.all_token_ids[first * size : end * size]),
            block_size=size,
            lora_name=lora_request.lora_name if lora_request else None,
            extra_keys=tuple(keys[first:end]),
        )
        names += hasher.chain(
            list(event.token_ids),
            parent=names[-1] if names else None,
            extras=extras_of(event, lora=lora, generation=GENERATION),
        )
    return names


def of_connector(hasher: Hasher, request: SimpleNamespace, lora: str | None) -> list[SequenceHash]:
    """The names by which the connector asks and offers, as steps fill blocks."""
    extras = request_extras(lora=lora, salt=request.cache_salt, generation=GENERATION)
    tracked = Tracked(cast("Any", request), "", first_extras=tuple(extras[0]))
    count = request.num_tokens // hasher.namespace.block_tokens
    for _, end in _pieces(count):
        tracked.first_names(hasher, end)
    return tracked.first_names(hasher, count)


def _pieces(count: int) -> Sequence[tuple[int, int]]:
    """The first block, the two after it, the rest."""
    edges = sorted({0, min(1, count), min(3, count), count})
    return list(itertools.pairwise(edges))


def inside_of_both() -> list[str]:
    """The items that vLLM hashes of a block, of a video and its sound that are in the same tokens.

    With both of them `overlapping_media` need not be refused.
    """
    from vllm.v1.core import kv_cache_utils

    place = SimpleNamespace(offset=0, length=TOKENS_MAX)
    media = [SimpleNamespace(identifier=name, mm_position=place) for name in ("sound", "video")]
    request = SimpleNamespace(
        mm_features=media, lora_request=None, cache_salt=None, prompt_embeds=None
    )
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(cast("Any", request), 0, 16, 0)
    names = {item.identifier for item in media}
    # A tag, an identifier, an offset: where in a key the identifier stands depends on the version.
    parts = (part for key in keys or () for part in (key if isinstance(key, tuple) else (key,)))
    return [part for part in parts if part in names]


def compare(seeds: range) -> dict[str, Any]:
    """What was compared, and what differs."""
    differ, blocks, with_images = [], 0, 0
    for seed in seeds:
        rng = random.Random(seed)
        request, size = prompt(rng), rng.choice(SIZES)
        hasher = Hasher(Namespace(model="m", block_tokens=size))
        lora = None if request.lora_request is None else lora_extra("poet", CONTENT)
        names = of_connector(hasher, request, lora)
        blocks += len(names)
        with_images += bool(request.mm_features and names)
        said = [of_events(hasher, request, lora, tagged=tagged) for tagged in (False, True)]
        if said != [names, names]:
            differ.append(seed)
    return {"differ": differ, "blocks": blocks, "with_images": with_images}


def main() -> None:
    """vLLM writes to stdout too: the answer goes to a copy of it."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(compare(range(int(sys.argv[1]))) | {"inside_of_both": inside_of_both()}, ours)
    ours.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
