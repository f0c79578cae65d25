"""Names of blocks with images: which blocks an image is in, and where it begins there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from kvbm_common.identity import Extras, ExtraTag, Hasher, Namespace
from kvbm_connectors.vllm.tracked import Tracked

from tests.connectors.vllm.requests import Request

SALT = (ExtraTag.SALT, b"salt")


def image(name: str, start: int, length: int) -> Any:
    """vllm.multimodal.inputs.MultiModalFeatureSpec: an image's tokens in a prompt."""
    return SimpleNamespace(
        identifier=name, mm_position=SimpleNamespace(offset=start, length=length)
    )


def by_search(images: list[Any], tokens: int, size: int) -> dict[int, Extras]:
    """The extras of a prompt's full blocks, token by token."""
    found: dict[int, list[tuple[ExtraTag, bytes]]] = {0: [SALT]} if tokens >= size else {}
    for block in range(tokens // size):
        for one in images:
            start, end = one.mm_position.offset, one.mm_position.offset + one.mm_position.length
            if any(start <= token < end for token in range(block * size, (block + 1) * size)):
                text = f"{one.identifier}:{start - block * size}"
                found.setdefault(block, []).append((ExtraTag.MULTIMODAL, text.encode()))
    return cast("dict[int, Extras]", found)


def test_an_image_is_in_the_names_of_the_blocks_that_it_is_in() -> None:
    """Blocks of four tokens; an image has tokens 3 to 8, and another one token 9. So the first is
    in blocks 0, 1 and 2, the other in block 2. Block 3 goes on from them."""
    hasher = Hasher(Namespace(model="m", block_tokens=4))
    request = Request(all_token_ids=(5,) * 16, mm_features=[image("a", 3, 6), image("b", 9, 1)])
    extras: dict[int, Extras] = {
        0: [(ExtraTag.MULTIMODAL, b"a:3")],
        1: [(ExtraTag.MULTIMODAL, b"a:-1")],
        2: [(ExtraTag.MULTIMODAL, b"a:-5"), (ExtraTag.MULTIMODAL, b"b:1")],
    }
    assert Tracked(request, "").first_names(hasher, 4) == hasher.chain((5,) * 16, extras=extras)
    other = Request(all_token_ids=(5,) * 16, mm_features=[image("a", 3, 6), image("c", 9, 1)])
    names = Tracked(other, "").first_names(hasher, 4)
    assert names[:2] == Tracked(request, "").first_names(hasher, 2)
    assert names[2:] != Tracked(request, "").first_names(hasher, 4)[2:]


@given(
    size=st.integers(1, 5),
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=4),
    tail=st.integers(0, 12),
    steps=st.lists(st.integers(0, 40), max_size=4),
)
def test_names_have_the_images_that_a_search_finds(
    size: int, lengths: list[tuple[int, int]], tail: int, steps: list[int]
) -> None:
    """1. Images lie one after the other, with tokens between. 2. Names are asked for in steps.
    3. All together they are those with the extras that a search finds."""
    images, at = [], 0
    for number, (before, length) in enumerate(lengths):
        images.append(image(f"image{number % 2}", at + before, length))
        at += before + length
    tokens = tuple(range(at + tail))
    hasher = Hasher(Namespace(model="m", block_tokens=size))
    tracked = Tracked(Request(all_token_ids=tokens, mm_features=images), "", first_extras=(SALT,))
    count = len(tokens) // size
    for step in steps:
        tracked.first_names(hasher, min(step, count))
    expected = hasher.chain(tokens[: count * size], extras=by_search(images, len(tokens), size))
    assert tracked.first_names(hasher, count) == expected
