"""Images: what goes in comes out, and a restored index with the rest of the stream is the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvbm_common.wire.events import Event
from kvbm_index.core.core import IndexCore
from kvbm_index.core.image import HolderImage, Image, ImageError, SourceImage, pack, unpack
from kvbm_index.core.messages import (
    EventsReceived,
    RegistryRead,
    Restored,
    SourceJoined,
    SourceKey,
    SourceLeft,
    Tick,
)

from tests.services.index.core.test_core import (
    KEY,
    Harness,
    Oracle,
    blocks,
    cleared,
    snapshot,
    stored,
)

STREAM = "2026-01-01"
"""When the stream was made."""


def restored(core: IndexCore) -> Harness:
    """Another replica, from the image of the first."""
    harness = Harness()
    harness.send(Restored(unpack(pack(core.image()))))
    return harness


def test_a_restored_index_is_equal_and_goes_on() -> None:
    first = Harness()
    first.send(EventsReceived((cleared(1), stored(2, 0, 1, 2, 7, 8)), 17, STREAM))
    second = restored(first.core)
    assert second.core.dump() == first.core.dump()
    assert second.core.positions() == {KEY: (1, 2)}
    assert (second.core.position, second.core.image().stream) == (17, STREAM)
    second.events(stored(3, 3))
    assert [found.blocks for found in second.core.match(blocks(0, 1, 2, 3, 4))] == [4]


def test_who_was_behind_is_asked() -> None:
    """1. Events wait after a hole. 2. They are not in the image: the source is asked."""
    first = Harness()
    first.events(cleared(1), stored(2, 1), stored(4, 3))
    second = restored(first.core)
    assert second.tick(500) != []
    second.snapshot(snapshot(4, 1, 3))
    assert second.held() == set(blocks(1, 3))


def test_a_source_in_an_epoch_from_the_future_is_not_restored() -> None:
    """What the message of a forger has done ends with the next start."""
    holder = HolderImage(host="h", source="a", tier="host", rank=0, group=0, segments=[])
    sources = [
        SourceImage(
            host="h", source=name, epoch=epoch, seq=1, state="CURRENT", needs_snapshot=False
        )
        for name, epoch in (("a", 2**62), ("b", 7))
    ]
    other = msgspec.structs.replace(holder, source="b")
    image = Image(stream="s", position=1, sources=sources, holders=[holder, other])
    kept = image.up_to_epoch(7)
    assert (kept.sources, kept.holders) == (sources[1:], [other])
    assert image.up_to_epoch(2**62) is image


def test_who_does_not_register_again_is_dead() -> None:
    first = Harness()
    first.events(cleared(1), stored(2, 1))
    second = restored(first.core)
    second.send(RegistryRead())
    second.tick(5_001)
    assert second.held() == set()


def test_who_is_gone_stays_gone() -> None:
    first = Harness()
    first.events(cleared(1), stored(2, 1))
    first.send(SourceLeft(KEY, 1))
    second = restored(first.core)
    assert second.core.positions() == {}
    second.events(stored(3, 2))
    assert second.core.behind() == [KEY]


@pytest.mark.parametrize("content", [b"", b"\x00", b"\x81\xa1v\x02", b"garbage" * 9])
def test_other_bytes_are_no_image(content: bytes) -> None:
    with pytest.raises(ImageError):
        unpack(content)


@given(st.integers(0, 60))
def test_a_torn_image_is_no_image(length: int) -> None:
    harness = Harness()
    harness.events(cleared(1), stored(2, 1, 2, 3))
    whole = pack(harness.core.image())
    with pytest.raises(ImageError):
        unpack(whole[:length])


def garbled(change: Callable[[dict[str, Any]], None]) -> bytes:
    """An image of two sources, one of them gone, with a change."""
    harness = Harness()
    harness.send(EventsReceived((cleared(1), stored(2, 1, 2, 3)), 17, STREAM))
    harness.send(EventsReceived((msgspec.structs.replace(cleared(1), source="s2"),), 18, STREAM))
    harness.send(SourceLeft(SourceKey("h", "s2"), 1))
    raw = msgspec.msgpack.decode(pack(harness.core.image()))
    change(raw)
    return msgspec.msgpack.encode(raw)


GARBLES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a source twice": lambda raw: raw["sources"].append(raw["sources"][0]),
    "a holder twice": lambda raw: raw["holders"].append(raw["holders"][0]),
    "unknown state": lambda raw: raw["sources"][0].update(state="zz"),
    "holds less": lambda raw: raw["sources"][0].update(hollow=True),
    "not there": lambda raw: raw["holders"][0].update(source="s2"),
    "and holds blocks": lambda raw: raw["sources"].pop(0),
    "no stream": lambda raw: raw.update(stream=""),
    "position": lambda raw: raw.update(position=-1),
    "epoch": lambda raw: raw["sources"][0].update(epoch=-1),
    "seq": lambda raw: raw["sources"][0].update(seq=2**63),
    "source`": lambda raw: raw["sources"][0].update(source="a\n"),
    "rank": lambda raw: raw["holders"][0].update(rank=2**64 - 1),
    "length": lambda raw: raw.update(sources=raw["sources"] * 2049),
    "`str`, got": lambda raw: raw["sources"][0].update(state=7),
}
"""What is wrong, as the error says it."""


@pytest.mark.parametrize("what", GARBLES)
def test_a_garbled_image_is_no_image(what: str) -> None:
    """An index starts without it, as without a damaged one, and asserts nothing of it."""
    with pytest.raises(ImageError, match=what):
        unpack(garbled(GARBLES[what]))


@pytest.mark.parametrize("seed", range(200))
def test_an_image_with_wrong_bytes_is_refused_or_lived_with(seed: int) -> None:
    """Some byte of it is another one: whatever is believed of it, the index goes on."""
    draw = random.Random(seed)
    content = bytearray(garbled(lambda _: None))
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    try:
        image = unpack(bytes(content))
    except ImageError:
        return
    harness = Harness()
    harness.send(Restored(image))
    harness.events(stored(3, 4), stored(4, 5, 6))
    harness.tick(10_000)
    harness.core.image()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_killed_anywhere_it_comes_back_equal(seed: int) -> None:
    """Goal: an index that is killed again and again is, block for block, one that never died.

    1. Three sources change; now and then an image is taken. 2. At any moment the index dies; the
    next one has the newest image and reads the stream from its position. 3. Both say the same.
    """
    rng = random.Random(seed)
    oracles = [Oracle(f"s{number}") for number in range(3)]
    stream: list[Event] = [oracle.begin(1) for oracle in oracles]
    immortal, mortal = Harness(), Harness()
    taken = pack(mortal.core.image())
    for _ in range(40):
        stream += [rng.choice(oracles).change(rng) for _ in range(rng.randint(1, 5))]
        for harness in (immortal, mortal):
            rest = tuple(stream[harness.core.position :])
            harness.send(EventsReceived(rest, len(stream), STREAM))
        assert mortal.core.dump() == immortal.core.dump()
        assert mortal.core.positions() == immortal.core.positions()
        if rng.random() < 0.3:
            taken = pack(mortal.core.image())
        if rng.random() < 0.4:
            mortal = Harness()
            mortal.send(Restored(unpack(taken)))
    for oracle in oracles:
        key = SourceKey("h", oracle.name)
        for harness in (immortal, mortal):
            harness.send(SourceJoined(key, oracle.epoch))
            harness.send(Tick())
            harness.send(
                EventsReceived(tuple(stream[harness.core.position :]), len(stream), STREAM)
            )
    assert mortal.core.dump() == immortal.core.dump()
